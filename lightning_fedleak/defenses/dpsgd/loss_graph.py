"""Checks that a loss is a mean over samples of terms that depend on one sample each.

Clipping bounds a sample's addend only if the sample's gradient does not depend on the others in the
batch. Three checks of the autograd graph, before backward, follow gradients and nothing else. They
find mistakes, and prove nothing about a loss that was built to pass them.

- *form*, in every step: from the loss down to the outputs of layers, the reduction is a mean over
  equally many terms of every sample. A token mean is not, where samples have different numbers of
  labels. If it is all of the loss and a sample's labels are adjacent, :attr:`LossCheck.weights`
  makes each sample's gradient that of its own mean; with another term it is refused. An unknown
  operation above the mean may pass where it keeps the number of terms; then the next check is made
  in that step.
- *loss*, whenever layers are used in a new way or the loss has a new :attr:`~LossCheck.form`, and
  now and then: each operation from the mean down to the layers works on one sample's numbers at a
  time. Where that does not follow from its name, the second derivative between one sample's output
  and the others' must be zero, which it is not for contrastive losses. It takes several times the
  memory of the logits, so it is not computed always.
- *network*, in the same steps: the gradient of one sample's output is zero in all rows of all
  layers that are taken for other samples' rows. It is not where samples are mixed (attention over
  the batch, batch statistics), or where the first dimension of a layer's output counts something
  else.

What reaches a sample's term without a gradient is not found: detached statistics of the batch
(whitening by a detached mean, buffers, negatives without gradient), and factors with several
elements that need no gradient, as ``mask / mask.sum()``, which looks like weights of each sample.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.recorder import Call, Layout, Recorder
from lightning_fedleak.defenses.processes import Team, unshard, whole_layers
from lightning_fedleak.model.batches import IGNORE_INDEX

CHECK_EVERY = 100  # releases; costly checks recur after 1, 2, 4, ... and then so many. Not tuned

StepForm = tuple[frozenset[tuple[str, Layout]], frozenset[tuple[str, str]]]
"""How layers were used in a step, and the operations of its loss."""

MEND = (
    "Return `mean_of_sample_means(logits, labels, causal=...)` (from lightning_fedleak.defenses) "
    "from training_step, or another mean over samples of each sample's own mean. If you have "
    "proved that your loss is one, pass DPSGD(clip=ClipSettings(loss='trusted'))."
)
_SHAPES = {
    "AliasBackward0",
    "CloneBackward0",
    "NegBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "StackBackward0",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
_SUMS = {"AddBackward0", "SubBackward0"}
_SCALES = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_LIKELIHOODS = {"NllLossBackward0", "NllLoss2DBackward0"}
_ELEMENTWISE = {
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "HuberLossBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
}
_ROWWISE = {"AbsBackward0", "PowBackward0", "SliceBackward0", "UnsafeViewBackward0"}
_SELECTIONS = {"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0", "TakeBackward0"}
_STEPS = (
    *("Abs", "Clamp", "Hard", "LeakyRelu", "Max", "Min", "NanToNum", "Prelu", "Relu", "Rrelu"),
    *("Sign", "Softshrink", "Threshold", "Where"),
)
"""Prefixes of operations whose slope depends on the batch, which no second derivative shows."""
_REENTRANT = "CheckpointFunctionBackward"
_MEAN = 1  # torch's number of the reduction "mean"
_DIMENSIONS = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1")
_CHECKPOINTING = (
    "DPSGD: gradient checkpointing with use_reentrant=True hides whether samples are mixed. Use "
    'gradient_checkpointing_enable({"use_reentrant": False}).'
)


class LossCheck:
    """Checks of the loss: its form in every step, the graph when something is new and at times.

    A number that scales the loss, a Python number or a float64 tensor without dimensions, must not
    change from step to step, because ``mask.sum().item()`` is one too. A factor with several
    elements may be anything that needs no gradient.

    Args:
        trusted: whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        unchecked: whether something in the step since the last release was new.
        separate: whether the last loss's operations show that samples stay separate.
        weights: (B,) by which each sample's gradient becomes that of its own mean; None for ones.
        terms: The terms of which the loss is a mean: samples, or where there are weights labels.
        form: pairs of the last loss's operations down to the layers, each with the one above it,
            and the dimensions that they work along.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self.unchecked = self.separate = False
        self.weights: Tensor | None = None
        self.terms = 0
        self.form: frozenset[tuple[str, str]] = frozenset()
        self._trusted = trusted
        self._means: list[Tensor | None] = []
        self._constants: dict[str, float] = {}
        self._checked_forms: set[StepForm] = set()
        self._next_check, self._interval = 0, 1  # releases

    def is_due(self, releases: int) -> bool:
        """Return whether the next release is to be checked for what is checked now and then."""
        return self.unchecked or releases % CHECK_EVERY == 0

    def check_form(self, loss: Tensor, calls: Sequence[Call], samples: int) -> list[Call]:
        """Follow the graph down to the layers, and return the calls that the loss is directly of.

        Args:
            loss: scalar with a graph.
            calls: The calls of layers in this step.
            samples: B, at least 1.

        Raises:
            DefenseError: its form is not known to be a mean over equal numbers of terms.
        """
        if self._trusted:
            self.separate, self.terms = True, samples
            return outputs_of(loss, calls)
        _refuse_if(loss.numel() != 1 or loss.grad_fn is None, "it is not one number with a graph")
        start = under_ddp(loss)
        first = start.grad_fn if isinstance(start, Tensor) else start.node
        assert first is not None
        outputs = {call.edge.node: call for call in calls}
        top: dict[int, Call] = {}
        visited: set[tuple[Node, bool]] = set()
        self.separate, self.weights = True, None
        self._means.clear()
        form: set[tuple[str, str]] = set()
        stack: list[tuple[Node, bool, str, str]] = [(first, False, "", "")]
        while stack:
            node, reduced, path, above = stack.pop()
            name = node.name()
            label = f"layer {outputs[node].name}" if node in outputs else _signature(node, name)
            form.add((above, label))
            if (node, reduced) in visited:
                continue
            visited.add((node, reduced))
            if node in outputs:
                reason = "a layer's output reaches the loss without a mean over samples"
                _refuse_if(not reduced, reason)
                top[id(node)] = outputs[node]
                continue
            if name.startswith(_REENTRANT):
                raise DefenseError(_CHECKPOINTING)
            reason = (
                "a parameter enters the loss other than through its layer (a penalty on weights "
                "belongs into the optimizer's weight_decay)"
            )
            _refuse_if(name.endswith("AccumulateGrad"), reason)
            if reduced or name in _LIKELIHOODS | _ELEMENTWISE:
                self.separate = self.separate and _keeps_apart(node, name, samples)
            reduced = self._passes(node, name, reduced, samples, path)
            for index, (below, _) in enumerate(node.next_functions):
                if below is not None:
                    stack.append((below, reduced, f"{path}/{name}.{index}", label))
        self.form = frozenset(form)
        self.weights = _weights(self._means, samples, ordered=self.separate)
        [counted] = self._means if self.weights is not None else [None]
        self.terms = samples if counted is None else int(counted.sum())
        return list(top.values())

    def check_graph(
        self, loss: Tensor, top: Sequence[Call], recorder: Recorder, releases: int, team: Team
    ) -> None:
        """Check that neither network nor loss mixes samples, if it is time to.

        All processes of the client check where one of them has to, because backward may be a
        collective. What a check found, and whether NaN left it anything to see, changes no later
        step: when checks recur would tell what an example holds.

        Args:
            loss: as in :meth:`check_form`, which comes first.
            top: what that returned.
            recorder: The recorder, which holds the calls of this step's layers.
            releases: how many were made.
            team: the processes of this client.

        Raises:
            DefenseError: samples are mixed.
        """
        layouts = frozenset((call.name, call.layout) for call in recorder.calls if call.trained)
        form = layouts, self.form
        is_new = form not in self._checked_forms or releases >= self._next_check
        new = recorder.counts and is_new
        due = new and recorder.samples > 1
        new, due, joint = map(bool, team.largest([new, due, not self.separate]))
        self.unchecked = self.unchecked or new
        if not due:
            return
        with team.together(), recorder.paused():
            check_isolation(
                under_ddp(loss),
                top,
                recorder.calls,
                recorder.samples,
                separate=not joint,
                # FSDP2 shards them after any backward, and not all of them know of the next one.
                restore=functools.partial(unshard, whole_layers(recorder.root)),
            )
        if releases >= self._next_check:
            self._next_check = releases + self._interval
            self._interval = min(2 * self._interval, CHECK_EVERY)
        if recorder.samples > 1:
            self._checked_forms.add(form)

    def _passes(self, node: Any, name: str, reduced: bool, samples: int, path: str) -> bool:
        """Return whether a mean has been taken at this node; raise an error if it breaks one."""
        if name in _SCALES:
            self._check_scale(node, f"{path}/{name}", samples)
        if name in _SUMS:
            self._check_constant(f"{path}/{name}", float(node._saved_alpha))
        if reduced:
            reason = "selects terms before the mean, and it is not known how many of each sample"
            _refuse_if(name in _SELECTIONS, f"{name} {reason}")
            return True
        if name in _LIKELIHOODS:
            self._means.append(_label_counts(node, samples))
            return True
        if name in _ELEMENTWISE:
            self._means.append(None)
            _check_mean(node._saved_reduction == _MEAN, node._saved_self.shape, samples, name)
            return True
        if name == "MeanBackward0":
            shape = node._saved_self_sym_sizes
            if len(shape) and shape[0] != 1:
                if any(below is not None and _scalar(below) for below, _ in node.next_functions):
                    return False
                _check_mean(True, shape, samples, name)
                self._means.append(None)
                return True
            return bool(samples == 1 and len(shape))
        if name in _SHAPES | _SUMS | _SCALES:
            return False
        if _keeps_numbers(node, name):
            self.separate = False
            return False
        if name.startswith("CompiledFunction"):
            raise _unknown(
                "torch.compile has compiled it. Compile the model's blocks, and not training_step"
            )
        raise _unknown(f"{name} stands between the loss and its mean over samples")

    def _check_scale(self, node: Any, path: str, samples: int) -> None:
        """Raise an error unless a factor of all samples is a plain number, and constant."""
        for attribute in ("_saved_other", "_saved_self"):
            factor = getattr(node, attribute, None)
            if not isinstance(factor, Tensor) or factor.numel() != 1:
                continue
            if factor.dim() > 0 and samples == 1:
                continue
            plain = factor.dtype == torch.float64 or not factor.is_floating_point()
            reason = "it is scaled by a tensor that may depend on the batch"
            _refuse_if(factor.dim() > 0 or not plain, reason)
            self._check_constant(f"{path}{attribute}", float(factor))

    def _check_constant(self, path: str, value: float) -> None:
        """Raise an error if the factor at a path of the graph differs from an earlier step's."""
        earlier = self._constants.setdefault(path, value)
        _refuse_if(
            earlier != value,
            f"it is scaled by a number that was {earlier:g} in an earlier step and is now "
            f"{value:g} (the weight of a schedule looks the same)",
        )


