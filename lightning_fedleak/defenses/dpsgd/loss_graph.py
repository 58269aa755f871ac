"""Whether a loss is a mean over samples of terms that depend on one sample each.

Clipping bounds what a sample adds to the sum only if the sample's gradient does not depend on who
else is in the batch. Three looks at the autograd graph, before backward. They follow gradients and
nothing else: they find mistakes, and prove nothing about a loss that was built to pass them.

- *form*, in every step: from the loss down to the outputs of layers, the reduction is a
  mean over equally many terms of every sample. A token mean is not, where samples have different
  numbers of labels: where nothing else enters the loss and a sample's labels stand together,
  :attr:`FormCheck.weights` makes each sample's gradient that of its own mean; joined with another
  term it is refused whatever the labels are. An operation
  above the mean that is not known is let through where it changes no number of terms, and then the
  next look is taken in that step.
- *loss*, whenever layers are used in a new way or the loss has a new :attr:`~FormCheck.form`, and
  now and then: each operation from the mean down to the layers
  works on one sample's numbers at a time, as in all losses above. Where that cannot be seen, the
  second derivative between one sample's output and the others' must be zero; it is not for
  contrastive losses. (It takes several times the memory of the logits, hence not always.)
- *network*, then too: the gradient of one sample's output is zero in all rows of all layers that
  are taken for other samples' rows. It is not where samples are mixed (attention over the batch,
  batch statistics), or where the first dimension of a layer's output counts something else.

Not seen is whatever reaches a sample's term without a gradient: statistics of the batch that were
detached (whitening by a detached mean, buffers, negatives without gradient), and factors with
several elements that need no gradient. ``mask / mask.sum()`` is such a factor: it looks as weights
of each sample's own do, and cannot be told from them.
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
from lightning_fedleak.defenses.dpsgd.recorder import Call

MEND = (
    "Return `mean_of_sample_means(logits, labels, causal=...)` (from lightning_fedleak.defenses) "
    "from training_step, or another mean over samples of each sample's own mean. If you have "
    "proved that your loss is one, pass DPSGD(loss='trusted')."
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
"""Beginnings of operations whose slope hangs on the batch, which no second derivative shows."""
_REENTRANT = "CheckpointFunctionBackward"
_MEAN = 1
_ALONG = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1")
_CHECKPOINTING = (
    "DPSGD: gradient checkpointing with use_reentrant=True hides whether samples are mixed. Use "
    'gradient_checkpointing_enable({"use_reentrant": False}).'
)


class FormCheck:
    """Looks at the form of every loss; remembers numbers that must stay what they are.

    A number that scales the loss, be it a Python number or a float64 tensor without dimensions,
    must not change from step to step: ``mask.sum().item()`` is one too. A factor with several
    elements is taken as it is where it needs no gradient, whatever it was computed from.

    Attributes:
        separate: whether it is seen from the last loss's operations that samples stay apart.
        weights: (B,) by which each sample's gradient is to be multiplied to be that of its own
            mean; None where it is.
        form: the last loss's operations down to the layers: which stands on which, along which
            dimensions.
    """

    def __init__(self) -> None:
        self.separate = False
        self.weights: Tensor | None = None
        self._means: list[Tensor | None] = []
        self.form: frozenset[tuple[str, str]] = frozenset()
        self._constants: dict[str, float] = {}

    def __call__(self, loss: Tensor, calls: Sequence[Call], samples: int) -> list[Call]:
        """Checks one loss.

        Args:
            loss: scalar with a graph.
            calls: of layers in this step.
            samples: B, at least 1.

        Returns:
            The calls that the loss is computed from directly.

        Raises:
            DefenseError: its form is not known to be a mean over equal numbers of terms.
        """
        if loss.numel() != 1 or loss.grad_fn is None:
            raise _unknown("the loss is not one number with a graph")
        start = under_ddp(loss)
        first = start.grad_fn if isinstance(start, Tensor) else start.node
        assert first is not None
        outputs = {call.edge.node: call for call in calls}
        top: dict[int, Call] = {}
        seen: set[tuple[Node, bool]] = set()
        self.separate, self.weights = True, None
        self._means.clear()
        form: set[tuple[str, str]] = set()
        stack: list[tuple[Node, bool, str, str]] = [(first, False, "", "")]
        while stack:
            node, reduced, path, above = stack.pop()
            name = node.name()
            own = f"layer {outputs[node].name}" if node in outputs else _signature(node, name)
            form.add((above, own))
            if (node, reduced) in seen:
                continue
            seen.add((node, reduced))
            if node in outputs:
                if not reduced:
                    raise _unknown("a layer's output reaches the loss without a mean over samples")
                top[id(node)] = outputs[node]
                continue
            if name.startswith(_REENTRANT):
                raise DefenseError(_CHECKPOINTING)
            if name.endswith("AccumulateGrad"):
                raise _unknown(
                    "a parameter enters the loss other than through its layer (a penalty on "
                    "weights, say, which belongs into the optimizer's weight_decay)"
                )
            if reduced or name in _LIKELIHOODS | _ELEMENTWISE:
                self.separate = self.separate and _keeps_apart(node, name, samples)
            reduced = self._passes(node, name, reduced, samples, path)
            for index, (below, _) in enumerate(node.next_functions):
                if below is not None:
                    stack.append((below, reduced, f"{path}/{name}.{index}", own))
        self.form = frozenset(form)
        self.weights = _weights(self._means, samples, ordered=self.separate)
        return list(top.values())

    def _passes(self, node: Any, name: str, reduced: bool, samples: int, path: str) -> bool:
        """Whether a mean has been taken, after this node; refuses a node that breaks it."""
        if name in _SCALES:
            self._check_scale(node, f"{path}/{name}", samples)
        if name in _SUMS:
            self._check_constant(f"{path}/{name}", float(node._saved_alpha))
        if reduced:
            if name in _SELECTIONS:
                raise _unknown(
                    f"{name} chooses terms before the mean, and how many of each sample cannot be "
                    "seen"
                )
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
                "torch.compile has compiled it, so that its form cannot be seen. Compile what "
                "gives the logits alone (the model's blocks, say), and not training_step"
            )
        raise _unknown(f"{name} stands between the loss and its mean over samples")

    def _check_scale(self, node: Any, path: str, samples: int) -> None:
        """A factor for all samples alike must be a plain number, and stay what it is."""
        for attribute in ("_saved_other", "_saved_self"):
            factor = getattr(node, attribute, None)
            if not isinstance(factor, Tensor) or factor.numel() != 1:
                continue
            if factor.dim() > 0 and samples == 1:
                continue
            plain = factor.dtype == torch.float64 or not factor.is_floating_point()
            if factor.dim() > 0 or not plain:
                raise _unknown("it is scaled by a tensor that may depend on the batch")
            self._check_constant(f"{path}{attribute}", float(factor))

    def _check_constant(self, path: str, value: float) -> None:
        before = self._constants.setdefault(path, value)
        if before != value:
            raise _unknown(
                f"it is scaled by a number that was {before:g} in an earlier step and is {value:g} "
                "now, such as a count that depends on the batch (a weight that follows a schedule "
                "may, but cannot be told from one)"
            )


def under_ddp(loss: Tensor) -> Tensor | GradientEdge:
    """Where a loss stands in the graph without what DistributedDataParallel puts above it.

    That is a node that hands on what it gets, and tells the reducer of the first backward.
    """
    start: Tensor | GradientEdge = loss
    node, number = loss.grad_fn, loss.output_nr
    while node is not None and node.name() == "_DDPSinkBackward":
        node, number = node.next_functions[number]
        if node is not None:
            start = GradientEdge(node, number)
    return start


def _signature(node: Any, name: str) -> str:
    """An operation and the dimensions it works along."""
    along = (getattr(node, attribute, None) for attribute in _ALONG)
    return f"{name} {[dims for dims in along if isinstance(dims, int | tuple)]}"


def outputs_of(loss: Tensor, calls: Sequence[Call]) -> list[Call]:
    """The calls of layers that a loss of unknown form is computed from directly."""
    outputs = {call.edge.node: call for call in calls}
    top: dict[int, Call] = {}
    seen: set[Node] = set()
    start = under_ddp(loss)
    stack = [start.grad_fn if isinstance(start, Tensor) else start.node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
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
) -> bool:
    """Refuses a loss or a network in which one sample's gradient depends on another sample.

    One more backward pass, without gradients of parameters; ``p.grad`` is not touched. Where
    backward sends something (FSDP2) all processes must ask, with the same ``separate``, and raise
    only when all are through.

    Args:
        loss: scalar with a graph, which is kept.
        top: the calls that it is computed from directly.
        calls: all calls of layers.
        samples: B; of one alone nothing can be told.
        separate: look at the network only: it is known that the loss keeps samples apart.
        restore: called after each backward: makes the model what it was after forward.

    Returns:
        Whether two samples' gradients were finite, without which nothing is seen. What is NaN or
        infinite tells nothing: zeros of other samples become NaN at a sample's infinite slope.

    Raises:
        DefenseError: samples are mixed, or it cannot be told.
    """
    edges = [call.edge for call in top]
    try:
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=not separate)
    except RuntimeError as error:
        raise _unknown(f"its gradient cannot be looked at ({error})") from error
    if restore is not None:
        restore()
    whole = [g.isfinite().reshape(samples, -1).all(1).nonzero().flatten() for g in gradients]
    rows = sorted(functools.reduce(operator.and_, (set(own.tolist()) for own in whole)))
    chosen = rows[len(rows) // 2] if rows else 0
    mixed = None if separate else _mixing_loss(gradients, top, edges, chosen, samples)
    if restore is not None:
        restore()
    above = {edge.node for edge in edges}
    below = [call for call in calls if call.trained and call.edge.node not in above]
    masked = [_only(g.detach(), chosen, samples) for g in gradients]
    del gradients
    if not below:
        if mixed is not None:
            raise mixed
        return len(rows) > 1
    try:
        found = torch.autograd.grad(
            edges, [call.edge for call in below], masked, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise DefenseError(_CHECKPOINTING) from error
        raise
    if restore is not None:
        restore()
    if mixed is not None:
        raise mixed
    for call, gradient in zip(below, found, strict=True):
        if gradient is not None and _spread(gradient, chosen, samples):
            raise DefenseError(
                f"DPSGD: the gradient of sample {chosen} reaches rows of '{call.name}' that belong "
                f"to other samples of the batch of {samples}. Either samples are mixed before it "
                "(statistics or attention over the batch), or the first dimension of its input "
                "does not count samples. Let the first dimension be the samples in every trainable "
                "layer (position ids may have shape (1, T)), or freeze it."
            )
    return len(rows) > 1


def _mixing_loss(
    gradients: Sequence[Tensor],
    top: Sequence[Call],
    edges: Sequence[Any],
    chosen: int,
    samples: int,
) -> DefenseError | None:
    """Why the loss is refused, if it is."""
    generator = torch.Generator(device=gradients[0].device).manual_seed(0)
    total: Tensor | None = None
    for gradient in gradients:
        if not gradient.requires_grad:
            continue
        own = gradient.reshape(samples, -1)[chosen].float()
        direction = torch.randn(own.shape, generator=generator, device=own.device)
        term = (own * direction).sum()
        total = term if total is None else total + term
    if total is None:
        return None
    try:
        second = torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise _unknown(f"its second derivative cannot be looked at ({error})") from error
    for call, gradient in zip(top, second, strict=True):
        if gradient is not None and _spread(gradient, chosen, samples):
            return _unknown(
                f"the loss of one sample depends on the output of '{call.name}' for the others, as "
                "in contrastive learning"
            )
    return None


def _keeps_apart(node: Any, name: str, samples: int) -> bool:
    """Whether an operation is seen to work on one sample's numbers at a time.

    Views keep the order of numbers, so a sample's are one block of B equal ones throughout.
    """
    ways = sum(below is not None for below, _ in node.next_functions)
    if name == "LogSoftmaxBackward0":
        shape = node._saved_result.shape
        last = node._saved_dim % 2**64 in (len(shape) - 1, 2**64 - 1)
        return bool(last and shape[:-1].numel() % samples == 0)
    if name in ("SumBackward1", "MeanBackward1"):
        return 0 not in node._saved_dim and -len(node._saved_self_sym_sizes) not in [
            dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim
        ]
    known = _SHAPES | _SUMS | _SCALES | _ELEMENTWISE | _ROWWISE | {"NllLossBackward0"}
    return ways == 1 and name in known - {"StackBackward0", "SelectBackward0"}


def _only(gradient: Tensor, chosen: int, samples: int) -> Tensor:
    masked = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    masked.view(samples, -1)[chosen] = gradient.reshape(samples, -1)[chosen]
    return masked


def _spread(gradient: Tensor, chosen: int, samples: int) -> bool:
    rows = torch.linalg.vector_norm(gradient.detach().reshape(samples, -1), ord=math.inf, dim=1)
    rows[chosen] = 0
    return bool((rows.isfinite() & (rows != 0)).any())


def _label_counts(node: Any, samples: int) -> Tensor:
    """(B, labels a sample may have) bool: those that count, of a mean cross-entropy."""
    if node._saved_reduction != _MEAN:
        raise _unknown("its cross-entropy is a sum over the batch")
    if node._saved_weight is not None:
        raise _unknown("its cross-entropy divides by the class weights of the whole batch")
    target = node._saved_target
    if target.numel() % samples:
        raise _unknown(f"{target.numel()} labels cannot be shared by {samples} samples equally")
    ignored = node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    counted: Tensor = (target != ignored).reshape(samples, -1)
    return counted


def _weights(means: Sequence[Tensor | None], samples: int, *, ordered: bool) -> Tensor | None:
    """What makes each sample's gradient that of its own mean.

    Of a mean over the N labels of a batch sample i has ``n_i / N`` in place of ``1 / B``. Where
    that mean is all that enters the loss, its gradient is off by a factor and nothing else.

    Args:
        means: of each mean that enters the loss, which labels count; None where it is no
            cross-entropy.
        samples: B.
        ordered: it is seen that a sample's labels stand together, in the samples' order.
    """
    alone = len(means) == 1
    for counted in means:
        if counted is None:
            continue
        counts = counted.sum(1).double()
        if alone and ordered:
            return (counts.sum() / (samples * counts)).masked_fill(counts == 0, 1.0)
        if (counted.shape[1] > 1 and not alone) or bool((counts != counts[0]).any()):
            joined = (
                "whose labels stand in an order that cannot be seen"
                if alone
                else ("joined with another term")
            )
            raise _unknown(
                f"it is a mean over all labels of the batch, {joined}: each sample's gradient "
                "depends on how many labels the others have"
            )
    return None


def _keeps_numbers(node: Any, name: str) -> bool:
    """Whether an operation that is not known makes as many numbers of one tensor as that has.

    What factor it puts to them, if any, its second derivative shows, unless it is made of steps.
    """
    built_in = name.endswith(("Backward0", "Backward1")) and not name.startswith(_STEPS)
    inputs = [below for below, _ in node.next_functions]
    if not built_in or len(inputs) != 1 or inputs[0] is None:
        return False
    [(below, index)] = node.next_functions
    made, taken = node._input_metadata[0].shape, below._input_metadata[index].shape
    return bool(math.prod(made) == math.prod(taken))


def _check_mean(is_mean: bool, shape: Sequence[int], samples: int, name: str) -> None:
    if not is_mean:
        raise _unknown(f"{name} is a sum over the batch")
    if not len(shape) or shape[0] % samples:
        raise _unknown(f"{name} is over a shape {tuple(shape)}, of a batch of {samples} samples")


def _scalar(node: Any) -> bool:
    """Whether a mean is taken over numbers that are losses already, stacked."""
    return bool(node.name() == "StackBackward0" and node._saved_dim == 0) and all(
        below is None or below.name() in _LIKELIHOODS | _ELEMENTWISE | {"MeanBackward0"}
        for below, _ in node.next_functions
    )


def _unknown(what: str) -> DefenseError:
    return DefenseError(
        f"DPSGD: the loss is not known to be a mean of per-sample means: {what}. {MEND}"
    )


def mean_of_sample_means(
    logits: Tensor,
    labels: Tensor,
    *,
    causal: bool,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy, averaged over each sample's labels first and over samples then.

    The mean over all tokens of a batch, which Hugging Face models return, is another number where
    samples differ in their number of labels: there each sample's gradient is scaled by how many
    labels the *others* have. DPSGD undoes that where such a mean is all of the loss. A sample
    without any label counts as a loss of zero.

    Args:
        logits: (B, T, V) or, of a classifier, (B, V).
        labels: (B, T) or (B,) integers, beside the inputs they belong to.
        causal: whether position t predicts label t + 1, as in Hugging Face's causal models.
        ignore_index: label that is left out.
        label_smoothing: in [0, 1], as in torch's cross-entropy.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"mean_of_sample_means: labels of shape {tuple(labels.shape)} do not fit logits of "
            f"shape {tuple(logits.shape)}; they must have all its dimensions but the last"
        )
    if causal:
        if logits.dim() != 3 or logits.shape[1] < 2:
            raise ValueError(
                "mean_of_sample_means: causal=True needs logits (B, T, V) of two positions or more"
            )
        # Labels are moved, not logits: these would be copied, and their gradients once more.
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    samples = len(labels)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = torch.nn.functional.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    ).view(samples, -1)
    counts = (labels.reshape(samples, -1) != ignore_index).sum(1).clamp(min=1)
    return (losses.sum(1) / counts).mean()
