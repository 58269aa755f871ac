"""A parameter's per-sample gradients, as factors or in full: norms and weighted sums of them.

Backward hands each layer its output gradients. With the layer's inputs they are all there is to
know about its per-sample gradients, so one backward pass is enough (book-keeping, Bu et al. 2023,
"Differentially Private Optimization on Large Model at Small Cost"): norms from Gram matrices over
positions (ghost norms, Goodfellow 2015; Li et al. 2022), then one weighted product per layer for
the clipped sum. A parameter that is used several times (tied embeddings) has one gradient per
sample, the sum of its uses; norms here include the cross terms.

All shapes have the samples first, B of them. T counts positions of a sample, of all uses together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Clipping = Literal["auto", "per_sample", "ghost"]

CANCELLATION = 1e-5
"""A squared norm is never taken for less than this share of the absolute terms it is the sum of.

Below, rounding could make it too small, and a norm that is too small breaks the clip.
"""

CHUNK = 1 << 24
"""Numbers of factors that norms are computed from at once."""


@dataclass(frozen=True)
class Outer:
    """Sample b's gradient of a matrix is ``sum_t left[b, t] right[b, t]^T``, (m, n).

    Attributes:
        left: (B, T, m).
        right: (B, T, n).
    """

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Rows:
    """Sample b's gradient of an embedding is ``values[b, t]`` added to row ``ids[b, t]``.

    Attributes:
        ids: (B, T) int64.
        values: (B, T, d); zero where the row gets no gradient (padding).
    """

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Dense:
    """Per-sample gradients in full.

    Attributes:
        values: (B, *shape of the parameter).
    """

    values: Tensor


Part = Outer | Rows | Dense


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same gradients in at most one part of each kind; uses become further positions."""
    result: list[Part] = []
    outer = [part for part in parts if isinstance(part, Outer)]
    if len(outer) > 1:
        left, right = ([_wide(getattr(p, side)) for p in outer] for side in ("left", "right"))
        result.append(Outer(torch.cat(left, 1), torch.cat(right, 1)))
    else:
        result += outer
    rows = [part for part in parts if isinstance(part, Rows)]
    if len(rows) > 1:
        values = torch.cat([_wide(part.values) for part in rows], 1)
        result.append(Rows(torch.cat([part.ids for part in rows], 1), values))
    else:
        result += rows
    dense = [part.values for part in parts if isinstance(part, Dense)]
    if dense:
        total = dense[0]
        for values in dense[1:]:
            total = total + values
        result.append(Dense(total))
    return result


def chosen(parts: Sequence[Part], shape: torch.Size, clipping: Clipping) -> list[Part]:
    """Merged parts in the form that ``clipping`` asks for.

    ``"ghost"`` keeps factors, ``"per_sample"`` multiplies them out, ``"auto"`` multiplies out where
    the result is smaller than its factors, as in LoRA's thin matrices, and then also saves the
    second product. What has a part in full already is multiplied out in any case: a sum of both
    has no other norm.
    """
    parts = merged(parts)
    if len(parts) == 1 and isinstance(parts[0], Dense):
        return parts
    full = any(isinstance(part, Dense) for part in parts) or clipping == "per_sample"
    if clipping == "auto" and all(isinstance(part, Outer) for part in parts):
        size = sum(p.left[0].numel() + p.right[0].numel() for p in parts if isinstance(p, Outer))
        full = full or shape.numel() <= size
    return [Dense(in_full(parts, shape))] if full else parts


def in_full(parts: Sequence[Part], shape: torch.Size) -> Tensor:
    """Per-sample gradients, (B, *shape), multiplied out; float32, or float64 if they are."""
    total: Tensor | None = None
    for part in parts:
        if isinstance(part, Dense):
            values = _wide(part.values)
        elif isinstance(part, Outer):
            values = _wide(part.left).transpose(1, 2) @ _wide(part.right)
        else:
            source = _wide(part.values)
            values = source.new_zeros(len(source), *shape)
            index = part.ids[..., None].expand_as(source)
            values.scatter_add_(1, index, source)
        total = values if total is None else total + values
    assert total is not None
    return total


def of_samples(parts: Sequence[Part], samples: Tensor) -> list[Part]:
    """The gradients of some samples alone, whatever the others' factors hold.

    Args:
        parts: of all B samples.
        samples: (B,) booleans.
    """
    return [
        replace(part, **{key: value[samples.to(value.device)] for key, value in vars(part).items()})
        for part in parts
    ]


def count_positions(part: Part) -> int:
    """B T, as far as it can still be seen: B of gradients in full."""
    if isinstance(part, Dense):
        return len(part.values)
    return (part.left if isinstance(part, Outer) else part.ids).shape[:2].numel()