def under_ddp(loss: Tensor) -> Tensor | GradientEdge:
    """Return a loss's place in the graph below the node that DistributedDataParallel adds.

    That node passes the gradient on, and starts the reducer at the first backward.
    """
    start: Tensor | GradientEdge = loss
    node, number = loss.grad_fn, loss.output_nr
    while node is not None and node.name() == "_DDPSinkBackward":
        node, number = node.next_functions[number]
        if node is not None:
            start = GradientEdge(node, number)
    return start


def _signature(node: Any, name: str) -> str:
    """Return an operation's name and the dimensions it works along."""
    dimensions = (getattr(node, attribute, None) for attribute in _DIMENSIONS)
    return f"{name} {[dims for dims in dimensions if isinstance(dims, int | tuple)]}"


def outputs_of(loss: Tensor, calls: Sequence[Call]) -> list[Call]:
    """Return the calls of layers that a loss of unknown form is computed from directly."""
    outputs = {call.edge.node: call for call in calls}
    top: dict[int, Call] = {}
    visited: set[Node] = set()
    start = under_ddp(loss)
    stack = [start.grad_fn if isinstance(start, Tensor) else start.node]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node in outputs:
            top[id(node)] = outputs[node]
        else:
            stack += [below for below, _ in node.next_functions]
    return list(top.values())


