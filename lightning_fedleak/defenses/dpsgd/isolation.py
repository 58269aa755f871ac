"""Measures, before the first release, that an example's gradient does not depend on its batch.

DP-SGD bounds what one example adds to a sum of gradients. That bounds nothing if other rows of the
batch move the example's gradient: padding on the left shifts positions, batch norm mixes
activations, a loss divides by all labels. So the training's own collate function, step and loss
run on *made* rows: one row alone, then the same row in the *company* of a long row, one of one
token and an empty one. The gradient that would be clipped must be the same in both.

Rows are made from the form of one example: its fields, shapes and types, and the largest of its
whole numbers. Nothing else is read from the data. Dropout and autocast are off, float32 replaces
weights of 16 bits, and model, host and random states are restored afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from lightning_fedleak.defenses.dpsgd.loss_graph import LossCheck, check_isolation, skip_ddp_node
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate, rebuilt
from lightning_fedleak.defenses.dpsgd.recorder import Recorder, count_samples, tensors_of
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.model_state import is_compiled, preserve_model, preserve_process
from lightning_fedleak.model.taps.hooks import taps_paused

# The largest distance between the gradients of a row alone and in company, over their norm. Sound
# trainings are far below it, unsound ones far above (benchmarks/defenses/isolation.py).
TOLERANCE = 1e-4
FLOOR = 1e-2  # of the gradient's norm: the least to which a parameter's move is compared
TOKENS = 6  # of the row that is compared
# Tokens of the long row. More take more time; to positions that change with the length of the batch
# it seems as long as the collate function admits (`_lengthen`).
LONG = 128
LARGEST_COPY = 1 << 31  # 16-bit weights of which float32 copies are made: up to 8 GiB


class Isolation:
    """The measurement of one fit; see the module's docstring.

    Args:
        root: The module that is trained.
        trusted: Whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        is_running: Whether the present step belongs to the measurement.
        reason: Why nothing was measured; empty if it was, or was not tried yet.
        moved: How far the gradient was from the same one alone, over its norm.
    """

    def __init__(self, root: nn.Module, *, trusted: bool) -> None:
        self._root, self._trusted = root, trusted
        self.is_running = self._is_done = self._names_layer = False
        self.reason, self.moved = "", math.nan
        self._recorder: Any = None
        self._seed = 0
        self._rows: Any = None  # of the last run: per-sample gradients and their weights

    def measure(self, step: Callable[[Any], Any], loader: Any, context: DefenseContext) -> None:
        """Compare a made row alone and in company, once in a fit; warn if that cannot be done.

        Args:
            step: A function that passes a batch to ``training_step`` through :meth:`run`.
            loader: The Poisson-sampled loader.
            context: The client and the process.

        Raises:
            DefenseError: The gradients differ. The message says by how much, and what to change.
        """
        if self._is_done:
            return
        self._is_done = self.is_running = True
        self._recorder = Recorder(self._root)
        try:
            with _dry_run(self._root, context) as tolerance:
                self.reason = self._compare(step, loader.collate_fn, context, tolerance)
        finally:
            self._recorder.remove()
            self.is_running, self._rows = False, None
        if self.reason:
            rank_zero_warn(
                "DPSGD: whether an example's gradient depends on the other examples of its batch "
                f"was not measured: {self.reason}. Epsilon holds only if it does not."
            )

    def run(self, training_step: Callable[[], Any], batch: Any) -> Any:
        """Run a batch of the measurement, and record the gradient of each of its rows."""
        recorder, samples = self._recorder, count_samples(batch)
        torch.manual_seed(self._seed)
        with recorder.step(samples):
            output = training_step()
        recorder.check()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        check = LossCheck(trusted=self._trusted)
        top_calls = check.check_form(loss, recorder.calls, samples)
        if self._names_layer:
            with recorder.paused():
                check_isolation(skip_ddp_node(loss), top_calls, recorder.calls, samples)
        edges = [call.edge for call in recorder.calls if call.trained]
        torch.autograd.grad(loss, edges, allow_unused=True)  # hooks record the rows' gradients
        recorder.check()
        weights = torch.ones(samples) if check.weights is None else check.weights
        self._rows = recorder.parts, samples * weights
        recorder.clear()
        return output

    def _gradient(self, row: int) -> dict[Tensor, Tensor]:
        """Return a row's gradient in the last run, by parameter."""
        parts, weights = self._rows
        sums = {p: per_sample.slice_samples(parts[p], row, row + 1) for p in parts}
        weight = weights[row : row + 1]
        return {p: per_sample.weighted_sum(sums[p], weight.to(p.device), p.shape) for p in parts}

    def _compare(self, step: Any, collate: Any, context: DefenseContext, tolerance: float) -> str:
        """Return why nothing could be measured; empty if a row's gradient is always the same."""
        if any(isinstance(p, DTensor) for p in self._root.parameters()):
            return "the weights are sharded"
        if not isinstance(collate, EmptyCollate):
            return "the collate function is unknown"
        reason, example = "", collate.dataset[collate.index]
        for lengths, width in _row_lengths(self._root, example):
            rows = [_made(example, number, n, width) for number, n in enumerate(lengths)]
            try:
                batches = [
                    tree_map(_widened, context.host.to_device(collate(batch)))
                    for batch in (rows[:1], [rows[1], rows[0], *rows[2:]])
                ]
                step(batches[0])
            except Exception as error:  # the training does not take rows of this form
                reason = f"a row made like an example raised {type(error).__name__}: {error}"
                continue
            alone = self._gradient(0)
            if not 0 < _norm(alone) < math.inf or not _differ(batches[1]):
                reason = "no row with a gradient of its own could be made"
                continue
            last = _last_position(self._root, collate, example, width)
            try:
                with _lengthened(self._root, last):
                    step(batches[1])
            except DefenseError:
                raise
            except Exception as error:
                reason = f"rows made like an example raised {type(error).__name__}: {error}"
                continue
            # A collate function may sort: the row is the one whose gradient is nearest.
            moves = [self._moves(alone, row) for row in range(len(self._rows[1]))]
            self.moved, parameter = min(moves, key=itemgetter(0))
            if self.moved <= tolerance:
                return ""
            self._seed = 1
            step(batches[0])
            if self._moves(alone, 0)[0] > tolerance:
                return "the step draws random numbers besides dropout"
            mend = _mend(batches, last)
            if not (mend or self._trusted):
                self._names_layer = True
                step(batches[1])  # it may find the layer, and raise an error
            raise DefenseError(
                "DPSGD: other rows of a batch change an example's gradient: that of "
                f"'{parameter_name(parameter, self._root)}' by {self.moved:.1g} of its norm. "
                f"{mend or _OWN_ROW}"
            )
        return reason

    def _moves(self, alone: dict[Any, Tensor], row: int) -> tuple[float, Any]:
        """Return how far a row's gradient is from another, over its norm, and in which parameter.

        It is the largest share of a parameter. A parameter with a small norm is compared with
        :data:`FLOOR` of the norm of the whole gradient.
        """
        gradient, total, moves = self._gradient(row), _norm(alone), {}
        for p in {**alone, **gradient}:
            zeros = torch.zeros(1)
            first, second = (g.get(p, zeros.to(p.device)) for g in (alone, gradient))
            move = _norm({p: first - second}) / max(_norm({p: first}), FLOOR * total)
            moves[p] = math.inf if math.isnan(move) else move
        parameter = max(moves, key=moves.__getitem__)
        return moves[parameter], parameter


