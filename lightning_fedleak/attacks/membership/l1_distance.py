"""L1 distances of hidden states: pairs of rows and targets that lie near.

For any signs s, ``‖x - T‖_1 >= s·T - s·x``, with equality where s is the sign of T - x. With s the
sign of T less the rows' median, one product of all rows with all signs excludes nearly every pair
that is far apart. At a limit of half of ``‖T‖_1``, 1 to 2% of the pairs of hidden states of
MiniLM-L6 and SmolLM2-135M remain. With the 2-norm, which never exceeds the 1-norm either and costs
the same product, 99 to 100% remain: for a vector of many equal coordinates it is smaller by about
the root of their number. The bound is linear, so its rounding error is a small part of the 1-norms;
it is subtracted, and no pair within the limit is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEDIAN_ROWS = 64  # of which the median is taken; not tuned; more: slower, the result is the same
BLOCK_NUMBERS = {"cpu": 1 << 18}  # of a sum at once (1 MiB in float32), to stay in cache
BLOCK_NUMBERS_ELSEWHERE = 1 << 26  # the same on other devices (256 MiB), to fit in memory


def neighbours(
    rows: Tensor, targets: Tensor, limits: Tensor, dead_zones: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all pairs with ``sum_i relu(|x_i - T_i| - dead_zone) < limit``.

    Args:
        rows: (N, D).
        targets: (G, D), of the same floating dtype, float32 or float64.
        limits: (G,).
        dead_zones: (G,), 0 for the plain L1 distance.

    Returns:
        (row, target, distance) of the P pairs, sorted by target, then row. A row that is not finite
        is paired with every target, at distance NaN.
    """
    norms = torch.linalg.vector_norm(rows, ord=1, dim=1)
    candidates = maybe_near(rows, targets, limits, dead_zones, norms)
    candidates[2 * candidates.sum(1) > len(rows)] = True
    counts, places = candidates.sum(1).tolist(), candidates.nonzero()[:, 1]
    not_finite = ~norms.isfinite()
    any_not_finite = bool(not_finite.any())
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    zones = dead_zones.tolist()
    for k, index in enumerate(torch.split(places, counts)):
        if len(index) == 0:
            continue
        distance = _l1_norms(rows, targets[k], zones[k], index)
        if any_not_finite:
            distance[not_finite[index]] = torch.nan
        near_pairs = ~(distance >= limits[k])
        index = index[near_pairs]
        pairs.append((index, torch.full_like(index, k), distance[near_pairs]))
    if not pairs:
        empty = torch.zeros(0, dtype=torch.long, device=rows.device)
        return empty, empty, rows.new_zeros(0)
    indices, target_indices, distances = zip(*pairs, strict=True)
    return torch.cat(indices), torch.cat(target_indices), torch.cat(distances)


def _l1_norms(rows: Tensor, target: Tensor, dead_zone: float, index: Tensor) -> Tensor:
    """Return 1-norms of some rows less a target, beyond the dead zone, computed block by block."""
    n, d = len(index), rows.shape[1]
    every = n == len(rows)
    step = max(1, BLOCK_NUMBERS.get(rows.device.type, BLOCK_NUMBERS_ELSEWHERE) // max(1, d))
    buffer = rows.new_empty((min(n, step), d))
    sums = []
    for a in range(0, n, step):
        chunk = rows[a : a + step] if every else rows[index[a : a + step]]
        part = buffer[: len(chunk)]
        torch.sub(chunk, target, out=part).abs_()
        if dead_zone > 0:
            part.sub_(dead_zone).clamp_min_(0)
        sums.append(part.sum(1))
    return torch.cat(sums) if sums else rows.new_zeros(0)


def maybe_near(
    rows: Tensor, targets: Tensor, limits: Tensor, dead_zones: Tensor, norms: Tensor
) -> Tensor:
    """Return (G, N) bool: False only where the distance cannot be below the limit.

    Args:
        rows: (N, D).
        targets: (G, D).
        limits: (G,).
        dead_zones: (G,).
        norms: (N,) 1-norms of the rows.
    """
    d = rows.shape[1]
    signs = (targets - row_median(rows)).sign()
    unit = torch.finfo(rows.dtype).eps / 2
    relative = 2 * (d + 8) * unit + product_rounding(rows.dtype)
    sizes = torch.linalg.vector_norm(targets, ord=1, dim=1) + limits.abs() + d * dead_zones
    smallest = (signs * targets).sum(1) - d * dead_zones - limits - relative * sizes
    bounds = torch.addmm(relative * norms, signs, rows.T)
    excluded: Tensor = bounds <= smallest[:, None]
    return ~excluded


def row_median(rows: Tensor) -> Tensor:
    """Return (D,) the median of a few rows, on which the outlying first tokens have no effect.

    Rows are taken at steps of the golden ratio, which match no length of sentences.
    """
    steps = torch.arange(MEDIAN_ROWS, dtype=torch.float64) * 0.6180339887498949
    places = (steps.frac() * len(rows)).long()
    return rows[places.to(rows.device)].median(0).values.nan_to_num()


def product_rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding of products' inputs, where float32 runs in TF32 or bfloat16.

    It is twice half a unit in the last place of bfloat16's 8 bits, the coarser of the two.
    """
    exact = dtype != torch.float32 or (
        torch.get_float32_matmul_precision() == "highest"
        and not torch.backends.cuda.matmul.allow_tf32
    )
    return 0.0 if exact else 2.0**-8
