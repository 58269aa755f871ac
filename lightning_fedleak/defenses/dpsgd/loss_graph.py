"""Checks that a loss is a mean over samples of terms that depend on one sample each.

Clipping bounds a sample's contribution only if its gradient does not depend on the other samples
of the batch. Three checks of the autograd graph run before backward. They follow gradients only:
they find mistakes, and prove nothing about a loss that was built to pass them. Backward runs from
the loss at the top *down* to the layers; a *call* is one use of a layer in the forward pass.

- *form*, in every step: between the loss and the layers' outputs there is a mean over equally many
  terms of every sample. The mean over all tokens is not one, if samples have different numbers of
  labels. If such a mean is the whole loss and each sample's labels are adjacent,
  :attr:`LossCheck.weights` turns each sample's gradient into that of its own mean. With another
  term it is refused. An unknown operation above the mean passes if it keeps the number of terms;
  then the check *loss* takes its second derivative.
- *loss*, if layers are used in a new way, if the loss has a new :attr:`~LossCheck.form`, and after
  1, 2, 4, ... releases: every operation from the mean down to the layers works on the numbers of
  one sample at a time. If its name does not say so, the second derivative by the outputs of two
  different samples must be zero, which it is not for contrastive losses. It takes several times the
  memory of the logits, so it is not computed in every step.
- *network*, in the same steps: the gradient of one sample's output is zero in the rows of all
  layers that count as other samples' rows. It is not if samples are mixed (attention over the
  batch, batch statistics), or if the first dimension of a layer's output counts something else.

They do not find what reaches a sample's term without a gradient: detached statistics of the batch
(whitening by a detached mean, buffers, negatives without gradient), and factors with several
elements that need no gradient, such as ``mask / mask.sum()``, which looks like weights of samples.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.recorder import Call, Recorder
from lightning_fedleak.defenses.processes import Team, unshard, whole_layers
from lightning_fedleak.model.batches import IGNORE_INDEX

# Costly checks are repeated after 1, 2, 4, ... releases, and later after this number of releases.
# Not tuned.
CHECK_EVERY = 100

StepForm = tuple[frozenset[tuple[str, int]], frozenset[tuple[str, str]]]
"""The name and sample's rows of every layer call, and the form of the loss (:class:`LossCheck`)."""

REMEDY = (
    "Return `mean_of_sample_means(logits, labels, causal=...)` (from lightning_fedleak.defenses) "
    "from training_step, or another mean over samples of each sample's own mean. If you have "
    "proved that your loss is one, pass DPSGD(clip=ClipSettings(loss='trusted'))."
)
# The sets below hold names of autograd nodes. These select, reshape, copy or negate numbers.
_SHAPE_OPS = {
    *("AliasBackward0", "CloneBackward0", "NegBackward0", "ReshapeAliasBackward0"),
    *("SelectBackward0", "SqueezeBackward0", "SqueezeBackward1", "StackBackward0"),
    *("ToCopyBackward0", "UnsqueezeBackward0", "ViewBackward0"),
}
_SUM_OPS = {"AddBackward0", "SubBackward0"}
_SCALE_OPS = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_LIKELIHOODS = {"NllLossBackward0", "NllLoss2DBackward0"}  # of cross-entropies
_ELEMENTWISE = {  # losses that compare each output with one target
    *("BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"),
    *("HuberLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0"),
}
_ROWWISE = {"AbsBackward0", "PowBackward0", "SliceBackward0", "UnsafeViewBackward0"}
_SELECTIONS = {"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0", "TakeBackward0"}
# Beginnings of names of nodes with a piecewise constant slope. It may depend on the batch although
# its derivative is zero.
_PIECEWISE = (
    *("Abs", "Clamp", "Hard", "LeakyRelu", "Max", "Min", "NanToNum", "Prelu", "Relu", "Rrelu"),
    *("Sign", "Softshrink", "Threshold", "Where"),
)
_REENTRANT = "CheckpointFunctionBackward"
_MEAN = 1  # torch's code of reduction="mean"
# Attributes in which nodes save the dimensions that they work along.
_DIMENSIONS = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1")
_CHECKPOINTING = (
    "DPSGD: gradient checkpointing with use_reentrant=True hides whether samples are mixed. Use "
    'gradient_checkpointing_enable({"use_reentrant": False}).'
)


