"""Per-sample gradients of layers, as factors or as dense tensors, with their norms and sums.

The per-sample gradients of a layer follow from its inputs and output gradients, so one backward
pass is enough (book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at
Small Cost"): norms from Gram matrices over positions (ghost norms, Goodfellow 2015; Li et al.
2022), then one weighted product per layer for the clipped sum. A parameter that is used several
times (tied embeddings) has one gradient per sample, the sum over its uses; norms here include the
cross terms.

The first dimension of every shape is the sample, of B. T is the number of positions of a sample,
summed over all uses of the parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.model.anatomy import where_whole

Clipping = Literal["auto", "per_sample", "ghost"]

# A squared ghost norm is a sum of positive and negative terms. If rounding made it too small, the
# sample would exceed the clip norm. It is therefore an upper bound: raised by ROUNDING machine
# epsilons of the sum of the absolute terms, and to at least the share CANCELLATION of that sum.
CANCELLATION = 1e-5
ROUNDING = 8  # for inner products of up to INNER_SIZE numbers; it grows with the root of more
INNER_SIZE = 4096  # numbers
CHUNK = 1 << 24  # numbers in the factors of one chunk of norms, to bound the memory. Not tuned


@dataclass(frozen=True)
class _Outer:
    """Factors of the gradients of a matrix (m, n).

    The gradient of sample b is ``sum_t left[b, t] right[b, t]^T``.

    Attributes:
        left: (B, T, m) the left factors.
        right: (B, T, n) the right factors.
    """

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _EmbeddingRows:
    """Rows of the gradients of an embedding.

    The gradient of sample b is zero, plus ``values[b, t]`` in its row ``ids[b, t]``, for all t.

    Attributes:
        ids: (B, T) int64, the indices of the rows.
        values: (B, T, d) the gradients of the outputs; zero at padding.
    """

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _ExpertRows:
    """Factors of the gradients of stacked matrices (E, m, n).

    The gradient of sample b is zero, plus ``left[b, t] right[b, t]^T`` in its matrix ``ids[b, t]``,
    for all t.

    Attributes:
        ids: (B, T) int64, the numbers of the matrices.
        left: (B, T, m) the left factors.
        right: (B, T, n) the right factors.
    """

    ids: Tensor
    left: Tensor
    right: Tensor

    def by_matrix(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each matrix's number and its factors (B, c, m) and (B, c, n), padded by zeros."""
        samples = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        counts = self.ids.new_zeros(len(samples), int(self.ids.max()) + 1)
        counts.scatter_add_(1, self.ids, torch.ones_like(self.ids))
        order, starts = self.ids.argsort(1), counts.cumsum(1) - counts
        for matrix, most in enumerate(counts.amax(0).tolist()):
            slots = torch.arange(most, device=self.ids.device)
            places = (starts[:, matrix, None] + slots).clamp(max=self.ids.shape[1] - 1)
            rows, absent = order.gather(1, places), slots >= counts[:, matrix, None]
            sides = (_wide(v[samples, rows]) for v in (self.left, self.right))
            left, right = (side.masked_fill(absent[..., None], 0.0) for side in sides)
            yield matrix, left, right

    def as_one_sample(self, weights: Tensor) -> _ExpertRows:
        """Return the sum of the samples' gradients, each times its weight."""
        left = _wide(self.left)
        left = left * weights.to(left)[:, None, None]
        return _ExpertRows(*(v.flatten(0, 1)[None] for v in (self.ids, left, self.right)))


@dataclass(frozen=True)
class _Dense:
    """Per-sample gradients as one tensor.

    Attributes:
        values: (B, ...) the gradients, each of the parameter's shape.
    """

    values: Tensor


