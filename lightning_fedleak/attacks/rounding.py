"""How far a model's hidden states of one text differ by rounding, between two batches it stands in.

Measured on the model itself: what a precision rounds away differs between models by a factor of a
hundred, and between the layers of one model by as much.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.attacks.membership import sentence_rows
from lightning_fedleak.model_runs import context_length, hidden_states, takes

LENGTHS = (2, 3, 5, 7, 9, 12, 15, 18, 21, 24, 28, 32)
"""Tokens of the random texts."""

PADDING = 3
"""Columns of padding behind the longest."""


@torch.no_grad()
def own_rounding(
    anatomy: Anatomy,
    layer: int,
    dead_zone: float,
    *,
    together: int | None = None,
    cast: torch.dtype | None = None,
) -> float | None:
    """Largest L1 distance between a random text's hidden states alone and in a padded batch.

    Random token ids serve, since rounding hangs on the model more than on what the text says; the
    same ids in every call. Hidden states are those of :func:`hidden_states`, which leaves nothing
    behind.

    Args:
        anatomy: of the model.
        layer: whose hidden states are compared.
        dead_zone: what a coordinate may differ by without being counted, in units of the mean size
            of the coordinates that are not zero.
        together: positions of a sentence that are read as one input; None: each token is one.
        cast: run under autocast to this dtype; None: as the model is.

    Returns:
        In units of ``‖T‖_1``; None where the size of the vocabulary is not known, or hidden states
        are not finite.
    """
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    if weight is None:
        return None
    context = context_length(anatomy) or LENGTHS[-1] + PADDING
    masked = takes(anatomy.model, "attention_mask")
    most = min(LENGTHS[-1], max(1, context - PADDING))
    lengths = torch.tensor([min(n, most) if masked else most for n in LENGTHS])
    columns = min(context, most + PADDING) if masked else most
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(weight), (len(LENGTHS), columns), generator=generator)
    mask = (torch.arange(columns) < lengths[:, None]).long()
    with nullcontext() if cast is None else torch.autocast(anatomy.device.type, dtype=cast):
        batch = hidden_states(anatomy, layer, ids, mask if masked else None)
        alone = [
            hidden_states(anatomy, layer, row[None, :n])
            for row, n in zip(ids, lengths.tolist(), strict=True)
        ]
    found = max(
        _largest(_rows(one, together), _rows(batch[i : i + 1, : one.shape[1]], together), dead_zone)
        for i, one in enumerate(alone)
    )
    return found if found < float("inf") else None


def _rows(hidden: Tensor, together: int | None) -> Tensor:
    return (hidden[0] if together is None else sentence_rows(hidden, None, together)).double()


def _largest(targets: Tensor, rows: Tensor, dead_zone: float) -> float:
    """Largest distance of a row from its target beyond the zone, relative; inf if not finite."""
    sizes = targets.abs().sum(1)
    zones = dead_zone * sizes / (targets != 0).sum(1).clamp(min=1)
    beyond = ((rows - targets).abs() - zones[:, None]).clamp(min=0).sum(1)
    relative = (beyond / sizes).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(torch.where(sizes == 0, beyond, relative).max())


__all__ = ["own_rounding"]