def _norm(gradient: dict[Any, Tensor]) -> float:
    """Return the norm of a gradient by parameter."""
    return math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradient.values()))


_OWN_ROW = (
    "Compute each row from that row alone: GroupNorm or LayerNorm in place of statistics of the "
    "batch, `mean_of_sample_means` in place of a division by all labels, no other rows as negatives"
    "."
)


def _mend(batches: Sequence[Any], last: int) -> str:
    """Return what to change, as far as the two batches show it; empty if they do not."""
    alone, company = ([t for t in tensors_of(b) if t.dim() == 2] for b in batches)
    masks = [t for t in company if t.dtype in (torch.int64, torch.bool) and bool((t <= 1).all())]
    if any(bool(((t[:, 0] == 0) & (t[:, -1] == 1)).any()) for t in masks):
        return 'Padding is on the left: set `tokenizer.padding_side = "right"`.'
    if max((t.shape[1] for t in alone), default=0) > max((t.shape[1] for t in company), default=0):
        return "The collate function cuts rows to the shortest: let it pad them to the longest."
    if last:
        return f"Positions change with the longest row: let the collate function cut to {last}."
    return ""


class _WithoutDropout(TorchFunctionMode):
    """A mode in which functions drop nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), dict(kwargs)
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        elif "dropout" in name:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def _dry_run(root: nn.Module, context: DefenseContext) -> Iterator[float]:
    """Yield the tolerance, in a context in which steps leave no trace and drop nothing."""
    reducer = context.host.reducer
    weights = {t for m in root.modules() for t in (*m._parameters.values(), *m._buffers.values())}
    halves = {t for t in weights if t is not None and t.dtype in (torch.bfloat16, torch.float16)}
    is_copied = sum(t.numel() for t in halves) <= LARGEST_COPY
    is_plain = all(t is None or type(t) in (Tensor, nn.Parameter, nn.Buffer) for t in weights)
    kinds = "cpu", context.device.type

    def use_float32(*_: object) -> None:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        if is_copied:
            torch.set_default_dtype(torch.promote_types(torch.get_default_dtype(), torch.float32))

    with ExitStack() as stack:
        for block in (preserve_process(), context.host.without_logs(), taps_paused()):
            stack.enter_context(block)
        if reducer is not None:
            stack.callback(setattr, reducer, "require_forward_param_sync", True)
            stack.enter_context(reducer.no_sync())
        stack.enter_context(preserve_model(root))
        if is_compiled(root):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(per_sample.full_precision())
        stack.enter_context(_WithoutDropout())  # type: ignore[no-untyped-call]
        stack.enter_context(register_module_forward_pre_hook(use_float32))
        copies = {t: _widened(t.detach()) for t in halves} if is_copied else {}
        for module in root.modules():
            for name, weight in module._parameters.items():
                if weight in copies:
                    copies[weight] = nn.Parameter(copies[weight], weight.requires_grad)
                    module._parameters[name] = copies[weight]
            for name, buffer in module._buffers.items():
                module._buffers[name] = copies.get(buffer, buffer)
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        yield TOLERANCE if is_copied and is_plain else COARSE


def _widened(value: Any) -> Any:
    """Return a tensor of 16-bit numbers in float32, and any other value itself."""
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _differ(batch: Any) -> bool:
    """Return whether the rows of a batch differ from each other."""
    return any(bool((t != t[:1]).any()) for t in tensors_of(batch) if t.dim())


# ---- made rows -------------------------------------------------------------------------------


def _row_lengths(root: nn.Module, example: Any) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the tokens of the made rows, and whether they are padded like the example already.

    The first row is the one that is compared, the second the long one. A training that does not
    take rows of the first form may take those of a later one.
    """
    limit, own = _position_limit(root), max(_sizes(example), default=0)
    long = own if limit is None else max(2, min(LONG, limit))
    if own:
        yield (min(TOKENS, max(1, long // 2)), long, 1, 0), False
        yield (min(TOKENS, max(1, long // 2)), long, 1), False
    yield (min(TOKENS, max(1, own // 2)), own, 1, 0), True


def _position_limit(root: nn.Module) -> int | None:
    """Return the number of positions that a transformers model can take; None if unknown."""
    configs = [m.config for m in root.modules() if hasattr(m, "config")]
    if not configs:
        return None
    if any(hasattr(module, "rope_type") for module in root.modules()):
        return LONG  # there is no table of positions
    limits = (getattr(config, "max_position_embeddings", None) for config in configs)
    return min((n - 2 for n in limits if isinstance(n, int)), default=LONG)  # RoBERTa's padding: 2


def _sizes(value: Any) -> Iterator[int]:
    """Yield the length of each sequence of whole numbers, and the words of each text."""
    if isinstance(value, str):
        yield max(2, len(value.split()))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif (array := _numbers(value)) is not None:
        if array.dtype.kind in "iub" and array.ndim:
            yield array.shape[-1]
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sizes(item)


def _numbers(value: Any) -> Any:
    """Return a tensor, an array, a number or a list of numbers as an array; else None."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.float().numpy() if value.is_floating_point() else value.numpy()
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if is_list and all(isinstance(item, bool | int | float) for item in value):
        return np.asarray(value)
    return np.asarray(value) if isinstance(value, bool | int | float | np.ndarray) else None


def _made(value: Any, number: int, tokens: int, is_padded: bool, key: str = "") -> Any:
    """Return a value of an example's form with other contents.

    Args:
        value: The example, or a value inside it.
        number: The number of the row; rows of different numbers differ.
        tokens: The length of its sequences of whole numbers, or of their part without padding.
        is_padded: Whether sequences keep the length of the example.
        key: The name of the value.
    """
    if isinstance(value, Mapping):
        fields = {k: _made(v, number, tokens, is_padded, str(k)) for k, v in value.items()}
        return rebuilt(value, fields)
    if isinstance(value, str):
        return " ".join("abcdefgh"[(number + i) % 8] for i in range(tokens))
    array = _numbers(value)
    if array is None:
        is_list = isinstance(value, list | tuple)
        items = [_made(v, number, tokens, is_padded, key) for v in value] if is_list else []
        return rebuilt(value, items) if is_list else value
    if array.dtype.kind not in "iubf":
        return value
    if array.dtype.kind == "f":
        waves = np.sin(np.arange(array.size) * (number + 1.7) + number).reshape(array.shape)
        made = waves * (tokens > 0)
    elif not array.ndim:
        made = np.zeros(())
    else:
        length = array.shape[-1] if is_padded else tokens
        index, top = np.arange(length), max(int(array.max(initial=0)), 0)
        made = 1 + (index * (2 * number + 3) + number) % max(top, 1)
        if top <= 1:  # a mask, or one kind of token
            made = np.where((index < tokens) | ("mask" not in key), top, 0)
        elif (array == np.arange(array.shape[-1])).all():  # positions
            made = index
        if is_padded and (array < 0).any():
            made = np.where(index < tokens, made, IGNORE_INDEX)
        made = np.broadcast_to(made, (*array.shape[:-1], length))
    if isinstance(value, Tensor):
        return torch.tensor(made).to(value)
    made = made.astype(array.dtype)
    return made if isinstance(value, np.ndarray) else type(value)(made.tolist())


def _last_position(root: nn.Module, collate: Any, example: Any, is_padded: bool) -> int:
    """Return a position that changes the others' if the collate function admits it; 0 for none.

    Positions of transformers' dynamic RoPE and longrope change once a row of the batch is longer
    than a limit.
    """
    kinds = [str(m.rope_type) for m in root.modules() if hasattr(m, "rope_type")]
    if is_padded or not any("dynamic" in kind or "longrope" in kind for kind in kinds):
        return 0
    limits = (
        getattr(m.config, "max_position_embeddings", 0)
        for m in root.modules()
        if hasattr(m, "config")
    )
    longest = max(limits)
    batch = collate([_made(example, 1, longest + 1, False)])
    width = max((t.shape[1] for t in tensors_of(batch) if t.dim() == 2), default=0)
    return longest if width > longest else 0


@contextmanager
def _lengthened(root: nn.Module, last: int) -> Iterator[None]:
    """Let the last column of a batch have the position ``last`` in this context, unless it is 0."""

    def change(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        def lengthen(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim():
                value = value.clone()
                value[..., -1] = last
            return value

        return tree_map(lengthen, (args, kwargs))

    with ExitStack() as stack:
        for module in root.modules() if last else ():
            if hasattr(module, "rope_type"):
                handle = module.register_forward_pre_hook(change, with_kwargs=True)
                stack.enter_context(handle)
        yield