class LossCheck:
    """Checks of the loss: its form in every step, the graph if something is new or a check is due.

    A number that scales the loss (a Python number or a float64 tensor without dimensions) must not
    change from step to step, because it may be ``mask.sum().item()``. A factor with several
    elements may be anything that needs no gradient.

    Args:
        trusted: Whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        unchecked: Whether the next release must be checked: something is new, or was not checked.
        is_per_sample: Whether the operations of the last loss show that samples are not mixed.
        weights: (B,) factors that turn each sample's gradient into that of its mean; None for 1.
        terms: () on the device, the number of terms of the mean: of labels, at least 1, if there
            are weights, else of samples.
        form: Pairs of adjacent operations of the last loss, down to the layers, with the dimensions
            that they work along.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self.unchecked = self.is_per_sample = False
        self.weights: Tensor | None = None
        self.terms = torch.ones((), dtype=torch.float64)
        self.form: frozenset[tuple[str, str]] = frozenset()
        self._trusted = trusted
        # The means' nodes, with label masks of cross-entropies, None of other means.
        self._means: list[tuple[Any, Tensor | None]] = []
        self._constants: dict[str, float] = {}  # factors of the loss by their path in the graph
        self._checked_forms: set[StepForm] = set()
        self._next_check, self._interval = 0, 1  # in releases

    def is_due(self, releases: int) -> bool:
        """Return whether the next release gets the checks that are too costly for every release."""
        return self.unchecked or releases % CHECK_EVERY == 0

    def check_form(self, loss: Tensor, calls: Sequence[Call], samples: int) -> list[Call]:
        """Follow the graph down to the layers, and return the calls whose outputs enter the loss.

        They enter it with no other layer between. A trusted loss is followed, but not checked.

        Args:
            loss: A scalar with a graph.
            calls: The calls of layers in this step.
            samples: The number of samples B, at least 1.

        Raises:
            DefenseError: The loss is not known to be a mean over equally many terms of each sample.
        """
        is_scalar = loss.numel() == 1 and loss.grad_fn is not None
        _refuse_if(not (is_scalar or self._trusted), "it is not one number with a graph")
        start = skip_ddp_node(loss)
        first_node = start.grad_fn if isinstance(start, Tensor) else start.node
        outputs = {call.edge.node: call for call in calls}
        top_calls: dict[int, Call] = {}
        visited: set[tuple[Node, bool]] = set()
        self.is_per_sample, self.weights = True, None
        form: set[tuple[str, str]] = set()
        # Node, whether it is below a mean, its path, and the label of the node above.
        stack: list[tuple[Node, bool, str, str]] = []
        if first_node is not None:
            stack.append((first_node, False, "", ""))
        while stack:
            node, below_mean, path, upper_label = stack.pop()
            name = node.name()
            label = f"layer {outputs[node].name}" if node in outputs else _signature(node, name)
            form.add((upper_label, label))
            if (node, below_mean) in visited:
                continue
            visited.add((node, below_mean))
            if node in outputs:
                reason = "a layer's output reaches the loss without a mean over samples"
                _refuse_if(not (below_mean or self._trusted), reason)
                top_calls[id(node)] = outputs[node]
                continue
            if not self._trusted:
                below_mean = self._check_node(node, name, below_mean, samples, path)
            for index, (child, _) in enumerate(node.next_functions):
                if child is not None:
                    below = "" if self._trusted else f"{path}/{name}.{index}"
                    stack.append((child, below_mean, below, label))
        self.terms = loss.new_full((), samples, dtype=torch.float64)
        if self._trusted:
            return list(top_calls.values())
        self.form = frozenset(form)
        self.weights = _weights(self._means, samples, is_ordered=self.is_per_sample)
        if self.weights is not None:
            [(_, label_mask)] = self._means
            self.terms = label_mask.sum().double().clamp(min=1)  # type: ignore[union-attr]
        self._means.clear()  # it holds the graph
        return list(top_calls.values())

    def check_graph(
        self, loss: Tensor, top_calls: Sequence[Call], recorder: Recorder, releases: int, team: Team
    ) -> None:
        """Check that neither network nor loss mixes samples, if this check is due.

        If one process of the client has to check, all do, because backward may be a collective.
        Which later steps are checked must not depend on the result, or on NaN in it: the times of
        checks would leak the content of examples.

        Args:
            loss: The loss that :meth:`check_form` has checked.
            top_calls: The result of :meth:`check_form`.
            recorder: The recorder, which holds the calls of layers in this step.
            releases: The number of releases so far.
            team: The processes of this client.

        Raises:
            DefenseError: Samples are mixed.
        """
        trained = (call for call in recorder.calls if call.trained)
        form = frozenset((call.name, call.sample_rows) for call in trained), self.form
        # `is_new`: the release is to be checked too. `is_due`: this check runs now, which takes two
        # samples. `may_mix`: some operation is not known to keep samples apart, in any process.
        needs_check = form not in self._checked_forms or releases >= self._next_check
        is_new = recorder.counts and needs_check
        is_due = is_new and recorder.samples > 1
        is_new, is_due, may_mix = map(bool, team.largest([is_new, is_due, not self.is_per_sample]))
        self.unchecked = self.unchecked or is_new
        if not is_due:
            return
        with team.together(), recorder.paused():
            check_isolation(
                skip_ddp_node(loss),
                top_calls,
                recorder.calls,
                recorder.samples,
                separate=not may_mix,
                # After a backward FSDP2 shards the layers that were whole after the forward.
                restore=functools.partial(unshard, whole_layers(recorder.root)),
            )
        if releases >= self._next_check:
            self._next_check = releases + self._interval
            self._interval = min(2 * self._interval, CHECK_EVERY)
        if recorder.samples > 1:
            self._checked_forms.add(form)

    def _check_node(self, node: Any, name: str, below_mean: bool, samples: int, path: str) -> bool:
        """Return whether nodes below this one are below a mean; raise an error for a wrong node."""
        if name.startswith(_REENTRANT):
            raise DefenseError(_CHECKPOINTING)
        reason = "a parameter enters it other than through its layer (use weight_decay)"
        _refuse_if(name.endswith("AccumulateGrad"), reason)
        if below_mean or name in _LIKELIHOODS | _ELEMENTWISE:
            self.is_per_sample = self.is_per_sample and _is_per_sample(node, name, samples)
        if name in _SCALE_OPS:
            self._check_scale(node, f"{path}/{name}", samples)
        if name in _SUM_OPS:
            self._check_constant(f"{path}/{name}", float(node._saved_alpha))
        if below_mean:
            _refuse_if(name in _SELECTIONS, f"{name} selects terms before the mean")
            return True
        if name in _LIKELIHOODS:
            self._means.append((node, _label_mask(node, samples)))
            return True
        if name in _ELEMENTWISE:
            self._means.append((node, None))
            _check_mean(node._saved_reduction == _MEAN, node._saved_self.shape, samples, name)
            return True
        if name == "MeanBackward0":
            shape = node._saved_self_sym_sizes
            if len(shape) and shape[0] != 1:
                if any(op is not None and _stacks_losses(op) for op, _ in node.next_functions):
                    return False
                _check_mean(True, shape, samples, name)
                self._means.append((node, None))
                return True
            return bool(samples == 1 and len(shape))
        if name in _SHAPE_OPS | _SUM_OPS | _SCALE_OPS:
            return False
        if _keeps_size(node, name):
            self.is_per_sample = False
            return False
        if name.startswith("CompiledFunction"):
            raise _loss_error("torch.compile has compiled it: compile the model's blocks instead")
        raise _loss_error(f"{name} is between the loss and its mean over samples")

    def _check_scale(self, node: Any, path: str, samples: int) -> None:
        """Raise an error unless a factor that scales all samples is a constant number."""
        for attribute in ("_saved_other", "_saved_self"):
            factor = getattr(node, attribute, None)
            if not isinstance(factor, Tensor) or factor.numel() != 1:
                continue
            if factor.dim() > 0 and samples == 1:
                continue
            is_number = factor.dtype == torch.float64 or not factor.is_floating_point()
            reason = "it is scaled by a tensor that may depend on the batch"
            _refuse_if(factor.dim() > 0 or not is_number, reason)
            # A Python number has no tensor within a dispatch mode, unless it is added to one.
            value = float(torch.zeros((), dtype=torch.float64, device=factor.device) + factor)
            self._check_constant(f"{path}{attribute}", value)

    def _check_constant(self, path: str, value: float) -> None:
        """Raise an error if the factor at a path of the graph was different in an earlier step."""
        earlier = self._constants.setdefault(path, value)
        reason = f"it is scaled by a number that changes from step to step, {earlier:g}, {value:g}"
        _refuse_if(earlier != value, reason)


def skip_ddp_node(loss: Tensor) -> Tensor | GradientEdge:
    """Return the loss, or the edge below the node that DistributedDataParallel puts on top of it.

    That node passes the gradient on, and starts the reducer at the first backward.
    """
    start: Tensor | GradientEdge = loss
    node, index = loss.grad_fn, loss.output_nr
    while node is not None and node.name() == "_DDPSinkBackward":
        node, index = node.next_functions[index]
        if node is not None:
            start = GradientEdge(node, index)
    return start


def _signature(node: Any, name: str) -> str:
    """Return an operation's name and the dimensions that it works along."""
    dimensions = (getattr(node, attribute, None) for attribute in _DIMENSIONS)
    return f"{name} {[dims for dims in dimensions if isinstance(dims, int | tuple)]}"


