"""A logical batch in physical pieces: many rows in one release, few of them in memory at once.

The loader draws the logical batch. For Lightning there is only this batch, with one call of
``training_step``, one loss, one ``backward`` and one optimizer step. So ``global_step``,
schedulers, ``max_steps``, the progress bar, loggers, checkpoints and monitors count logical steps.

Within Lightning's call of ``training_step`` the batch is split:

- ``training_step`` is run on one slice of rows (a piece) after the other. Each has a forward and a
  backward pass, and its loss is multiplied by its share of the rows. A slice keeps the width to
  which the collate function has padded the batch, and dropout draws new masks.
- So ``p.grad`` adds up to the gradient of the mean loss over the logical batch. Gradients of
  weights in half precision are added up in float32, in one more copy of them: with eight bits, a
  piece would be rounded away when it is added to the sum of a few hundred.
- The clipped sums of all pieces except the last are added up in a float32 copy of the trained
  parameters. The release adds the last piece and the noise.
- The output for the batch is the mean of the pieces' losses. Lightning then zeroes gradients and
  calls ``backward`` on it; its graph is a single node, which puts the gradients back.
- Values logged in ``training_step`` are combined by their ``reduce_fx``.

All processes of a client run the same number of pieces, as many as the process with the most rows
needs. A process without further rows runs a placeholder row, whose loss is multiplied by 0. An
error in a piece ends the step before anything is released. Checkpoints are written between steps,
so they hold no part of a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.defenses.dpsgd.poisson import rebuilt
from lightning_fedleak.defenses.dpsgd.recorder import OwnBackward, tensors_of
from lightning_fedleak.defenses.host import Piece
from lightning_fedleak.defenses.processes import Team

Step = Callable[[Any], Any]
"""A function that passes a batch to ``training_step`` and returns its output."""


def pieces_of(
    batch: Any, samples: int, max_rows: int, team: Team, users: Sequence[int] | None = None
) -> list[Piece]:
    """Return the pieces of a logical batch, the same number in all processes of the client.

    It is a collective call.

    Args:
        batch: A nested structure of mappings, lists, tuples, tensors and other values. Tensors,
            arrays and lists with one row for each sample are split. Everything else goes into every
            piece.
        samples: The number of rows; 0 if the batch is the placeholder of an empty one.
        max_rows: The largest number of rows of a piece.
        team: The processes of the client.
        users: The number of adjacent rows of each user, at most ``max_rows``, whose rows stay in
            one piece; None if the unit of privacy is an example.
    """
    row_counts = _split_users([1] * samples if users is None else users, max_rows)
    (count,) = team.largest([len(row_counts)])
    if count <= 1:
        return [Piece(batch, samples, users)]
    pieces, start = [], 0
    for counts in row_counts:
        rows = slice(start, start + sum(counts))
        by_user = None if users is None else counts
        pieces.append(Piece(rows_of(batch, rows, samples), sum(counts), by_user))
        start = rows.stop
    # Placeholders. Each has its own batch, because a loss may remove the labels from its batch.
    while len(pieces) < count:
        pieces.append(Piece(rows_of(batch, slice(0, 1), samples or 1), 0))
    return pieces


def _split_users(users: Sequence[int], max_rows: int) -> list[list[int]]:
    """Return the users' numbers of rows, split into pieces of at most ``max_rows`` rows."""
    pieces: list[list[int]] = []
    for count in users:
        if pieces and sum(pieces[-1]) + count <= max_rows:
            pieces[-1].append(count)
        else:
            pieces.append([count])
    return pieces


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
        pieces: The pieces, at least two.
        step: Passes one batch to ``training_step`` and the defences around it.
        context: The context in which the step runs.
        begin_piece: Is called before each piece.
        end_piece: Is called after the backward of each piece except the last.

    Returns:
        The output of ``training_step`` for the logical batch: a loss, or a mapping with one. Its
        ``backward`` puts the gradients of all pieces into ``p.grad``.
    """
    host = context.host
    # DistributedDataParallel should reduce only in the last backward, unless its graph is static.
    reducer = None if host.reducer is None or host.reducer.static_graph else host.reducer
    trained = [p for p in context.root.parameters() if p.requires_grad]
    _pop_gradients(trained)
    # If this process drew no rows, the output of the first placeholder is that of the batch.
    counts = [piece.rows for piece in pieces] if any(p.rows for p in pieces) else [1]
    total, start = sum(counts), 0
    halves, sums = [p for p in trained if p.element_size() < 4], dict[nn.Parameter, Tensor]()
    combined: Any = None
    dtype = torch.float32
    with host.merged_logs(pieces) as log_context:
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            begin_piece(piece)
            with nullcontext() if is_last or reducer is None else reducer.no_sync():
                with log_context(piece):
                    output = step(piece.batch)
                loss = _loss_in(output).reshape(())
                dtype = loss.dtype
                if is_last and reducer is not None:
                    _restore(sums)  # the reducer averages p.grad, so it must hold all pieces
                host.backward(loss * (piece.rows / total))
            _accumulate_halves(halves, sums)
            rows = counts[index] if index < len(counts) else 0
            if rows:
                value = with_loss(output, loss)
                combined = _combine(combined, value, start, rows, total)
                start += rows
                del value
            del output, loss
            if not is_last:
                end_piece()
    _restore(sums)
    gradients = _pop_gradients(trained)
    mean = _loss_in(combined).to(dtype).detach().requires_grad_()
    loss = OwnBackward.apply(mean, lambda _: _restore(gradients))  # type: ignore[no-untyped-call]
    return with_loss(combined, loss)


def _pop_gradients(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of parameters, and set ``p.grad`` to None."""
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    return gradients


