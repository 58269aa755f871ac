"""A logical batch in physical pieces: many rows in one release, few of them in memory at once.

The loader draws the logical batch, and Lightning sees no other: one batch, one ``training_step``
hook, one loss, one ``backward``, one optimizer step. So ``global_step``, schedulers, ``max_steps``,
the progress bar, loggers, checkpoints and monitors count logical steps.

- The strategy's call of ``training_step`` runs on slices of rows, one after the other, each with a
  forward and a backward, its loss times its share of the rows.
- So ``p.grad`` adds up to the mean over the logical batch (*local*), and each per-sample gradient
  is one of a mean over all rows. Clipped sums of all pieces but the last add up in a float32 copy
  of what is trained. Those of the last join them in the release, where noise is added.
- Gradients of weights in half precision add up in float32, in one more copy: in eight bits a piece
  is lost beside the sum of a few hundred.
- Lightning then zeroes gradients and calls ``backward`` on the output. That is the mean of the
  pieces' losses with a graph of one node, which puts the gradients back.
- Slices keep the width that the collate function padded to. Dropout draws again for every piece.
- Values logged in ``training_step`` are combined as their ``reduce_fx`` says.
- Processes of one client run equally many pieces, as many as the one with most rows needs. Where a
  process has no rows left, it runs a row whose loss is multiplied by 0, as for an empty batch.
- An error in a piece ends the step before anything is released. A checkpoint holds the releases
  before it, and no part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.defenses.dpsgd.poisson import rebuilt
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of
from lightning_fedleak.defenses.host import Piece
from lightning_fedleak.defenses.processes import Team

Step = Callable[[Any], Any]
"""Runs a batch, and returns what the training step returns."""


def pieces_of(
    batch: Any, samples: int, max_rows: int, team: Team, users: Sequence[int] | None = None
) -> list[Piece]:
    """Return a logical batch in pieces, equally many in all processes of the client.

    Args:
        batch: tensors with the rows as their first dimension. Tensors without dimensions go into
            every piece, as does what is no tensor and not as long as there are rows.
        samples: rows that count, 0 where the batch stands in for an empty one.
        max_rows: The largest number of rows of a piece.
        team: the processes; a collective.
        users: how many rows each user has, at most ``max_rows``. A piece holds whole users.
    """
    shares = _shares([1] * samples if users is None else users, max_rows)
    (count,) = team.largest([len(shares)])
    if count <= 1:
        return [Piece(batch, samples, users)]
    pieces, start = [], 0
    for share in shares:
        rows = slice(start, start + sum(share))
        by_user = None if users is None else share
        pieces.append(Piece(_rows(batch, rows, samples), sum(share), by_user))
        start = rows.stop
    while len(pieces) < count:  # each its own object: a loss may take labels out of its batch
        pieces.append(Piece(_rows(batch, slice(0, 1), samples or 1), 0))
    return pieces


def _shares(users: Sequence[int], max_rows: int) -> list[list[int]]:
    """Return the rows of each piece by user."""
    shares: list[list[int]] = []
    for count in users:
        if shares and sum(shares[-1]) + count <= max_rows:
            shares[-1].append(count)
        else:
            shares.append([count])
    return shares


def run_pieces(
    pieces: Sequence[Piece],
    step: Step,
    context: DefenseContext,
    *,
    begin_piece: Callable[[Piece], None],
    end_piece: Callable[[], None],
) -> Any:
    """Run forward and backward of every piece, and combine the outputs of ``training_step``.

    Args:
        pieces: at least two.
        step: runs one batch through ``training_step`` and the defences around it.
        context: where the step runs.
        begin_piece: is called before each piece.
        end_piece: is called after the backward of each piece but the last.

    Returns:
        The output of ``training_step`` for one batch: a loss, or a mapping with one. Its
        ``backward`` puts the gradients of all pieces into ``p.grad``.
    """
    host = context.host
    # DistributedDataParallel is to reduce in the last backward alone.
    reducer = None if host.reducer is None or host.reducer.static_graph else host.reducer
    trained = [p for p in context.root.parameters() if p.requires_grad]
    _pop_gradients(trained)
    # Where none counts (this process drew no row) the first stands for all.
    counts = [piece.rows for piece in pieces] if any(p.rows for p in pieces) else [1]
    total, start = sum(counts), 0
    halves, wide = [p for p in trained if p.element_size() < 4], dict[nn.Parameter, Tensor]()
    combined: Any = None
    dtype = torch.float32
    with host.merged_logs(pieces) as logging:
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            begin_piece(piece)
            with nullcontext() if last or reducer is None else reducer.no_sync():
                with logging(piece):
                    output = step(piece.batch)
                loss = _loss_in(output).reshape(())
                dtype = loss.dtype
                if last and reducer is not None:
                    _restore(wide)
                host.backward(loss * (piece.rows / total))
            _accumulate_wide(halves, wide)
            rows = counts[number] if number < len(counts) else 0
            if rows:
                value = with_loss(output, loss)
                combined = _combined(combined, value, start, rows, total)
                start += rows
                del value
            del output, loss
            if not last:
                end_piece()
    _restore(wide)
    gradients = _pop_gradients(trained)
    mean = _loss_in(combined).to(dtype)
    anchor = torch.zeros((), device=mean.device, requires_grad=True)
    loss = _RestoredGradients.apply(anchor, mean, gradients)  # type: ignore[no-untyped-call]
    return with_loss(combined, loss)


def _pop_gradients(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of parameters, and set ``p.grad`` to None."""
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    return gradients