Part = _Outer | _EmbeddingRows | _ExpertRows | _Dense
Parts = Sequence[Part]


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 matrices in float32 within this context, not in TF32.

    In TF32 (``set_float32_matmul_precision("high")``) the norm and the sum would be rounded to 11
    bits in different ways. A sample whose positions cancel could then exceed the clip norm by a
    large factor.
    """
    # Since torch 2.9 each backend also has its own setting, which the common setting overwrites.
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", 0)]
    precisions = [(b, b.fp32_precision) for b in backends if hasattr(b, "fp32_precision")]
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:  # a backend's setting contradicts the common one
        common = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(common)
        for backend, precision in precisions:
            backend.fp32_precision = precision


def to_form(parts: Parts, shape: torch.Size, clipping: Clipping) -> Parts:
    """Return a parameter's gradients in the form of ``clipping``, with one part of each type.

    ``"ghost"`` keeps the factors, and ``"per_sample"`` multiplies them. ``"auto"`` multiplies them
    if the result is smaller than the factors, as for the thin matrices of LoRA, which also saves
    the product in :func:`weighted_sum`. Factors together with a dense part are always multiplied,
    since their sum has no ghost norm.
    """
    parts = _merge(parts) if len(parts) > 1 else parts
    if len(parts) == 1 and isinstance(parts[0], _Dense):
        return parts
    is_dense = any(isinstance(part, _Dense) for part in parts) or clipping == "per_sample"
    factors = [part for part in parts if isinstance(part, _Outer | _ExpertRows)]
    if clipping == "auto" and len(factors) == len(parts):
        size = sum(part.left[0].numel() + part.right[0].numel() for part in factors)
        is_dense = is_dense or shape.numel() <= size
    return [_Dense(to_dense(parts, shape))] if is_dense else parts


def _merge(parts: Parts) -> list[Part]:
    """Return one part of each type; several uses of a parameter become further positions."""
    merged: list[Part] = []
    for kind in (_Outer, _EmbeddingRows, _ExpertRows):
        uses = [part for part in parts if isinstance(part, kind)]
        if len(uses) > 1:  # a single one is not copied: left of a head is as large as the logits
            columns = zip(*(vars(part).values() for part in uses), strict=True)
            uses = [kind(*(torch.cat([*map(_wide, column)], 1) for column in columns))]
        merged += uses
    dense = [part.values for part in parts if isinstance(part, _Dense)]
    total = [_Dense(functools.reduce(torch.add, dense))] if dense else []
    return [*merged, *total]


def to_dense(parts: Parts, shape: torch.Size) -> Tensor:
    """Return dense per-sample gradients (B, *shape), of float64 if a part is, else of float32."""
    total: Tensor | None = None
    for part in parts:
        if isinstance(part, _Dense):
            values = _wide(part.values)
        elif isinstance(part, _Outer):
            left, right = _wide(part.left), _wide(part.right)
            if left.shape[2] > right.shape[2]:  # a tall product is several times slower on a CPU
                values = (right.transpose(1, 2) @ left).transpose(1, 2).contiguous()
            else:
                values = left.transpose(1, 2) @ right
        elif isinstance(part, _ExpertRows):
            values = _wide(part.left[:0]).new_zeros(len(part.ids), *shape)
            for matrix, left, right in part.by_matrix():
                values[:, matrix] = left.mT @ right
        else:
            source = _wide(part.values)
            values = source.new_zeros(len(source), *shape)
            index = part.ids[..., None].expand_as(source)
            values.scatter_add_(1, index, source)
        total = values if total is None else total + values
    assert total is not None
    return total


def between(parts: Parts, start: int, end: int) -> list[Part]:
    """Return the gradients of adjacent samples, as views: a copy would take a third of a step.

    Args:
        parts: The gradients of all B samples.
        start: The first sample.
        end: The sample behind the last one.
    """
    return [replace(part, **{k: v[start:end] for k, v in vars(part).items()}) for part in parts]


def sum_users(parts: Parts, weights: Tensor, rows: Sequence[int]) -> list[Part]:
    """Return the gradients of users: weighted sums over each user's adjacent samples.

    The samples of a user become further positions of one gradient, so that its norm includes the
    cross terms between them.

    Args:
        parts: The gradients of all B samples.
        weights: (B,) the weights of the samples.
        rows: The numbers of samples of the U users, whose sum is B.
    """
    counts = torch.tensor(rows, dtype=torch.int64)
    owner = torch.arange(len(rows)).repeat_interleave(counts)
    slot = torch.arange(len(owner)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    max_rows = max(rows, default=1)

    def by_user(values: Tensor) -> Tensor:
        """Return values (B, T, ...) as (U, max_rows T, ...), padded by zeros."""
        grouped = values.new_zeros(len(rows), max_rows, *values.shape[1:])
        grouped[owner.to(values.device), slot.to(values.device)] = values
        return grouped.flatten(1, 2)

    result: list[Part] = []
    for part in parts:
        if isinstance(part, _Dense):
            wide = _wide(part.values)
            column = weights.to(wide).view(-1, *[1] * (wide.dim() - 1))
            total = wide.new_zeros(len(rows), *wide.shape[1:])
            result.append(_Dense(total.index_add_(0, owner.to(wide.device), wide * column)))
        elif isinstance(part, _Outer):
            left = _wide(part.left) * weights.to(_wide(part.left))[:, None, None]
            result.append(_Outer(by_user(left), by_user(_wide(part.right))))
        elif isinstance(part, _ExpertRows):
            left = _wide(part.left) * weights.to(_wide(part.left))[:, None, None]
            result.append(_ExpertRows(by_user(part.ids), by_user(left), by_user(_wide(part.right))))
        else:
            values = _wide(part.values) * weights.to(_wide(part.values))[:, None, None]
            result.append(_EmbeddingRows(by_user(part.ids), by_user(values)))
    return result


def squared_norms(layers: Iterable[Parts]) -> list[Tensor]:
    """Return the squared 2-norms (B,) of the samples' gradients, for each parameter.

    Args:
        layers: The gradients of each parameter, from :func:`to_form`.
    """
    norms: list[Tensor] = []
    for parts in layers:
        if len(parts) == 1 and isinstance(parts[0], _Dense):
            norms.append(_wide(parts[0].values).flatten(1).square().sum(1))
            continue
        samples = len(next(iter(vars(parts[0]).values())))
        numbers = sum(value[0].numel() for part in parts for value in vars(part).values())
        chunk = max(1, CHUNK // max(1, numbers))
        chunks = [_squared_norms(parts, slice(b, b + chunk)) for b in range(0, samples, chunk)]
        norms.append(torch.cat(chunks))
    return norms


def squared_norms_of_users(
    layers: Mapping[Tensor, Parts], weights: Tensor, rows: Sequence[int], clipping: Clipping
) -> list[Tensor]:
    """Return the squared 2-norms (U,) of the users' gradients, for each parameter.

    Adjacent users are computed together while their numbers of samples differ by a factor of two at
    most. Padding therefore doubles the memory at most.

    Args:
        layers: The gradients of all B samples by parameter, from :func:`to_form`.
        weights: (B,) the weights of the samples.
        rows: The numbers of samples of the users, whose sum is B. In descending order, users with
            similar numbers of samples are computed together.
        clipping: The form, as in :func:`to_form`.
    """
    squares: list[list[Tensor]] = [[] for _ in layers]
    first, start = 0, 0
    while first < len(rows):
        end, max_rows, min_rows = first, rows[first], rows[first]
        while end < len(rows) and max(max_rows, rows[end]) <= 2 * min(min_rows, rows[end]):
            max_rows, min_rows = max(max_rows, rows[end]), min(min_rows, rows[end])
            end += 1
        counts = rows[first:end]
        samples = slice(start, start + sum(counts))
        for (parameter, parts), norms in zip(layers.items(), squares, strict=True):
            group = [replace(p, **{k: v[samples] for k, v in vars(p).items()}) for p in parts]
            users = sum_users(group, weights[samples], counts)
            norms += squared_norms([to_form(users, parameter.shape, clipping)])
        first, start = end, samples.stop
    return [torch.cat(norms) for norms in squares]


def weighted_sum(
    parts: Parts,
    weights: Tensor,
    shape: torch.Size,
    target: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Return ``sum_b weights[b] gradient_b``, of the parameter's shape.

    Args:
        parts: The gradients of all B samples.
        weights: (B,) the weights of the samples.
        shape: The shape of the parameter.
        target: A tensor of this shape and of the gradients' dtype, to which the sum is added in
            place; None for zeros.
        memory: A tensor of this shape that may be overwritten with the sum, where there is no
            target: new memory of a large matrix takes a sixth as long as its product.
    """
    total = target
    for part in parts:
        if isinstance(part, _Dense):
            wide = _wide(part.values)
            term = torch.tensordot(weights.to(wide), wide, dims=1)
        elif isinstance(part, _Outer):
            left, right = _wide(part.left), _wide(part.right)
            column = weights.to(left)[:, None, None]
            if left.shape[2] < right.shape[2]:
                left = left * column
            else:
                right = right * column
            left, right = left.flatten(0, 1), right.flatten(0, 1)
            if total is not None:
                total.addmm_(left.T, right)
                continue
            usable = memory is not None and (memory.dim(), memory.dtype) == (2, left.dtype)
            term = torch.mm(left.T, right, out=memory if usable else None)
        elif isinstance(part, _ExpertRows):
            total = _wide(part.left[:0]).new_zeros(shape) if total is None else total
            for matrix, left, right in part.as_one_sample(weights).by_matrix():
                total[matrix].addmm_(left[0].T, right[0])
            continue
        else:
            source = _wide(part.values)
            source = source * weights.to(source)[:, None, None]
            total = source.new_zeros(shape) if total is None else total
            total.index_add_(0, part.ids.flatten(), source.flatten(0, 1))
            continue
        total = term if total is None else total.add_(term)
    assert total is not None
    return total.view(shape)