def check_isolation(
    loss: Tensor | GradientEdge,
    top_calls: Sequence[Call],
    calls: Sequence[Call],
    samples: int,
    *,
    separate: bool = False,
    restore: Callable[[], None] | None = None,
) -> None:
    """Raise an error if one sample's gradient depends on another sample.

    The gradient of one sample is propagated alone, and must not reach the rows of other samples. It
    must be finite, because an infinite one turns the zeros of other rows into NaN. The check takes
    one more backward pass, without gradients of parameters, and does not change ``p.grad``. If
    backward is a collective (FSDP2), all processes must call this with the same ``separate``, and
    errors are raised after the last backward.

    Args:
        loss: The loss, a scalar whose graph is retained.
        top_calls: The calls whose outputs enter the loss with no other layer between.
        calls: All calls of layers.
        samples: The number of samples B; with one sample nothing can be mixed.
        separate: Whether the loss is known not to mix samples, so that only the network is checked.
        restore: Called after each backward; restores the model's state after the forward.

    Raises:
        DefenseError: Samples are mixed, or that cannot be checked.
    """
    restore = restore or (lambda: None)
    edges = [call.edge for call in top_calls]
    try:
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=not separate)
    except RuntimeError as error:
        raise _loss_error(f"its gradient cannot be computed ({error})") from error
    restore()
    finite = [g.isfinite().reshape(samples, -1).all(1).nonzero().flatten() for g in gradients]
    rows = sorted(functools.reduce(operator.and_, (set(indices.tolist()) for indices in finite)))
    sample = rows[len(rows) // 2] if rows else 0
    loss_error = None if separate else _find_mixing(gradients, top_calls, sample, samples)
    restore()
    input_nodes = {edge.node for edge in edges}
    lower_calls = [call for call in calls if call.trained and call.edge.node not in input_nodes]
    sample_gradients = [_keep_sample(g.detach(), sample, samples) for g in gradients]
    del gradients
    lower_gradients: Sequence[Tensor | None] = ()
    if lower_calls:
        lower_gradients = _layer_gradients(edges, lower_calls, sample_gradients)
        restore()
    if loss_error is not None:
        raise loss_error
    for call, gradient in zip(lower_calls, lower_gradients, strict=True):
        if gradient is not None and _reaches_other_samples(gradient, sample, samples):
            raise DefenseError(
                f"DPSGD: the gradient of sample {sample} reaches rows of '{call.name}' of other "
                "samples. Let its input's first dimension count samples, or freeze the layer."
            )


def _layer_gradients(
    edges: Sequence[GradientEdge], calls: Sequence[Call], gradients: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of calls from ``gradients`` at ``edges`` above; None if unused."""
    try:
        return torch.autograd.grad(
            edges, [call.edge for call in calls], gradients, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise DefenseError(_CHECKPOINTING) from error
        raise


def _find_mixing(
    gradients: Sequence[Tensor], top_calls: Sequence[Call], sample: int, samples: int
) -> DefenseError | None:
    """Return the error of a loss that mixes samples; None if it does not mix them."""
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
        edges = [call.edge for call in top_calls]
        second_derivatives = torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise _loss_error(f"its second derivative cannot be computed ({error})") from error
    for call, gradient in zip(top_calls, second_derivatives, strict=True):
        if gradient is not None and _reaches_other_samples(gradient, sample, samples):
            return _loss_error(f"one sample's loss depends on others' outputs of '{call.name}'")
    return None


def _is_per_sample(node: Any, name: str, samples: int) -> bool:
    """Return whether an operation is known to compute each sample's numbers separately.

    Views keep the order of numbers, so that a sample's numbers are always one of B equal blocks.
    Autograd saves negative dimensions modulo 2^64.
    """
    n_inputs = sum(child is not None for child, _ in node.next_functions)
    if name == "LogSoftmaxBackward0":
        shape = node._saved_result.shape
        [dim] = _positive([node._saved_dim], len(shape))
        is_last_dim = dim == len(shape) - 1 and shape[:-1].numel() % samples == 0
        return bool(is_last_dim or (dim > 0 and shape[0] == samples))
    if name in ("SumBackward1", "MeanBackward1"):
        return 0 not in _positive(node._saved_dim, len(node._saved_self_sym_sizes))
    if name == "TransposeBackward0":
        shape = node._input_metadata[0].shape
        dims = _positive([node._saved_dim0, node._saved_dim1], len(shape))
        return 0 not in dims and shape[0] == samples
    operations = _SHAPE_OPS | _SUM_OPS | _SCALE_OPS | _ELEMENTWISE | _ROWWISE | _LIKELIHOODS
    row_operations = operations - {"StackBackward0", "SelectBackward0"}
    return n_inputs == 1 and name in row_operations


def _positive(dims: Sequence[int], rank: int) -> list[int]:
    """Return dimensions as numbers from 0 to rank - 1."""
    return [(dim - 2**64 if dim >= 2**63 else dim) % rank for dim in dims]


def _keep_sample(gradient: Tensor, sample: int, samples: int) -> Tensor:
    """Return a gradient (B * n, ...) with the rows of all samples but one set to zero."""
    masked = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    masked.view(samples, -1)[sample] = gradient.reshape(samples, -1)[sample]
    return masked


def _reaches_other_samples(gradient: Tensor, sample: int, samples: int) -> bool:
    """Return whether a gradient (B * n, ...) has finite nonzero rows of other samples."""
    maxima = torch.linalg.vector_norm(gradient.detach().reshape(samples, -1), ord=math.inf, dim=1)
    maxima[sample] = 0
    return bool((maxima.isfinite() & (maxima != 0)).any())


def _label_mask(node: Any, samples: int) -> Tensor:
    """Return (B, labels of a sample) booleans: which labels of a mean cross-entropy count."""
    _refuse_if(node._saved_reduction != _MEAN, "its cross-entropy is a sum over the batch")
    reason = "its cross-entropy divides by the class weights of the whole batch"
    _refuse_if(node._saved_weight is not None, reason)
    target = node._saved_target
    reason = f"{target.numel()} labels cannot be divided equally among {samples} samples"
    _refuse_if(target.numel() % samples != 0, reason)
    ignore_index = node._saved_ignore_index  # modulo 2^64
    ignore_index = ignore_index - 2**64 if ignore_index >= 2**63 else ignore_index
    mask: Tensor = (target != ignore_index).reshape(samples, -1)
    return mask


def _weights(
    means: Sequence[tuple[Any, Tensor | None]], samples: int, *, is_ordered: bool
) -> Tensor | None:
    """Return factors (B,) that turn each sample's gradient into that of its own mean; None for 1.

    In a mean over the N labels of a batch, sample i with n_i labels has the weight ``n_i / N``, not
    ``1 / B``. If that mean is the whole loss, the gradient is wrong only by this factor. If each
    sample has one label, which may not count, the gradient of the mean is scaled to ``1 / B``. What
    is refused depends on the operations of the loss, never on which labels count.

    Args:
        means: The node of each mean in the loss, and the label mask of its cross-entropy; None if
            it has none.
        samples: The number of samples B.
        is_ordered: Whether each sample's labels are known to be adjacent, in the samples' order.
    """
    is_single = len(means) == 1
    for node, mask in means:
        if mask is None:
            continue
        if is_single and is_ordered:
            counts = mask.sum(1).double()
            return (counts.sum() / (samples * counts)).masked_fill(counts == 0, 1.0)
        if mask.shape[1] > 1:
            reason = "in an unknown order" if is_single else "combined with another term"
            raise _loss_error(f"it is a mean over all labels of the batch, {reason}")
        node.register_prehook(functools.partial(_scale, mask.sum(), samples))
    return None


def _scale(labels: Tensor, samples: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients times labels over samples, exact where they begin with that number."""
    return tuple(gradient / samples * labels.to(gradient) for gradient in gradients)


def _keeps_size(node: Any, name: str) -> bool:
    """Return whether an unknown operation has one input, and as many outputs as input numbers.

    If it scales them, its second derivative shows that, unless its slope is piecewise constant.
    """
    is_builtin = name.endswith(("Backward0", "Backward1")) and not name.startswith(_PIECEWISE)
    inputs = [child for child, _ in node.next_functions]
    if not is_builtin or len(inputs) != 1 or inputs[0] is None:
        return False
    [(child, index)] = node.next_functions
    output_shape, input_shape = node._input_metadata[0].shape, child._input_metadata[index].shape
    return bool(math.prod(output_shape) == math.prod(input_shape))


def _check_mean(is_mean: bool, shape: Sequence[int], samples: int, name: str) -> None:
    """Raise an error unless an operation is a mean and its first dimension can hold the samples."""
    _refuse_if(not is_mean, f"{name} is a sum over the batch")
    reason = f"{name} is over a shape {tuple(shape)}, of a batch of {samples} samples"
    _refuse_if(samples > 1 and (not len(shape) or shape[0] % samples != 0), reason)


def _stacks_losses(node: Any) -> bool:
    """Return whether a node stacks scalars that are losses."""
    return bool(node.name() == "StackBackward0" and node._saved_dim == 0) and all(
        child is None or child.name() in _LIKELIHOODS | _ELEMENTWISE | {"MeanBackward0"}
        for child, _ in node.next_functions
    )


def _refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise _loss_error(reason)


def _loss_error(reason: str) -> DefenseError:
    return DefenseError(
        f"DPSGD: the loss is not known to be a mean of per-sample means: {reason}. {REMEDY}"
    )


def mean_of_sample_means(logits: Tensor, labels: Tensor, *, causal: bool) -> Tensor:
    """Return the cross-entropy averaged over each sample's labels, then over samples.

    DPSGD needs such a mean of per-sample losses. Hugging Face models return the mean over all
    tokens of a batch, in which the scale of a sample's gradient depends on the number of labels of
    the *other* samples. DPSGD corrects that if such a mean is the whole loss. A sample without
    labels has a loss of zero.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import mean_of_sample_means
        >>> logits, labels = torch.zeros(2, 5, 10), torch.ones(2, 5, dtype=torch.long)
        >>> mean_of_sample_means(logits, labels, causal=True)
        tensor(2.3026)

    Args:
        logits: (B, T, V), or (B, V) of a classifier: B samples, T positions, V classes.
        labels: (B, T) or (B,) integers, at the positions of their inputs; -100 does not count.
        causal: Whether position t predicts label t + 1, as in Hugging Face's causal models.

    Raises:
        ValueError: The shapes do not match.
    """
    if labels.shape != logits.shape[:-1] or labels.dim() < 1 or (causal and labels.dim() != 2):
        raise ValueError(
            "mean_of_sample_means: logits need the shape (B, T, V), or (B, V) without causal, and "
            f"labels that without V; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if causal:
        # Labels are shifted, not logits, which would be copied with their gradients.
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    samples = len(labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    rows = logits.flatten(0, -2), labels.flatten()
    losses = torch.nn.functional.cross_entropy(*rows, reduction="none", ignore_index=IGNORE_INDEX)
    counts = (labels.reshape(samples, -1) != IGNORE_INDEX).sum(1).clamp(min=1)
    return (losses.view(samples, -1).sum(1) / counts).mean()