def squared_norms(parts: Sequence[Part]) -> Tensor:
    """Squared 2-norm of every sample's gradient, (B,).

    Args:
        parts: from :func:`chosen`.
    """
    if len(parts) == 1 and isinstance(parts[0], Dense):
        return _wide(parts[0].values).flatten(1).square().sum(1)
    samples = _samples(parts)
    numbers = sum(value[0].numel() for part in parts for value in vars(part).values())
    many = max(1, CHUNK // max(1, numbers))
    pieces = [_squared(parts, slice(b, b + many)) for b in range(0, samples, many)]
    return torch.cat(pieces)


def weighted_sum(parts: Sequence[Part], weights: Tensor, shape: torch.Size) -> Tensor:
    """``sum_b weights[b] gradient_b``, of the parameter's shape.

    Args:
        parts: of all B samples.
        weights: (B,).
        shape: of the parameter.
    """
    total: Tensor | None = None
    for part in parts:
        if isinstance(part, Dense):
            wide = _wide(part.values)
            term = torch.tensordot(weights.to(wide.dtype), wide, dims=1)
        elif isinstance(part, Outer):
            left, right = _wide(part.left), _wide(part.right)
            column = weights.to(left.dtype)[:, None, None]
            if left.shape[2] < right.shape[2]:
                left = left * column
            else:
                right = right * column
            term = left.flatten(0, 1).T @ right.flatten(0, 1)
        else:
            source = _wide(part.values) * weights.to(_wide(part.values).dtype)[:, None, None]
            target = source.new_zeros(shape) if total is None else total
            target.index_add_(0, part.ids.flatten(), source.flatten(0, 1))
            total = target
            continue
        total = term if total is None else total.add_(term)
    assert total is not None
    return total.view(shape)


def probe(parts: Sequence[Part], left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``left^T (sum_b gradient_b) right`` of a matrix, or ``left . sum_b gradient_b`` otherwise.

    Costs no product of the layer's size. A gradient that autograd has computed and that these
    parts do not explain differs in it, but for a chance of measure zero over random vectors.

    Args:
        parts: of all samples.
        left: (m,) random numbers, m the parameter's first dimension.
        right: (n,) of the flattened other dimensions.

    Returns:
        The bilinear form, and the sum of its terms' absolute values, both scalars.
    """
    value = scale = left.new_zeros(())
    for part in parts:
        if isinstance(part, Dense):
            terms = (
                _wide(part.values).flatten(2) if part.values.dim() > 2 else part.values[..., None]
            )
            numbers = (_wide(terms) @ right[: terms.shape[2]]) @ left
        elif isinstance(part, Outer):
            numbers = (_wide(part.left) @ left) * (_wide(part.right) @ right)
        else:
            numbers = left[part.ids] * (_wide(part.values) @ right)
        value, scale = value + numbers.sum(), scale + numbers.abs().sum()
    return value, scale


def _squared(parts: Sequence[Part], rows: slice) -> Tensor:
    """Of some samples, so that float32 copies and Gram matrices stay small."""
    total: Tensor | None = None
    absolute: Tensor | None = None
    outer = next((part for part in parts if isinstance(part, Outer)), None)
    if outer is not None:
        left, right = _wide(outer.left[rows]), _wide(outer.right[rows])
        total, absolute = _add(None, None, (left @ left.mT).mul_(right @ right.mT))
    for part in parts:
        if isinstance(part, Dense):
            raise AssertionError("parts in full and factors together have no ghost norm")
        if not isinstance(part, Rows):
            continue
        ids, values = part.ids[rows], _wide(part.values[rows])
        same = ids[:, :, None] == ids[:, None, :]
        total, absolute = _add(total, absolute, (values @ values.mT).mul_(same))
        if outer is not None:
            index = ids[:, None, :].expand(-1, left.shape[1], -1)
            crossed = left.gather(2, index).mul_(right @ values.mT)
            total, absolute = _add(total, absolute, crossed.mul_(2))
    assert total is not None
    assert absolute is not None
    return torch.maximum(total, CANCELLATION * absolute)


def _add(total: Tensor | None, absolute: Tensor | None, terms: Tensor) -> tuple[Tensor, Tensor]:
    value, size = terms.sum((1, 2)), terms.abs_().sum((1, 2))
    return value if total is None else total + value, size if absolute is None else absolute + size


def _samples(parts: Sequence[Part]) -> int:
    part = parts[0]
    return len(part.left if isinstance(part, Outer) else part.values)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


__all__ = [
    "Clipping",
    "Dense",
    "Outer",
    "Part",
    "Rows",
    "chosen",
    "count_positions",
    "in_full",
    "merged",
    "of_samples",
    "probe",
    "squared_norms",
    "weighted_sum",
]
