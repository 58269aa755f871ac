"""A logical batch in physical pieces: many rows in one release, few of them in memory at once.

The loader draws the logical batch, and Lightning sees no other: one batch, one ``training_step``
hook, one loss, one ``backward``, one optimizer step. So ``global_step``, schedulers, ``max_steps``,
the progress bar, loggers, checkpoints and monitors count logical steps without knowing of pieces.

- Where the strategy would run the module's ``training_step`` once, it is run on slices of rows, one
  after the other, each in its own forward *and* backward, its loss times its share of the rows.
- So ``p.grad`` adds up to the mean over the logical batch (*local*), and each per-sample gradient
  comes as one of a mean over all rows. Clipped sums of all pieces but the last are added up, a
  float32 copy of what is trained; the last one's join them in the release, where noise is added.
- Gradients of weights in half precision are added up in float32, one more copy of these: in eight
  bits a piece is lost beside the sum of a few hundred.
- Lightning then zeroes gradients and calls ``backward`` on what ``training_step`` gave. That is the
  mean of the pieces' losses with a graph of one node, which gives the gradients back.
- Slices keep the width that the collate function padded to. Dropout draws anew for every piece.
- Values logged in ``training_step`` are put together as their ``reduce_fx`` says.
- Processes of one client run equally many pieces, as many as the one with most rows needs; those
  that have none left run a row whose loss is multiplied by 0, as for an empty batch.
- What fails in a piece fails the step before anything is released; a checkpoint in between holds
  the releases before it. Nothing of half a batch is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.defenses.dpsgd.batch import tensors_of, trainer_of
from lightning_fedleak.defenses.dpsgd.poisson import rebuilt
from lightning_fedleak.defenses.processes import Team


@dataclass(frozen=True)
class Piece:
    """Rows that are run at once.

    Attributes:
        batch: of the form of the logical batch.
        rows: how many of them count: all, or none where they stand in for no rows.
        users: how many rows each user has, where users are clipped.
        of: rows of the one user whose rows these are some of; 0 where they are whole users'.
        ends: these are the last of that user's.
    """

    batch: Any
    rows: int
    users: Sequence[int] | None = None
    of: int = 0
    ends: bool = False


def pieces_of(
    batch: Any, samples: int, most: int, team: Team, users: Sequence[int] | None = None
) -> list[Piece]:
    """A logical batch in pieces of up to ``most`` rows; as many in all processes of the client.

    Args:
        batch: tensors with the rows as their first dimension; those without dimensions go into
            every piece, as does what is no tensor and not as long as there are rows.
        samples: rows that count, 0 where the batch stands in for an empty one.
        most: of a piece.
        team: the processes; a collective.
        users: how many rows each user has. A piece holds whole users, or rows of one who has more
            than ``most``. It is not such a one's rows that come last: where need be a row that
            does not count does.
    """
    parts: list[tuple[int, bool]] = []
    shares = [[1] * min(most, samples - start) for start in range(0, samples, most)]
    if users is not None:
        shares, parts = _shares(users, most)
    (pieces,) = team.largest([len(shares) + bool(parts and parts[-1][0])])
    if pieces <= 1:
        return [Piece(batch, samples, users)]
    found, start = [], 0
    for number, share in enumerate(shares):
        rows = slice(start, start + sum(share))
        own = None if users is None else share
        of, ends = parts[number] if parts else (0, False)
        found.append(Piece(_rows(batch, rows, samples), sum(share), own, of, ends))
        start = rows.stop
    spare = Piece(_rows(batch, slice(0, 1), samples) if samples else batch, 0)
    return found + [spare] * (int(pieces) - len(found))


def _shares(users: Sequence[int], most: int) -> tuple[list[list[int]], list[tuple[int, bool]]]:
    """Rows of each piece, by user; and of which user's rows they are some, and whether the last."""
    shares: list[list[int]] = []
    parts: list[tuple[int, bool]] = []
    for count in users:
        if count > most:
            for start in range(0, count, most):
                shares.append([min(most, count - start)])
                parts.append((count, start + most >= count))
        elif shares and not parts[-1][0] and sum(shares[-1]) + count <= most:
            shares[-1].append(count)
        else:
            shares.append([count])
            parts.append((0, False))
    return shares, parts