def check_isolation(
    loss: Tensor | GradientEdge,
    top: Sequence[Call],
    calls: Sequence[Call],
    samples: int,
    *,
    separate: bool = False,
    restore: Callable[[], None] | None = None,
) -> None:
    """Raise an error where one sample's gradient depends on another sample.

    One sample's gradient is propagated alone, and must not reach the rows of other samples. The
    sample is one with a finite gradient, since an infinite one turns other rows' zeros into NaN.
    The check takes one more backward pass, without gradients of parameters, and does not change
    ``p.grad``. Where backward is a collective (FSDP2) all processes must call this, with the same
    ``separate``, and errors are raised after the last backward.

    Args:
        loss: the loss, a scalar whose graph is retained.
        top: the calls whose outputs the loss is computed from directly.
        calls: all calls of layers.
        samples: the number B of samples; with one sample nothing can be mixed.
        separate: whether the loss is known to keep samples separate, so that only the network is
            checked.
        restore: called after each backward; restores the model's state after the forward.

    Raises:
        DefenseError: samples are mixed, or that cannot be checked.
    """
    restore = restore or (lambda: None)
    edges = [call.edge for call in top]
    try:
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=not separate)
    except RuntimeError as error:
        raise _unknown(f"its gradient cannot be computed ({error})") from error
    restore()
    finite = [g.isfinite().reshape(samples, -1).all(1).nonzero().flatten() for g in gradients]
    rows = sorted(functools.reduce(operator.and_, (set(layer.tolist()) for layer in finite)))
    sample = rows[len(rows) // 2] if rows else 0
    mixed = None if separate else _mixing_error(gradients, top, sample, samples)
    restore()
    above = {edge.node for edge in edges}
    below = [call for call in calls if call.trained and call.edge.node not in above]
    masked = [_keep_sample(g.detach(), sample, samples) for g in gradients]
    del gradients
    layers: Sequence[Tensor | None] = ()
    if below:
        layers = _layer_gradients(edges, below, masked)
        restore()
    if mixed is not None:
        raise mixed
    for call, gradient in zip(below, layers, strict=True):
        if gradient is not None and _reaches_others(gradient, sample, samples):
            raise DefenseError(
                f"DPSGD: the gradient of sample {sample} reaches rows of '{call.name}' of other "
                "samples: samples are mixed, or the first dimension of its input does not count "
                "them (position ids may have shape (1, T)). Mend that, or freeze it."
            )


def _layer_gradients(
    edges: Sequence[GradientEdge], calls: Sequence[Call], gradients: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients that reach calls of layers from edges above them."""
    try:
        return torch.autograd.grad(
            edges, [call.edge for call in calls], gradients, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise DefenseError(_CHECKPOINTING) from error
        raise


def _mixing_error(
    gradients: Sequence[Tensor], top: Sequence[Call], sample: int, samples: int
) -> DefenseError | None:
    """Return the error of a loss that mixes samples, None where it does not."""
    generator = torch.Generator(device=gradients[0].device).manual_seed(0)
    total: Tensor | None = None
    for gradient in gradients:
        if not gradient.requires_grad:
            continue
        row = gradient.reshape(samples, -1)[sample].float()
        direction = torch.randn(row.shape, generator=generator, device=row.device)
        term = (row * direction).sum()
        total = term if total is None else total + term
    if total is None:
        return None
    try:
        edges = [call.edge for call in top]
        second = torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise _unknown(f"its second derivative cannot be computed ({error})") from error
    for call, gradient in zip(top, second, strict=True):
        if gradient is not None and _reaches_others(gradient, sample, samples):
            return _unknown(
                f"the loss of one sample depends on the output of '{call.name}' for the others, as "
                "in contrastive learning"
            )
    return None


def _keeps_apart(node: Any, name: str, samples: int) -> bool:
    """Return whether an operation is known to compute each sample's numbers separately.

    Views keep the order of numbers, so that those of a sample are always one of B equal blocks.
    """
    inputs = sum(below is not None for below, _ in node.next_functions)
    if name == "LogSoftmaxBackward0":
        shape = node._saved_result.shape
        last = node._saved_dim % 2**64 in (len(shape) - 1, 2**64 - 1)
        return bool(last and shape[:-1].numel() % samples == 0)
    if name in ("SumBackward1", "MeanBackward1"):
        return 0 not in node._saved_dim and -len(node._saved_self_sym_sizes) not in [
            dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim
        ]
    operations = _SHAPES | _SUMS | _SCALES | _ELEMENTWISE | _ROWWISE | {"NllLossBackward0"}
    single_input = operations - {"StackBackward0", "SelectBackward0"}
    return inputs == 1 and name in single_input


def _keep_sample(gradient: Tensor, sample: int, samples: int) -> Tensor:
    """Return a gradient (B * n, ...) with the rows of all samples but one set to zero."""
    masked = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    masked.view(samples, -1)[sample] = gradient.reshape(samples, -1)[sample]
    return masked


def _reaches_others(gradient: Tensor, sample: int, samples: int) -> bool:
    """Return whether a gradient (B * n, ...) has finite nonzero rows of other samples."""
    rows = torch.linalg.vector_norm(gradient.detach().reshape(samples, -1), ord=math.inf, dim=1)
    rows[sample] = 0
    return bool((rows.isfinite() & (rows != 0)).any())


def _label_counts(node: Any, samples: int) -> Tensor:
    """Return (B, labels of a sample) booleans: which labels of a mean cross-entropy count."""
    _refuse_if(node._saved_reduction != _MEAN, "its cross-entropy is a sum over the batch")
    reason = "its cross-entropy divides by the class weights of the whole batch"
    _refuse_if(node._saved_weight is not None, reason)
    target = node._saved_target
    reason = f"{target.numel()} labels cannot be shared by {samples} samples equally"
    _refuse_if(target.numel() % samples != 0, reason)
    ignored = node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    counted: Tensor = (target != ignored).reshape(samples, -1)
    return counted


def _weights(means: Sequence[Tensor | None], samples: int, *, ordered: bool) -> Tensor | None:
    """Return the factors that make each sample's gradient that of its own mean; None for ones.

    In a mean over the N labels of a batch sample i has the weight ``n_i / N``, not ``1 / B``. Where
    that mean is all of the loss, the gradient is wrong by this factor alone.

    Args:
        means: for each mean that enters the loss, which labels count; None where it is no
            cross-entropy.
        samples: B.
        ordered: whether a sample's labels are known to be adjacent, in the samples' order.
    """
    single = len(means) == 1
    for counted in means:
        if counted is None:
            continue
        counts = counted.sum(1).double()
        if single and ordered:
            return (counts.sum() / (samples * counts)).masked_fill(counts == 0, 1.0)
        if (counted.shape[1] > 1 and not single) or bool((counts != counts[0]).any()):
            reason = "in an unknown order" if single else "joined with another term"
            raise _unknown(f"it is a mean over all labels of the batch, {reason}")
    return None


def _keeps_numbers(node: Any, name: str) -> bool:
    """Return whether an unknown operation has one input and as many outputs as inputs.

    If it scales them, its second derivative shows that, unless its slope is piecewise constant.
    """
    built_in = name.endswith(("Backward0", "Backward1")) and not name.startswith(_STEPS)
    inputs = [below for below, _ in node.next_functions]
    if not built_in or len(inputs) != 1 or inputs[0] is None:
        return False
    [(below, index)] = node.next_functions
    output, source = node._input_metadata[0].shape, below._input_metadata[index].shape
    return bool(math.prod(output) == math.prod(source))


def _check_mean(is_mean: bool, shape: Sequence[int], samples: int, name: str) -> None:
    """Raise an error unless an operation is a mean whose first dimension holds the samples."""
    _refuse_if(not is_mean, f"{name} is a sum over the batch")
    reason = f"{name} is over a shape {tuple(shape)}, of a batch of {samples} samples"
    _refuse_if(not len(shape) or shape[0] % samples != 0, reason)


def _scalar(node: Any) -> bool:
    """Return whether a node stacks scalars that are losses."""
    return bool(node.name() == "StackBackward0" and node._saved_dim == 0) and all(
        below is None or below.name() in _LIKELIHOODS | _ELEMENTWISE | {"MeanBackward0"}
        for below, _ in node.next_functions
    )


def _refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise _unknown(reason)


def _unknown(reason: str) -> DefenseError:
    return DefenseError(
        f"DPSGD: the loss is not known to be a mean of per-sample means: {reason}. {MEND}"
    )


def mean_of_sample_means(
    logits: Tensor,
    labels: Tensor,
    *,
    causal: bool,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy averaged over each sample's labels, then over samples.

    It is the loss that DPSGD clips sample by sample. The mean over all tokens of a batch, which
    Hugging Face models return, scales each sample's gradient by how many labels the *others* have.
    DPSGD corrects that where such a mean is all of the loss. A sample without labels has a loss of
    zero.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import mean_of_sample_means
        >>> logits, labels = torch.zeros(2, 5, 10), torch.ones(2, 5, dtype=torch.long)
        >>> mean_of_sample_means(logits, labels, causal=True)
        tensor(2.3026)

    Args:
        logits: (B, T, V) or, of a classifier, (B, V).
        labels: (B, T) or (B,) integers, beside the inputs they belong to; -100 does not count.
        causal: whether position t predicts label t + 1, as in Hugging Face's causal models.
        label_smoothing: in [0, 1], as in torch's cross-entropy.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"mean_of_sample_means: labels of shape {tuple(labels.shape)} do not fit logits of "
            f"shape {tuple(logits.shape)}; they must have all its dimensions but the last"
        )
    if causal:
        if logits.dim() != 3:
            raise ValueError("mean_of_sample_means: causal=True needs logits (B, T, V)")
        # Labels are shifted, not logits, which would be copied with their gradients.
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    samples = len(labels)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = torch.nn.functional.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORE_INDEX,
        label_smoothing=label_smoothing,
    ).view(samples, -1)
    counts = (labels.reshape(samples, -1) != IGNORE_INDEX).sum(1).clamp(min=1)
    return (losses.sum(1) / counts).mean()