def probe(parts: Parts, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bilinear form ``left^T G right`` of the gradient ``G = sum_b gradient_b``.

    It compares G with autograd's gradient without computing G: for random vectors the bilinear
    forms of two different gradients differ with probability 1.

    Args:
        parts: The gradients of all samples.
        left: (m,) random numbers, where m is the parameter's first dimension.
        right: (n,) random numbers, where n is the product of its other dimensions (1 for a vector).

    Returns:
        The bilinear form, and the sum of the squared norms of its terms (one for each position, or
        for each sample of a dense part). Both are scalars, the latter in float64. Over random
        vectors the standard deviation of the form is the norm of G.
    """
    value, squares = left.new_zeros(()), left.new_zeros((), dtype=torch.float64)
    for part in parts:
        if isinstance(part, _Dense):
            terms = _wide(part.values).flatten(1)
            forms = (terms.view(len(terms), len(left), -1) @ right) @ left
            norms = _norms(terms)
        elif isinstance(part, _Outer):
            forms = (_wide(part.left) @ left) * (_wide(part.right) @ right)
            norms = _norms(part.left) * _norms(part.right)
        elif isinstance(part, _ExpertRows):
            forms = left.new_zeros(())
            direction = right.view(part.left.shape[2], part.right.shape[2])
            for matrix, one, other in part.as_one_sample(left.new_ones(len(part.ids))).by_matrix():
                forms = forms + left[matrix] * ((one @ direction) * other).sum()
            norms = _norms(part.left) * _norms(part.right)
        else:
            forms = left[part.ids] * (_wide(part.values) @ right)
            norms = _norms(part.values)
        value, squares = value + forms.sum(), squares + norms.square().sum()
    return value, squares


def random_direction(index: int, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random vectors, of a parameter's first dimension and of its other dimensions.

    They depend only on ``index`` and the shape.
    """
    device = where_whole(parameter)
    generator = torch.Generator(device).manual_seed(index)
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    left, right = (
        torch.randn(n, generator=generator, device=device, dtype=wide)
        for n in (parameter.shape[0], parameter.shape[1:].numel())
    )
    return left, right


def rounds_products(context: DefenseContext) -> bool:
    """Return whether products of float32 may be rounded to TF32, which is cuDNN's default."""
    try:
        rounded = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # a backend's setting contradicts the common one
        rounded = True
    on_gpu = context.device.type == "cuda"
    return rounded or (on_gpu and any(isinstance(m, _ConvNd) for m in context.root.modules()))


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms


def _squared_norms(parts: Parts, rows: slice) -> Tensor:
    """Return upper bounds of the squared norms of some samples, from Gram matrices."""
    total: Tensor | None = None
    absolute: Tensor | None = None
    outer = next((part for part in parts if isinstance(part, _Outer)), None)
    if outer is not None:
        left, right = _wide(outer.left[rows]), _wide(outer.right[rows])
        total, absolute = _add(None, None, (left @ left.mT).mul_(right @ right.mT))
    for part in parts:
        if isinstance(part, _Dense):
            raise AssertionError("a dense part and factors together have no ghost norm")
        if isinstance(part, _ExpertRows):
            chunk = _ExpertRows(part.ids[rows], part.left[rows], part.right[rows])
            for _, one, other in chunk.by_matrix():
                products = (one @ one.mT).mul_(other @ other.mT)
                total, absolute = _add(total, absolute, products)
        if not isinstance(part, _EmbeddingRows):
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
    size = max(v.shape[2] for part in parts for v in vars(part).values() if v.dim() == 3)
    share = ROUNDING * torch.finfo(total.dtype).eps * max(1.0, (size / INNER_SIZE) ** 0.5)
    total = total + share * (absolute - total)
    return torch.maximum(total, CANCELLATION * absolute)


def _add(total: Tensor | None, absolute: Tensor | None, terms: Tensor) -> tuple[Tensor, Tensor]:
    value, size = terms.sum((1, 2)), terms.abs_().sum((1, 2))
    return value if total is None else total + value, size if absolute is None else absolute + size


def _wide(values: Tensor) -> Tensor:
    narrow = values.is_floating_point() and values.dtype != torch.float64
    return values.float() if narrow else values


def zeros_of(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's unsharded shape, in the dtype of clipped sums."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=where_whole(parameter))