def run_pieces(
    pieces: Sequence[Piece],
    step: Callable[[Any], Any],
    context: DefenseContext,
    *,
    before: Callable[[Piece], None],
    after: Callable[[Piece], None],
    reduced_last: bool,
) -> Any:
    """Runs forward and backward of every piece, and puts together what ``training_step`` gave.

    Args:
        pieces: at least two.
        step: runs one batch through ``training_step`` and the defences amid it.
        context: where.
        before: is called before each.
        after: is called after the backward of each but the last.
        reduced_last: DistributedDataParallel is to reduce in the last backward alone.

    Returns:
        What ``training_step`` gives for one batch: a loss, with what else came. Its ``backward``
        puts the gradients of all pieces into ``p.grad``.
    """
    trained = [p for p in context.root.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    # Where none counts (this process drew no row) the first stands for all.
    counts = [piece.rows for piece in pieces] if any(p.rows for p in pieces) else [1]
    total, start = sum(counts), 0
    halves, wide = [p for p in trained if p.element_size() < 4], dict[nn.Parameter, Tensor]()
    given: Any = None
    dtype = torch.float32
    with logged_together(context, pieces) as logging:
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            before(piece)
            with _unreduced(context) if reduced_last and not last else nullcontext():
                with logging(piece):
                    output = step(piece.batch)
                loss = (output["loss"] if isinstance(output, Mapping) else output).reshape(())
                dtype = loss.dtype
                if reduced_last and last:
                    _put_back(wide)
                _backward(loss * (piece.rows / total), context)
            _take_out(halves, wide)
            rows = counts[number] if number < len(counts) else 0
            if rows:
                told = {**output, "loss": loss} if isinstance(output, Mapping) else loss
                given = _gathered(given, told, start, rows, total)
                start += rows
                del told
            del output, loss
            if not last:
                after(piece)
    _put_back(wide)
    gradients = {p: p.grad for p in trained if p.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    whole = (given["loss"] if isinstance(given, Mapping) else given).to(dtype)
    anchor = torch.zeros((), device=whole.device, requires_grad=True)
    loss = _GivenBack.apply(anchor, whole, gradients)  # type: ignore[no-untyped-call]
    return {**given, "loss": loss} if isinstance(given, Mapping) else loss


class _GivenBack(torch.autograd.Function):
    """A loss whose backward was run already: gives the gradients that it found."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, gradients: dict[nn.Parameter, Tensor]
    ) -> Any:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        for parameter, gradient in ctx.gradients.items():
            parameter.grad = gradient
        ctx.gradients = {}
        return None, None, None


def _backward(loss: Tensor, context: DefenseContext) -> None:
    """As Lightning calls it, without the hooks around it, which are for the logical batch."""
    trainer = trainer_of(context)
    if trainer is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        [optimizer, *_] = trainer.optimizers
        trainer.precision_plugin.backward(loss, context.root, optimizer)


def _take_out(halves: Sequence[nn.Parameter], wide: dict[nn.Parameter, Tensor]) -> None:
    """Adds gradients in half precision to those before, in float32."""
    for parameter in halves:
        if parameter.grad is not None:
            own, parameter.grad = parameter.grad.float(), None
            wide[parameter] = wide[parameter].add_(own) if parameter in wide else own


def _put_back(wide: dict[nn.Parameter, Tensor]) -> None:
    while wide:
        parameter, gradient = wide.popitem()
        parameter.grad = gradient.to(parameter.dtype)


def _unreduced(context: DefenseContext) -> AbstractContextManager[Any]:
    found: AbstractContextManager[Any] = trainer_of(context).strategy.block_backward_sync()
    return found


# ---- rows of a batch -------------------------------------------------------------------------


def _rows(value: Any, rows: slice, samples: int) -> Any:
    """The same rows of everything in a batch that has one for each sample."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() else value
    if isinstance(value, Mapping):
        return rebuilt(value, {key: _rows(item, rows, samples) for key, item in value.items()})
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, list | tuple):
        if len(value) == samples and not any(tensor.dim() for tensor in tensors_of(value)):
            return value[rows]
        parts = [_rows(item, rows, samples) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    shape = getattr(value, "shape", None)
    return value[rows] if isinstance(shape, tuple) and shape[:1] == (samples,) else value


# ---- what training_step gave and logged ------------------------------------------------------


def _gathered(known: Any, value: Any, start: int, rows: int, total: int) -> Any:
    """What pieces gave so far, with one more: numbers averaged over rows, rows side by side.

    Of other things the last stays. Nothing of a piece's own memory is kept: what is left of each
    would part the memory that all of them take in turn.

    Args:
        known: of the pieces before; None for the first.
        value: of this piece.
        start: how many rows came before.
        rows: of this piece.
        total: rows of all.
    """
    if isinstance(value, Mapping):
        before = known if isinstance(known, Mapping) else {}
        return {k: _gathered(before.get(k), v, start, rows, total) for k, v in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.dim() == 0 and value.is_floating_point():
        wide = torch.promote_types(value.dtype, torch.float32)
        mean = torch.zeros_like(value, dtype=wide) if start == 0 else known
        return mean.add_(value, alpha=rows / total) if isinstance(mean, Tensor) else value.clone()
    whole = (total, *value.shape[1:])
    if value.shape[:1] == (rows,) and start == 0:
        known = value.new_empty(whole)
    if value.shape[:1] == (rows,) and getattr(known, "shape", None) == whole:
        known[start : start + rows] = value
        return known
    return value.clone()


@contextmanager
def logged_together(
    context: DefenseContext, pieces: Sequence[Piece]
) -> Iterator[Callable[[Piece], AbstractContextManager[None]]]:
    """Around all pieces; what it gives goes around each: what is logged there is of all rows.

    Lightning keeps the last value of a step, and weighs those of an epoch by the batch's size. For
    one inside it the batch is the piece; at the end a step's value is put together from the
    pieces', by its ``reduce_fx`` (a torchmetrics' is that of the last piece).
    """
    trainer = trainer_of(context)
    results = getattr(trainer, "_results", None)
    if results is None:
        yield lambda _: nullcontext()
        return
    known: dict[str, tuple[Tensor, int]] = {}
    counts = any(piece.rows for piece in pieces)
    before, batch = dict.fromkeys(results), results.batch

    def steps() -> dict[str, Any]:
        return {k: m for k, m in results.items() if m.is_tensor and m.meta.on_step}

    earlier = {key: metric._forward_cache for key, metric in steps().items()}

    @contextmanager
    def one(piece: Piece) -> Iterator[None]:
        for metric in steps().values():
            metric._forward_cache = None
        results.batch, results.batch_size = piece.batch, None
        yield
        for key, metric in steps().items():
            if metric._forward_cache is not None and (piece.rows or not counts):
                value, rows = metric._forward_cache.detach(), piece.rows or 1
                known[key] = _reduced(metric.meta, known.get(key), value, rows)

    try:
        yield one
    finally:
        results.batch, results.batch_size = batch, None
        for key, metric in steps().items():
            if key in known:
                value, rows = known[key]
                metric._forward_cache = value / rows if metric.meta.is_mean_reduction else value
                if not metric.meta.on_epoch:
                    metric.value = metric._forward_cache
            elif key in before:
                metric._forward_cache = earlier.get(key)


def _reduced(
    meta: Any, known: tuple[Tensor, int] | None, value: Tensor, rows: int
) -> tuple[Tensor, int]:
    """A value with those of the pieces before, a mean times its rows; and all their rows."""
    if known is None:
        return value * rows if meta.is_mean_reduction else value.clone(), rows
    total, before = known
    if meta.is_mean_reduction:
        total.add_(value, alpha=rows)
    elif meta.is_sum_reduction:
        total.add_(value)
    elif meta.is_max_reduction:
        torch.maximum(total, value, out=total)
    elif meta.is_min_reduction:
        torch.minimum(total, value, out=total)
    else:
        total.copy_(value)
    return total, before + rows


__all__ = ["Piece", "pieces_of", "run_pieces"]