def _loss_in(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return an output of ``training_step`` with another loss."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


class _RestoredGradients(torch.autograd.Function):
    """A loss whose backward was run before: its backward puts those gradients into ``p.grad``."""

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


def _accumulate_wide(halves: Sequence[nn.Parameter], wide: dict[nn.Parameter, Tensor]) -> None:
    """Move gradients in half precision from ``p.grad`` to their sums in float32."""
    for parameter in halves:
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.float(), None
            wide[parameter] = wide[parameter].add_(gradient) if parameter in wide else gradient


def _restore(wide: dict[nn.Parameter, Tensor]) -> None:
    while wide:
        parameter, gradient = wide.popitem()
        parameter.grad = gradient.to(parameter.dtype)


# ---- rows of a batch -------------------------------------------------------------------------


def _rows(value: Any, rows: slice, samples: int) -> Any:
    """Return a batch with these rows of everything in it that has one row for each sample."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() else value
    if isinstance(value, Mapping):
        return rebuilt(value, {key: _rows(item, rows, samples) for key, item in value.items()})
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, list | tuple):
        if len(value) == samples and not any(tensor.dim() for tensor in tensors_of(value)):
            return value[rows]
        return rebuilt(value, [_rows(item, rows, samples) for item in value])
    shape = getattr(value, "shape", None)
    return value[rows] if isinstance(shape, tuple) and shape[:1] == (samples,) else value


def number_of_rows(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch; 0 where there is none."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 0)


def copies_of(batch: Any, row: int, rows: int) -> Any:
    """Return a batch of ``rows`` rows that are all copies of one of them."""
    if isinstance(batch, Mapping):
        return rebuilt(batch, {key: copies_of(value, row, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return rebuilt(batch, [copies_of(value, row, rows) for value in batch])
    has_rows = isinstance(batch, Tensor) and batch.dim() and len(batch) == rows
    return batch[[row] * rows] if has_rows else batch


# ---- outputs of training_step ----------------------------------------------------------------


def _combined(earlier: Any, value: Any, start: int, rows: int, total: int) -> Any:
    """Return the outputs of the pieces so far: numbers averaged over rows, rows concatenated.

    Of everything else the last value stays. No memory of a piece is kept, because a small tensor
    from each would fragment the memory that they use in turn.

    Args:
        earlier: The earlier of the pieces before; None for the first.
        value: The value of this piece.
        start: rows of the pieces before.
        rows: The rows of this piece.
        total: rows of all pieces.
    """
    if isinstance(value, Mapping):
        fields = earlier if isinstance(earlier, Mapping) else {}
        return {k: _combined(fields.get(k), v, start, rows, total) for k, v in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.dim() == 0 and value.is_floating_point():
        wide = torch.promote_types(value.dtype, torch.float32)
        mean = torch.zeros_like(value, dtype=wide) if start == 0 else earlier
        return mean.add_(value, alpha=rows / total) if isinstance(mean, Tensor) else value.clone()
    shape = (total, *value.shape[1:])
    if value.shape[:1] == (rows,) and start == 0:
        earlier = value.new_empty(shape)
    if value.shape[:1] == (rows,) and getattr(earlier, "shape", None) == shape:
        earlier[start : start + rows] = value
        return earlier
    return value.clone()