def _loss_in(output: Any) -> Tensor:
    """Return the loss in an output of ``training_step``."""
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return an output of ``training_step`` with its loss replaced by another."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def _accumulate_halves(halves: Sequence[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> None:
    """Move gradients from ``p.grad`` to their sums in float32.

    Args:
        halves: The parameters in half precision.
        sums: The sums by parameter, to which the gradients are added.
    """
    for parameter in halves:
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.float(), None
            sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient


def _restore(sums: dict[nn.Parameter, Tensor]) -> None:
    """Move gradients, or their sums, to ``p.grad``, rounded to the parameters' dtype."""
    while sums:
        parameter, gradient = sums.popitem()
        parameter.grad = gradient.to(parameter.dtype)


# ---- rows of a batch -------------------------------------------------------------------------


def rows_of(value: Any, rows: slice, samples: int) -> Any:
    """Return a batch with these rows of everything in it that has one row for each sample.

    Args:
        value: The batch, or a value inside it.
        rows: The rows.
        samples: The number of samples in the batch.
    """
    if isinstance(value, Tensor):
        return value[rows] if value.dim() else value
    if isinstance(value, Mapping):
        return rebuilt(value, {key: rows_of(item, rows, samples) for key, item in value.items()})
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, list | tuple):
        if len(value) == samples and not any(tensor.dim() for tensor in tensors_of(value)):
            return value[rows]
        return rebuilt(value, [rows_of(item, rows, samples) for item in value])
    shape = getattr(value, "shape", None)
    return value[rows] if isinstance(shape, tuple) and shape[:1] == (samples,) else value


def number_of_rows(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor of a batch; 0 without one."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 0)


def copies_of(batch: Any, row: int, rows: int) -> Any:
    """Return a batch in which all rows are copies of one of its rows.

    Args:
        batch: The batch, or a value inside it.
        row: The index of the row.
        rows: The number of rows in the batch.
    """
    if isinstance(batch, Mapping):
        return rebuilt(batch, {key: copies_of(value, row, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return rebuilt(batch, [copies_of(value, row, rows) for value in batch])
    has_rows = isinstance(batch, Tensor) and batch.dim() and len(batch) == rows
    return batch[[row] * rows] if has_rows else batch


# ---- outputs of training_step ----------------------------------------------------------------


def _combine(earlier: Any, value: Any, start: int, rows: int, total: int) -> Any:
    """Return the combined outputs of the pieces so far.

    Scalars are averaged, weighted by rows, and tensors with one row for each sample are
    concatenated. Of everything else the last value is kept. Values are copied, because a small
    tensor kept from each piece would fragment the memory that the pieces use one after the other.

    Args:
        earlier: The combined output of the earlier pieces; None for the first piece.
        value: The output of this piece.
        start: The number of rows of the earlier pieces.
        rows: The number of rows of this piece.
        total: The number of rows of all pieces.
    """
    if isinstance(value, Mapping):
        fields = earlier if isinstance(earlier, Mapping) else {}
        return {k: _combine(fields.get(k), v, start, rows, total) for k, v in value.items()}
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
