"""L1 distances of hidden states: which rows lie near which targets, and what rounding adds.

For any signs s, ``‖x - T‖_1 >= s·T - s·x``, with equality where s is the sign of T - x. With s the
sign of T less the middle of the rows, one product of all rows with all signs discards nearly every
pair that is far apart. At a limit of half of ``‖T‖_1`` it leaves 1 to 2% of the pairs of hidden
states of MiniLM-L6 and SmolLM2-135M; the 2-norm, which never exceeds the 1-norm either and costs
the same product, leaves 99 to 100%: of a vector of many coordinates alike it is smaller by about
the root of their number. The bound is linear, so that its rounding error is a small part of the
1-norms; it is allowed for, and no pair within the limit is lost.

Measured on the model itself: what a precision rounds away differs between models by a factor of a
hundred, and between the layers of one model by as much.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.attacks.membership.base import sentence_rows
from lightning_fedleak.model_runs import context_length, hidden_states, takes

_MIDDLE_OF = 64
_BLOCK = {"cpu": 1 << 18}
_BLOCK_ELSEWHERE = 1 << 26

LENGTHS = (2, 3, 5, 7, 9, 12, 15, 18, 21, 24, 28, 32)
"""Tokens of the random texts."""

PADDING = 3
"""Columns of padding behind the longest."""


def neighbours(
    rows: Tensor,
    targets: Tensor,
    limits: Tensor,
    dead_zones: Tensor,
    *,
    prefilter: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs with ``sum_i relu(|x_i - T_i| - dead_zone) < limit``.

    Args:
        rows: (N, D).
        targets: (G, D), of the same floating dtype, float32 or float64.
        limits: (G,).
        dead_zones: (G,), 0 for the plain L1 distance.
        prefilter: False sums every pair: the same result, more slowly.

    Returns:
        (row, target, distance) of the P pairs found, sorted by target, then row. A row that is not
        finite is paired with every target, at distance NaN.
    """
    norms = _summed(rows, None, 0.0)
    if prefilter:
        keep = maybe_near(rows, targets, limits, dead_zones, norms)
        counts = keep.sum(1).tolist()
        keep[[k for k, n in enumerate(counts) if 2 * n > len(rows)]] = True
        counts = [len(rows) if 2 * n > len(rows) else n for n in counts]
        places = keep.nonzero()[:, 1]
    else:
        counts = [len(rows)] * len(targets)
        places = torch.arange(len(rows), device=rows.device).repeat(len(targets))
    broken = ~norms.isfinite()
    some_broken = bool(broken.any())
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    zones = dead_zones.tolist()
    for k, index in enumerate(torch.split(places, counts)):
        if len(index) == 0:
            continue
        distance = _summed(rows, targets[k], zones[k], index)
        if some_broken:
            distance[broken[index]] = torch.nan
        near = ~(distance >= limits[k])
        index = index[near]
        found.append((index, torch.full_like(index, k), distance[near]))
    if not found:
        empty = torch.zeros(0, dtype=torch.long, device=rows.device)
        return empty, empty, rows.new_zeros(0)
    indices, which, distances = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(which), torch.cat(distances)


def _summed(
    rows: Tensor, target: Tensor | None, dead_zone: float, index: Tensor | None = None
) -> Tensor:
    """1-norms of rows less a target, beyond the dead zone; a block at a time, to stay in cache."""
    if index is not None and len(index) == len(rows):
        index = None
    n, d = len(rows) if index is None else len(index), rows.shape[1]
    step = max(1, _BLOCK.get(rows.device.type, _BLOCK_ELSEWHERE) // max(1, d))
    buffer = rows.new_empty((min(n, step), d))
    sums = []
    for a in range(0, n, step):
        taken = rows[a : a + step] if index is None else rows[index[a : a + step]]
        part = buffer[: len(taken)]
        if target is None:
            torch.abs(taken, out=part)
        else:
            torch.sub(taken, target, out=part).abs_()
        if dead_zone > 0:
            part.sub_(dead_zone).clamp_min_(0)
        sums.append(part.sum(1))
    return torch.cat(sums) if sums else rows.new_zeros(0)


def maybe_near(
    rows: Tensor, targets: Tensor, limits: Tensor, dead_zones: Tensor, norms: Tensor
) -> Tensor:
    """(G, N) bool: False only where the distance cannot be below the limit.

    Args:
        rows: (N, D).
        targets: (G, D).
        limits: (G,).
        dead_zones: (G,).
        norms: (N,) 1-norms of the rows.
    """
    d = rows.shape[1]
    signs = (targets - middle_of(rows)).sign()
    unit = torch.finfo(rows.dtype).eps / 2
    relative = 2 * (d + 8) * unit + product_rounding(rows.dtype)
    sizes = torch.linalg.vector_norm(targets, ord=1, dim=1) + limits.abs() + d * dead_zones
    smallest = (signs * targets).sum(1) - d * dead_zones - limits - relative * sizes
    reached = torch.addmm(relative * norms, signs, rows.T)
    excluded: Tensor = reached <= smallest[:, None]
    return ~excluded


def middle_of(rows: Tensor) -> Tensor:
    """(D,) median of a few rows: first tokens, far from all others in many models, do not move it.

    Rows are taken at steps of the golden ratio, which are in step with no length of sentences.
    """
    steps = torch.arange(_MIDDLE_OF, dtype=torch.float64) * 0.6180339887498949
    places = (steps.frac() * len(rows)).long()
    return rows[places.to(rows.device)].median(0).values.nan_to_num()


def product_rounding(dtype: torch.dtype) -> float:
    """What matrix products may round their inputs by, where float32 ones run in TF32 or bfloat16.

    A half unit in the last place of bfloat16's 8 bits, the coarser of the two, and as much again.
    """
    exact = dtype != torch.float32 or (
        torch.get_float32_matmul_precision() == "highest"
        and not torch.backends.cuda.matmul.allow_tf32
    )
    return 0.0 if exact else 2.0**-8


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
