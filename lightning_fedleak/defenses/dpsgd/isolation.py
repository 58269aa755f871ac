"""Measures, before the first release, that an example's gradient does not depend on its batch.

DP-SGD bounds what one example adds to a sum of gradients. That bounds nothing if other rows of the
batch move the example's gradient: padding on the left shifts positions, batch norm mixes
activations, a loss divides by all labels. So the training's own collate function, step and loss
run on *made* rows: one row alone, then the same row in the *company* of a long row, one of one
token and an empty one. The gradient that would be clipped must be the same in both. A second row
then stands beside equal ones, and among them: what leaves out a batch's outliers, large losses or
duplicates leaves out one of these rows. There are as many as a batch has, up to 256 numbers, or 8:
what acts on larger batches alone is not found.

Rows are made from the form of one example: its fields, shapes and types, and the largest of its
whole numbers. Nothing else is read from the data. Dropout and autocast are off, float32 replaces
weights of 16 bits, and model, host and random states are restored afterwards.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_fedleak.defenses.base import DefenseContext, DefenseError, parameter_name
from lightning_fedleak.defenses.dpsgd import per_sample
from lightning_fedleak.defenses.dpsgd.clipped_sum import COARSE
from lightning_fedleak.defenses.dpsgd.loss_graph import LossCheck
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate, rebuilt
from lightning_fedleak.defenses.dpsgd.recorder import Recorder, count_samples, tensors_of, values_in
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.model_state import is_compiled, preserve_model, preserve_process
from lightning_fedleak.model.taps.hooks import taps_paused

# The largest distance between the gradients of a row alone and in company, over their norm. Sound
# trainings are far below it, unsound ones far above (benchmarks/defenses/isolation.py).
TOLERANCE = 1e-4
FLOOR = 1e-2  # of the gradient's norm: the least to which a parameter's move is compared
TOKENS = 6  # of the row that is compared
LONG = 128  # tokens of the long row; more take more time
# Equal rows beside another one: as many as a batch has, if they have 2 LONG numbers at most.
EQUAL = 8  # at least
SKETCHES = 16  # random directions by which gradients are compared. With fewer, one may miss a move.
# How far a row that is padded or longer moves the others' sum in half precision, over C and the
# root of their number. In three models of 200 rows it is at most .0078 (benchmarks/defenses/
# isolation.py --half). It is not measured in the run, where it would depend on the data.
ROUNDING = 0.01
NOT_MEASURED = " Not measured: that an example's gradient depends on that example alone."
SMALLEST = 1e-6  # norm of the row's gradient; a smaller one may be rounding alone
GOLDEN = 0.618034  # its multiples modulo 1 spread evenly: masks of few tokens mask some, not all
_UNIFORM = {"rand", "rand_like", "randint", "randint_like", "uniform_"}
_DRAWS = _UNIFORM | {"bernoulli", "bernoulli_", "randn", "randn_like"}
SAME_DRAWS = 64  # draws one after the other that give equal numbers; then a loop that waits ends
LOUD = 1024.0  # median size of what a loss gets: losses of a thousand, which any cap would cut
LARGEST_COPY = 1 << 31  # 16-bit weights of which float32 copies are made: up to 8 GiB


class Isolation:
    """The measurement of one fit; see the module's docstring.

    Args:
        root: The module that is trained.
        precision: Lightning's name of the precision.
        trusted: Whether the user has proved that the loss is a mean of per-sample means.
        max_rows: The largest number of rows that a step runs at once; None for whole batches.

    Attributes:
        is_running: Whether the present step belongs to the measurement.
        reason: Why nothing was measured; empty if it was, or was not tried yet.
        moved: How far the gradient was from the same one alone, over its norm.
        rounding: :data:`ROUNDING` if anything is computed in half precision, else 0.
    """

    def __init__(
        self, root: nn.Module, precision: str, *, trusted: bool, max_rows: int | None = None
    ) -> None:
        self._root, self._max_rows = root, math.inf if max_rows is None else max_rows
        weights = itertools.chain(root.parameters(), root.buffers())
        self.rounding = ROUNDING * (precision.startswith("bf16") or any(map(_is_half, weights)))
        self.is_running = self._is_done = False
        self.reason, self.moved = "", math.nan
        self._recorder: Any = None
        self._check = LossCheck(trusted=trusted)  # one, as a factor must not change between runs
        self._draws = _PlantedDraws()
        self._rows: Any = None  # of the last run: per-sample gradients and their weights
        self._sketched: Any = None
        self._directions = dict[Tensor, Any]()

    def measure(
        self, step: Callable[[Any], Any], sampling: Any, context: DefenseContext, team: Team
    ) -> bool:
        """Compare a made row alone and in company, once in a fit; warn if that cannot be done.

        Args:
            step: A function that passes a batch to ``training_step`` through :meth:`run`.
            sampling: The Poisson sampling, which has the loader.
            context: The client and the process.
            team: The processes of this client.

        Returns:
            Whether this process or another could not measure it at this call.

        Raises:
            DefenseError: The gradients differ. The message says by how much, and what to change.
        """
        if self._is_done:
            return False
        self._is_done = self.is_running = True
        self._recorder = Recorder(self._root)
        weights = self._root.parameters()
        trained = (p for p in weights if p.requires_grad and not isinstance(p, DTensor))
        draw = per_sample.random_directions  # outside of the planted draws
        self._directions = {p: draw(i, p, SKETCHES) for i, p in enumerate(trained)}
        try:
            dry_run = _dry_run(self._root, context, self._draws)
            with team.together(), dry_run as tolerance:
                self.reason = self._compare(step, sampling, context, tolerance)
        finally:
            self._recorder.remove()
            self.is_running, self._rows, self._sketched, self._directions = False, None, None, {}
        is_half = self._draws.is_half or self.rounding > 0
        is_half, unmeasured = map(bool, team.largest([is_half, bool(self.reason)]))
        self.rounding = ROUNDING if is_half else 0.0
        if unmeasured:
            rank_zero_warn(
                "DPSGD: whether an example's gradient depends on the other examples of its batch "
                f"was not measured: {self.reason or 'another process could not'}. Epsilon holds "
                "only if it does not."
            )
        return unmeasured

    def run(self, training_step: Callable[[], Any], batch: Any) -> Any:
        """Run a batch of the measurement, and record the gradient of each of its rows."""
        recorder, samples = self._recorder, count_samples(batch)
        torch.manual_seed(self._draws.seed)
        with recorder.step(samples):
            output = training_step()
        recorder.check()
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        check = self._check
        check.check_form(loss, recorder.calls, samples)
        edges = [call.edge for call in recorder.calls if call.trained]
        # As in a step, backward begins with 1 for each term; hooks record the rows' gradients.
        torch.autograd.grad(loss, edges, check.terms.to(loss).expand_as(loss), allow_unused=True)
        recorder.check()
        weights = torch.ones(samples) if check.weights is None else check.weights
        self._rows = recorder.parts, samples * weights / check.terms.to(weights)
        self._sketched = None
        self._draws.is_half |= recorder.half
        recorder.clear()
        return output

    def _row(self, row: int) -> "_Row":
        """Return a row's gradient in the last run."""
        parts, weights = self._rows
        own = {p: per_sample.slice_samples(parts[p], row, row + 1) for p in parts}
        return _Row(own, weights[row : row + 1], self._sketches()[:, row])

    def _sketches(self) -> Any:
        """Return (P, B, K) random projections of the rows' gradients in the last run, as an array.

        Their norms estimate those of the gradients, which would take as long as several steps.
        """
        parts, weights = self._rows
        if self._sketched is None:
            zeros = torch.zeros(len(weights), SKETCHES, dtype=torch.float64)
            forms = [
                per_sample.bilinear_forms(parts[p], *pair).to(zeros) if p in parts else zeros
                for p, pair in self._directions.items()
            ]
            weights = weights.to(zeros)[:, None]
            self._sketched = (torch.stack(forms) * weights).numpy() / math.sqrt(SKETCHES)
        return self._sketched

    def _compare(self, step: Any, sampling: Any, context: DefenseContext, tolerance: float) -> str:
        """Return why nothing could be measured; empty if a row's gradient stays the same."""
        collate = sampling.loader.collate_fn
        if reason := self._why_unmeasured(context, collate):
            return reason
        example, draws = collate.dataset[collate.index], self._draws
        # Labels of zero for all, where rows with others are not taken.
        forms = itertools.product(_row_lengths(self._root, collate, example), (True, False))
        for (lengths, width), has_labels in forms:

            def run(chosen: list[Any]) -> Any:  # collated again, as a step may change its batch
                draws.calls, draws.rows = 0, len(chosen)
                step(tree_map(_widened, context.host.to_device(collate(chosen))))

            draws.seed, draws.factor = 0, 1.0
            try:
                company = [_made(example, i, n, width) for i, n in enumerate(lengths)]
            except Exception as error:  # numbers of a kind that torch does not compute with
                return f"no row like an example could be made: {type(error).__name__}: {error}"
            rows = company[:1]
            alone = partial(run, rows)
            try:
                collate(company)  # before anything is computed
                alone()
                first, form = self._row(0), self._check.form
                company, classes = rows[:], draws.classes if has_labels else 1
                for number, length in enumerate(lengths[1:], 1):
                    company.append(_made(example, number, length, width, number % classes))
                company[:2] = company[1::-1]
                if not SMALLEST < first.norm < math.inf or not _differ(collate(company)):
                    reason = "no row with a gradient of its own could be made"
                    continue
                other = _made(example, len(lengths), lengths[0], width, 1 % classes)
                run(company)
                self.moved, parameter = self._nearest(first, tolerance)
                if self.moved <= tolerance:
                    self._check_size(alone, form)
                    copies = self._copies(sampling, collate(rows), context)
                    pair = rows[0], other
                    self.moved, parameter = self._among(run, first, *pair, copies, tolerance)
                if self.moved <= tolerance:
                    return ""
            except DefenseError:
                raise
            except Exception as error:  # the training does not take rows of this form
                reason = f"rows made like an example raised {type(error).__name__}: {error}"
                if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                    return f"{reason} (rows of {lengths} tokens)"
                continue
            mend = _mend(collate(rows), collate(company))
            if not mend and [*values_in(collate(rows))] != [*values_in(collate.batch_of(rows))]:
                mend = _MASKS
            draws.seed = 1
            alone()
            if not mend and self._nearest(first, tolerance)[0] > tolerance:
                return "training_step draws random numbers other than by torch.rand, randn and such"
            raise DefenseError(
                "DPSGD: other rows of a batch change an example's gradient: that of "
                f"'{parameter_name(parameter, self._root)}' by {self.moved:.1g} of its norm. "
                f"{mend or _OWN_ROW}"
            )
        return reason

    def _copies(self, sampling: Any, row: Any, context: DefenseContext) -> int:
        """Return the number of equal rows: those of a large batch, as far as they are cheap."""
        mean: float = sampling.rate * len(sampling.loader.dataset) / context.processes
        usual = min(self._max_rows, mean + 4 * math.sqrt(mean))  # more in one of 10,000 batches
        size = max(tensor.numel() for tensor in tensors_of(row))
        return max(EQUAL, min(math.ceil(usual), 2 * LONG // size))

    def _among(
        self, run: Any, first: "_Row", row: Any, other: Any, copies: int, tolerance: float
    ) -> tuple[float, Any]:
        """Return how far the gradient of one of two rows moves among copies of the other.

        For the last argument and the result see :meth:`_nearest`.
        """
        worst: tuple[float, Any] = (0.0, None)
        run([other])
        alone = first, self._row(0)
        for counts in ((1, copies), (copies, 1)):
            equal = zip((row, other), counts, strict=True)
            run([copy.deepcopy(value) for value, n in equal for _ in range(n)])
            for own, n in zip(alone, counts, strict=True):
                if own.norm > SMALLEST:
                    worst = max(worst, self._nearest(own, tolerance, n), key=itemgetter(0))
        return worst

    def _why_unmeasured(self, context: DefenseContext, collate: object) -> str:
        """Return why nothing can be measured in this run; empty if something can be."""
        if any(isinstance(p, DTensor) for p in self._root.parameters()):
            return "the weights are sharded"
        if context.host.reducer is not None and context.host.reducer.static_graph:
            return "DistributedDataParallel has a static graph"
        return "" if isinstance(collate, EmptyCollate) else "the collate function is unknown"

    def _check_size(self, alone: Callable[[], Any], form: object) -> None:
        """Check that a loss is computed in the same way if it is a thousand times as large.

        Args:
            alone: Runs the row alone, and compares the factors of the loss.
            form: The form of the loss before.

        Raises:
            DefenseError: It is not.
        """
        for self._draws.factor in (LOUD, -LOUD):  # of which one is wrong for each label
            with suppress(ArithmeticError):  # a division by a loss of zero
                alone()
            if self._check.form != form:
                raise DefenseError(_SIZE)
        self._draws.factor = 1.0

    def _nearest(self, alone: "_Row", tolerance: float, copies: int = 1) -> tuple[float, Any]:
        """Return how far the gradients of as many rows in the last run are from another one.

        They are the nearest rows because a collate function may sort.

        Returns:
            The largest distance of a parameter, over the norm of its gradient or at least
            :data:`FLOOR` of the whole one's, and this parameter. A distance within the tolerance
            is estimated from sketches.
        """
        sizes = np.linalg.norm(alone.sketch, axis=1).clip(FLOOR * alone.norm)
        distances = np.linalg.norm(self._sketches() - alone.sketch[:, None], axis=2)
        shares = np.nan_to_num(distances / sizes[:, None], nan=math.inf).max(0)
        if len(shares) < copies:
            return math.inf, next(iter(alone.parts))
        row = shares.argsort()[copies - 1]
        if shares[row] <= tolerance:
            return float(shares[row]), None
        gradients, exact = (alone.gradient(), self._row(int(row)).gradient()), dict[Any, float]()
        for p in gradients[0] | gradients[1]:
            first, other = (g[p] if p in g else p.new_zeros(()) for g in gradients)
            size = max(float(first.norm()), FLOOR * alone.norm)
            exact[p] = float((first - other).norm().nan_to_num(math.inf, math.inf)) / size
        parameter = max(exact, key=exact.__getitem__)
        return exact[parameter], parameter


@dataclass
class _Row:
    """The gradient of a row, its weight, and its sketch (P, K) of P parameters."""

    parts: dict[Tensor, Any]
    weight: Tensor
    sketch: Any

    @property
    def norm(self) -> float:
        """Return the norm, estimated from the sketch."""
        return float(np.linalg.norm(self.sketch))

    def gradient(self) -> dict[Tensor, Tensor]:
        """Return the gradient by parameter."""
        parts, weight = self.parts, self.weight
        return {p: per_sample.weighted_sum(parts[p], weight.to(p.device), p.shape) for p in parts}


_OWN_ROW = (
    "Compute each row from that row alone: GroupNorm or LayerNorm in place of statistics of the "
    "batch, `mean_of_sample_means` in place of a division by all labels, no rows as negatives, no "
    "scores of padding (or all rows of one length). "
    "Run all rows in one call, with the rows of an example side by side: "
    "torch.stack([a, b], 1).flatten(0, 1), not torch.cat([a, b])"
)


_SIZE = (
    "DPSGD: the size of a batch's loss decides how the loss is computed, so that one row changes "
    "what others add: decide by each row's own loss, before the mean, or leave it out"
)
_MASKS = (
    "The collate function draws random numbers: draw those of the whole batch at once, by "
    "torch.rand or torch.bernoulli (DPSGD sets torch's generators)"
)


def _mend(alone: Any, company: Any) -> str:
    """Return what to change, as far as the two batches show it; empty if they do not."""
    flat, wide = ([t for t in tensors_of(b) if t.dim() == 2] for b in (alone, company))
    masks = (t for t in wide if not t.is_floating_point() and bool((t <= 1).all()))
    if any(bool(((t[:, 0] == 0) & (t[:, -1] == 1)).any()) for t in masks):
        return 'Padding is on the left: set `tokenizer.padding_side = "right"`'
    if max((t.shape[1] for t in flat), default=0) > max((t.shape[1] for t in wide), default=0):
        return "The collate function cuts rows to the shortest: let it pad them to the longest"
    return ""


class _PlantedDraws(TorchFunctionMode):
    """A mode in which functions drop nothing, and torch draws equal numbers for each row.

    A number depends on its index in the last dimension, so that random masks (of a collate function
    for masked words) are those of the row also in company. Generators do not follow these draws.

    Attributes:
        calls: The number of draws since the run began.
        rows: The number of rows of the run.
        seed: The seed of all other draws of a step.
        factor: 1, or the median size to which inputs of losses are multiplied, with its sign.
        classes: The number of classes of the last cross-entropy; 2 if there was none.
        is_half: Whether autocast was on, or a gradient came in half precision.
    """

    calls, rows, seed, factor, classes, is_half = 0, 0, 0, 1.0, 2, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        if name in ("cross_entropy", "log_softmax") or name.endswith(("_loss", "with_logits")):
            first, *others = args or (kwargs.pop("input"),)
            self.classes = first.shape[:2][-1] if name == "cross_entropy" else self.classes
            size = 1.0 if self.factor == 1 else float(first.detach().abs().median().clamp(1e-6))
            size = size if math.isfinite(size) else 1.0  # most scores are excluded by -inf
            # A tensor, as a single number would be a changing factor of the loss.
            factor = torch.full_like(first if first.dim() else first[None], self.factor / size)
            return func((first * factor).view(first.shape), *others, **kwargs)
        if name == "randperm":  # which moves each row
            return func(*args, **kwargs).sort()[0].roll(1)
        if name not in _DRAWS:
            return func(*args, **kwargs)
        shares = [*args[name.endswith("_") :], kwargs.get("p", 0.5)]  # before they are overwritten
        block = self.calls // SAME_DRAWS
        with preserve_process(), torch.no_grad():
            torch.manual_seed(block)
            drawn: Tensor = func(*args, **kwargs)
            row = drawn.reshape(-1, *drawn.shape[-1:])[0] if drawn.numel() else drawn
            row = row[:1] if drawn.shape == (self.rows,) else row  # one number for each row
            if name not in _UNIFORM:
                share = (torch.arange(row.numel(), device=row.device) + block) * GOLDEN % 1
                normal = torch.special.ndtri(share.clamp(min=0.01))
                row = share < shares[0] if "bernoulli" in name else normal
            drawn.copy_(row.to(drawn).expand_as(drawn))
        self.calls += 1
        return drawn.requires_grad_(bool(kwargs.get("requires_grad")))


@contextmanager
def _dry_run(root: nn.Module, context: DefenseContext, draws: _PlantedDraws) -> Iterator[float]:
    """Yield the tolerance, in a context in which steps leave no trace, and draw as ``draws``."""
    reducer = context.host.reducer
    weights = {t for m in root.modules() for t in (*m._parameters.values(), *m._buffers.values())}
    halves: set[Any] = {*filter(_is_half, weights)}
    is_copied = sum(t.numel() for t in halves) <= LARGEST_COPY
    is_plain = all(t is None or type(t) in (Tensor, nn.Parameter, nn.Buffer) for t in weights)
    kinds = [*filter(torch.amp.is_autocast_available, ("cpu", context.device.type))]

    def use_float32(*_: object) -> None:
        for kind in kinds:
            draws.is_half |= torch.is_autocast_enabled(kind)
            torch.set_autocast_enabled(kind, False)
        torch.set_default_dtype(torch.promote_types(torch.get_default_dtype(), torch.float32))

    with ExitStack() as stack:
        for block in (preserve_process(), context.host.without_logs(), taps_paused()):
            stack.enter_context(block)
        if reducer is not None:  # other processes may run no such step
            stack.callback(setattr, reducer, "require_forward_param_sync", True)
            reducer.require_forward_param_sync = False
            stack.enter_context(reducer.no_sync())
        stack.enter_context(preserve_model(root))
        if is_compiled(root):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(per_sample.full_precision())
        flags = {"enabled": torch.backends.cudnn.enabled, "deterministic": True}
        stack.enter_context(torch.backends.cudnn.flags(**flags, allow_tf32=False))
        stack.enter_context(draws)
        for module in root.modules():  # a layer is run again in backward, outside of the mode
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        if not is_copied:
            yield COARSE
            return
        stack.enter_context(register_module_forward_pre_hook(use_float32))
        _widen(root, halves)
        yield TOLERANCE if is_plain else COARSE


def _widen(root: nn.Module, halves: set[Any]) -> None:
    """Put float32 copies in the place of a model's 16-bit weights and buffers."""
    copies: dict[Any, Any] = {t: _widened(t.detach()) for t in halves}
    for module in root.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight in copies:
                copies[weight] = nn.Parameter(copies[weight], weight.requires_grad)
                module._parameters[name] = copies[weight]
        for name, buffer in module._buffers.items():
            module._buffers[name] = copies.get(buffer, buffer)


def _widened(value: Any) -> Any:
    """Return a tensor of 16-bit numbers in float32, and any other value itself."""
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    """Return whether a value is a tensor of 16-bit numbers."""
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _row_lengths(
    root: nn.Module, collate: EmptyCollate, example: Any
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the tokens of made rows, and the length to which they are padded; 0 for none.

    The first row is the one that is compared, the second the long one. A training that does not
    take rows of the first form may take those of a later one.

    Raises:
        DefenseError: The positions of all rows change with the longest row (transformers' dynamic
            RoPE), and the collate function admits a row for which they do.
    """
    ropes = {str(module.rope_type) for module in root.modules() if hasattr(module, "rope_type")}
    configs = [module.config for module in root.modules() if hasattr(module, "config")]
    limits = [n for c in configs if (n := getattr(c, "max_position_embeddings", None))]
    own = _width(collate, example)
    long = own
    if configs:  # a model of transformers: without a table of positions, or with a known one
        long = LONG if ropes or not limits else max(2, min(LONG, *limits) - 2)
    if any("dynamic" in rope for rope in ropes):
        limit = max(limits)
        if _width(collate, _made(example, 0, limit + 1, False)) > limit:
            raise DefenseError(
                "DPSGD: with dynamic RoPE the longest row of a batch changes the positions of all, "
                f"once it has more than {limit} tokens: let the collate function cut rows to that"
            )
    if any("longrope" in rope for rope in ropes):  # beyond it, the check of buffers ends the run
        settings = [getattr(config, "rope_parameters", None) or {} for config in configs]
        long = min(long, *(s.get("original_max_position_embeddings", long) for s in settings))
    lengths = min(TOKENS, max(1, long // 2)), long, 1, 0
    yield from ((lengths, 0), (lengths[:3], 0)) if own else ()
    for width in dict.fromkeys([min(2 * TOKENS, own), own]):
        yield (
            (min(TOKENS, max(1, width // 2)), max(1, width), 1, 0),
            {0: sys.maxsize}.get(width, width),
        )


def _width(collate: EmptyCollate, example: Any) -> int:
    """Return the tokens of an example in a batch; 0 if it has no whole numbers."""
    tensors = (t for t in tensors_of(collate([example])) if t.dim() > 1)
    return max((t.shape[-1] for t in tensors if not t.is_floating_point()), default=0)


def _made(value: Any, number: int, tokens: int, width: int, label: int = 0, key: str = "") -> Any:
    """Return a value of an example's form with other contents.

    Args:
        value: The example, or a value inside it.
        number: The number of the row; rows of different numbers differ.
        tokens: The length of its sequences of whole numbers, or of their part without padding.
        width: The length to which sequences are padded, but at most the example's; 0 for none.
        label: The value of each single whole number.
        key: The name of the value.
    """
    form = number, tokens, width, label
    if isinstance(value, Mapping):
        return rebuilt(value, {k: _made(v, *form, str(k)) for k, v in value.items()})
    is_sequence = isinstance(value, tuple) and len(value) > 2 and {*map(type, value)} == {int}
    if isinstance(value, tuple) and not key and not is_sequence:  # the fields of an example
        return rebuilt(value, [_made(v, *form, f"field {i}") for i, v in enumerate(value)])
    if isinstance(value, str):
        return " ".join("abcdefgh"[(number + i) % 8] for i in range(tokens))
    try:
        numbers = torch.as_tensor(value)
        numbers = numbers if numbers.is_floating_point() else numbers.long()
    except (TypeError, ValueError, RuntimeError):  # not numbers, or not as many in each row
        if isinstance(value, list | tuple):
            return rebuilt(value, [_made(v, *form, key) for v in value])
        return value
    made = _made_numbers(numbers, *form, key).to(numbers)
    if isinstance(value, Tensor):
        return made
    return made.numpy() if isinstance(value, np.ndarray) else type(value)(made.tolist())


def _made_numbers(
    numbers: Tensor, number: int, tokens: int, width: int, label: int, key: str
) -> Tensor:
    """Return other numbers of the form of an example's; for the arguments see :func:`_made`."""
    size = numbers.shape[-1] if numbers.dim() else 1
    index = torch.arange(min(size, width) if width else tokens)
    top = max(0, int(numbers.max())) if numbers.numel() else 0
    if "mask" in key:
        top = int("special" not in key)
    if numbers.is_floating_point():
        waves = torch.arange(numbers.numel()) * (number + 1.7) + number
        return waves.cos().view(numbers.shape) * (number + 1) * (tokens > 0)
    if not numbers.dim():
        return torch.tensor(label)
    if top <= 1 and "label" in key:
        made = (index + 1) * label % 2
    elif top <= 1:  # a mask, or one kind of token
        made = torch.where((index < tokens) | ("mask" not in key), top, 0)
    elif torch.equal(numbers.flatten().cpu(), torch.arange(size)):  # positions
        made = index
    else:
        made = 1 + (index * (2 * number + 3) + number + sum(key.encode())) % top
    if width and bool((numbers < 0).any()):
        made = torch.where(index < tokens, made, IGNORE_INDEX)
    return made.expand(*numbers.shape[:-1], -1)


def _differ(batch: Any) -> bool:
    """Return whether the rows of a batch differ from each other."""
    return any(bool((t != t[:1]).any()) for t in tensors_of(batch) if t.dim())
