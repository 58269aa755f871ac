"""Per-sample gradients of layers, as factors or as dense tensors, with their norms and sums.

The per-sample gradients of a layer follow from its inputs and output gradients, so one backward
pass is enough (book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at
Small Cost"). First the norms of all samples are computed from Gram matrices over positions (ghost
norms, Goodfellow 2015; Li et al. 2022). They determine the clip factors, and one weighted product
per layer then yields the clipped sum. No per-sample gradient needs to be in memory as a whole.

A *part* holds the gradients of all B samples for one use of a parameter, in one of four forms. A
parameter that is used several times (tied embeddings) has several parts. A sample's gradient is
their sum, and its norm includes the cross terms between uses.

B, the number of samples, is the first dimension of every tensor in a part. T is the number of
positions of a sample, summed over all uses of the parameter.
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

# The form in which per-sample gradients are stored, see `to_form`.
Clipping = Literal["auto", "per_sample", "ghost"]

# A squared ghost norm is a sum of positive and negative terms. If rounding made it too small, the
# clipped gradient would exceed the clip norm. So an upper bound is computed instead, from the sum S
# and the sum A of the terms' absolute values: S plus ROUNDING machine epsilons times A - S, and at
# least CANCELLATION times A.
CANCELLATION = 1e-5
# For inner products of up to INNER_SIZE numbers. For longer ones it is multiplied by the root of
# their length over INNER_SIZE, because rounding errors grow like that.
ROUNDING = 8
INNER_SIZE = 4096  # numbers
# The largest number of entries in the factors of the samples whose norms are computed at once. Not
# tuned; a larger value takes more memory.
CHUNK = 1 << 24


@dataclass(frozen=True)
class _Outer:
    """Per-sample gradients of a matrix (m, n), such as a linear layer's weight, as factors.

    The gradient of sample b is ``sum_t left[b, t] right[b, t]^T``.

    Attributes:
        left: (B, T, m) the left factors, for a linear layer the gradients of its outputs.
        right: (B, T, n) the right factors, for a linear layer its inputs.
    """

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _EmbeddingRows:
    """Per-sample gradients of an embedding or of experts' stacked biases, by rows.

    The gradient of sample b is zero, plus ``values[b, t]`` in row ``ids[b, t]`` for all t.

    Attributes:
        ids: (B, T) int64, the indices of the rows.
        values: (B, T, d) the gradients of the outputs; zero at padding.
    """

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _ExpertRows:
    """Per-sample gradients of the stacked matrices (E, m, n) of E experts, as factors.

    The gradient of sample b is zero, plus ``left[b, t] right[b, t]^T`` in matrix ``ids[b, t]`` for
    all t.

    Attributes:
        ids: (B, T) int64, the indices of the matrices.
        left: (B, T, m) the left factors.
        right: (B, T, n) the right factors.
    """

    ids: Tensor
    left: Tensor
    right: Tensor

    def by_matrix(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the index of each matrix and its factors, (B, c, m) and (B, c, n).

        c is the largest number of a sample's positions that use the matrix. The factors of other
        samples are padded by zeros.
        """
        samples = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        counts = self.ids.new_zeros(len(samples), int(self.ids.max()) + 1)
        counts.scatter_add_(1, self.ids, torch.ones_like(self.ids))
        order, starts = self.ids.argsort(1), counts.cumsum(1) - counts
        for matrix, max_count in enumerate(counts.amax(0).tolist()):
            slots = torch.arange(max_count, device=self.ids.device)
            ranks = (starts[:, matrix, None] + slots).clamp(max=self.ids.shape[1] - 1)
            positions, is_padding = order.gather(1, ranks), slots >= counts[:, matrix, None]
            factors = (_wide(v[samples, positions]) for v in (self.left, self.right))
            left, right = (v.masked_fill(is_padding[..., None], 0.0) for v in factors)
            yield matrix, left, right

    def as_one_sample(self, weights: Tensor) -> _ExpertRows:
        """Return the weighted sum of the gradients, as a part of one sample with B T positions.

        Args:
            weights: (B,) the weights of the samples.
        """
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


# The gradients of all B samples for one use of a parameter.
Part = _Outer | _EmbeddingRows | _ExpertRows | _Dense
# The parts of a parameter: a sample's gradient is their sum.
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
    """Return the gradients of a parameter in another form, with at most one part of each type.

    Factors together with a dense part are always multiplied, since their sum has no ghost norm.

    Args:
        parts: The parts of the parameter.
        shape: The shape of the parameter.
        clipping: ``"ghost"`` keeps factors and rows, and ``"per_sample"`` turns them into a dense
            part. ``"auto"`` multiplies factors if their product is smaller than they are, as for
            the thin matrices of LoRA. That also saves the product in :func:`weighted_sum`.
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
    """Return one part of each type; the positions of several uses of a parameter are joined."""
    merged: list[Part] = []
    for cls in (_Outer, _EmbeddingRows, _ExpertRows):
        uses = [part for part in parts if isinstance(part, cls)]
        if len(uses) > 1:  # a single part is not copied: a head's factor is as large as its logits
            fields = zip(*(vars(part).values() for part in uses), strict=True)
            uses = [cls(*(torch.cat([*map(_wide, tensors)], 1) for tensors in fields))]
        merged += uses
    dense = [part.values for part in parts if isinstance(part, _Dense)]
    total = [_Dense(functools.reduce(torch.add, dense))] if dense else []
    return [*merged, *total]


def to_dense(parts: Parts, shape: torch.Size) -> Tensor:
    """Return dense per-sample gradients (B, *shape), in float64 if a part is, else in float32."""
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


def slice_samples(parts: Parts, start: int, end: int) -> list[Part]:
    """Return the gradients of the samples from start to end - 1.

    They are views, because a copy would take a third of a training step.

    Args:
        parts: The gradients of all B samples.
        start: The first sample.
        end: The sample after the last one.
    """
    return [replace(part, **{k: v[start:end] for k, v in vars(part).items()}) for part in parts]


def sum_users(parts: Parts, weights: Tensor, rows: Sequence[int]) -> list[Part]:
    """Return the gradients of U users: weighted sums over each user's adjacent samples.

    The positions of a user's samples are joined, so that the norm of the user's gradient includes
    the cross terms between samples.

    Args:
        parts: The gradients of all B samples.
        weights: (B,) the weights of the samples.
        rows: (U,) the number of samples of each user, B in all.
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
            factors = weights.to(wide).view(-1, *[1] * (wide.dim() - 1))
            total = wide.new_zeros(len(rows), *wide.shape[1:])
            result.append(_Dense(total.index_add_(0, owner.to(wide.device), wide * factors)))
        else:
            fields = {key: _wide(value) for key, value in vars(part).items()}
            linear = "values" if isinstance(part, _EmbeddingRows) else "left"
            fields[linear] = fields[linear] * weights.to(fields[linear])[:, None, None]
            cls: Any = type(part)
            result.append(cls(*map(by_user, fields.values())))
    return result


def squared_norms(layers: Iterable[Parts]) -> list[Tensor]:
    """Return (B,) the squared 2-norms of the samples' gradients, for each parameter.

    Those from factors or rows are upper bounds, a little above the exact value.

    Args:
        layers: The parts of each parameter, from :func:`to_form`.
    """
    norms: list[Tensor] = []
    for parts in layers:
        if len(parts) == 1 and isinstance(parts[0], _Dense):
            norms.append(_wide(parts[0].values).flatten(1).square().sum(1))
            continue
        samples = len(next(iter(vars(parts[0]).values())))
        numbers = sum(value[0].numel() for part in parts for value in vars(part).values())
        chunk = max(1, CHUNK // max(1, numbers))
        chunks = (slice_samples(parts, b, b + chunk) for b in range(0, samples, chunk))
        norms.append(torch.cat([*map(_squared_norms, chunks)]))
    return norms


def squared_norms_of_users(
    layers: Mapping[Tensor, Parts], weights: Tensor, rows: Sequence[int], clipping: Clipping
) -> list[Tensor]:
    """Return (U,) the squared 2-norms of the users' gradients, for each parameter.

    Adjacent users are computed together while their numbers of samples differ by a factor of at
    most two. Padding therefore at most doubles the memory.

    Args:
        layers: The parts of all B samples by parameter, from :func:`to_form`.
        weights: (B,) the weights of the samples.
        rows: (U,) the number of samples of each user, B in all. Fewest groups result if users are
            sorted by it.
        clipping: The form of the users' gradients, see :func:`to_form`.
    """
    squares: list[list[Tensor]] = [[] for _ in layers]
    first, start = 0, 0
    while first < len(rows):
        end, max_rows, min_rows = first, rows[first], rows[first]
        while end < len(rows) and max(max_rows, rows[end]) <= 2 * min(min_rows, rows[end]):
            max_rows, min_rows = max(max_rows, rows[end]), min(min_rows, rows[end])
            end += 1
        counts = rows[first:end]
        next_start = start + sum(counts)
        for (parameter, parts), norms in zip(layers.items(), squares, strict=True):
            group = slice_samples(parts, start, next_start)
            users = sum_users(group, weights[start:next_start], counts)
            norms += squared_norms([to_form(users, parameter.shape, clipping)])
        first, start = end, next_start
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
        memory: A tensor of this shape that may be overwritten with the sum if there is no target.
            This saves time: to allocate a large matrix takes a sixth as long as the product.
    """
    total = target
    for part in parts:
        if isinstance(part, _Dense):
            wide = _wide(part.values)
            term = torch.tensordot(weights.to(wide), wide, dims=1)
        elif isinstance(part, _Outer):
            left, right = _wide(part.left), _wide(part.right)
            factors = weights.to(left)[:, None, None]
            if left.shape[2] < right.shape[2]:  # the smaller of the two is copied
                left = left * factors
            else:
                right = right * factors
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


def bilinear_forms(parts: Parts, left: Tensor, right: Tensor) -> Tensor:
    """Return (B, K) the bilinear forms ``left_k^T g_b right_k`` of the samples' gradients g_b.

    They serve to compare gradients without computing them: over normal random vectors, a form of
    the difference of two gradients has the difference's norm as its standard deviation.

    Args:
        parts: The gradients of all B samples.
        left: (m, K) random numbers. m is the parameter's first dimension.
        right: (n, K) random numbers. n is the product of its other dimensions (1 for a vector).
    """
    total = left.new_zeros(())
    for part in parts:
        if isinstance(part, _Dense):
            values = _wide(part.values)
            forms = ((values.reshape(len(values), len(left), -1) @ right) * left).sum(1)
        elif isinstance(part, _Outer):
            forms = ((_wide(part.left) @ left) * (_wide(part.right) @ right)).sum(1)
        elif isinstance(part, _ExpertRows):
            sizes = part.left.shape[2], part.right.shape[2], right.shape[1]
            forms = left.new_zeros(len(part.ids), sizes[2])
            for matrix, *factors in part.by_matrix():
                products = torch.einsum("bcm,bcn,mnk->bk", *factors, right.view(sizes))
                forms = forms + left[matrix] * products
        else:
            forms = (left[part.ids] * (_wide(part.values) @ right)).sum(1)
        total = total + forms
    return total


def probe(parts: Parts, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bilinear form of the samples' sum, for one pair of vectors, and its scale.

    Args:
        parts: The gradients of all samples.
        left: (m, 1) random numbers, see :func:`bilinear_forms`.
        right: (n, 1) random numbers.

    Returns:
        The form, and the sum of the squared norms of the terms that add up to the gradient, one
        for each position or, in a dense part, for each sample. Both are scalars, the latter in
        float64.
    """
    squares = left.new_zeros((), dtype=torch.float64)
    for part in parts:
        factors = [value for value in vars(part).values() if value.is_floating_point()]
        dense = isinstance(part, _Dense)
        norms = [_norms(value.flatten(1) if dense else value) for value in factors]
        squares = squares + functools.reduce(torch.mul, norms).square().sum()
    return bilinear_forms(parts, left, right).sum(), squares


def random_directions(index: int, parameter: Tensor, number: int = 1) -> tuple[Tensor, Tensor]:
    """Return (m, K) and (n, K), K = ``number`` pairs of vectors of standard normal numbers.

    m is the size of the parameter's first dimension, n that of the others. They depend only on the
    parameter's shape, dtype and device, on ``index``, its index in the list of parameters, and on
    ``number``.
    """
    device = where_whole(parameter)
    generator = torch.Generator(device).manual_seed(index)
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    left, right = (
        torch.randn(n, number, generator=generator, device=device, dtype=wide)
        for n in (parameter.shape[:1].numel(), parameter.shape[1:].numel())
    )
    return left, right


def rounds_products(context: DefenseContext) -> bool:
    """Return whether products of float32 numbers may be rounded to TF32.

    That is a setting for matrices, and on a GPU the default of cuDNN for convolutions.
    """
    try:
        rounded = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # a backend's setting contradicts the common one
        rounded = True
    on_gpu = context.device.type == "cuda"
    return rounded or (on_gpu and any(isinstance(m, _ConvNd) for m in context.root.modules()))


def _norms(values: Tensor) -> Tensor:
    """Return the norms along the last dimension, in float64."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms


def _squared_norms(parts: Parts) -> Tensor:
    """Return upper bounds of the squared norms of samples, from Gram matrices.

    Args:
        parts: The parts of one parameter, none of them dense, with at most one of each type.
    """
    sums: list[Tensor] = []  # (2, B) each, of some terms and of their absolute values

    def add(terms: Tensor) -> None:
        """Add terms (B, S, T), which are overwritten."""
        sums.append(torch.stack([terms.sum((1, 2)), terms.abs_().sum((1, 2))]))

    outer = next((part for part in parts if isinstance(part, _Outer)), None)
    if outer is not None:
        left, right = _wide(outer.left), _wide(outer.right)
        add((left @ left.mT).mul_(right @ right.mT))
    for part in parts:
        if isinstance(part, _Dense):
            raise AssertionError("a dense part and factors together have no ghost norm")
        if isinstance(part, _ExpertRows):
            for _, a, b in part.by_matrix():
                add((a @ a.mT).mul_(b @ b.mT))
        if not isinstance(part, _EmbeddingRows):
            continue
        ids, values = part.ids, _wide(part.values)
        equal_ids = ids[:, :, None] == ids[:, None, :]
        add((values @ values.mT).mul_(equal_ids))
        if outer is not None:  # twice the inner products of the two parts
            index = ids[:, None, :].expand(-1, left.shape[1], -1)
            add(left.gather(2, index).mul_(right @ values.mT).mul_(2))
    total, absolute = functools.reduce(torch.add, sums).unbind()
    size = max(v.shape[2] for part in parts for v in vars(part).values() if v.dim() == 3)
    share = ROUNDING * torch.finfo(total.dtype).eps * max(1.0, (size / INNER_SIZE) ** 0.5)
    total = total + share * (absolute - total)
    return torch.maximum(total, CANCELLATION * absolute)


def _wide(values: Tensor) -> Tensor:
    """Return floating-point numbers in float32, or float64 as they are; integers as they are."""
    narrow = values.is_floating_point() and values.dtype != torch.float64
    return values.float() if narrow else values


def zeros_of(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's unsharded shape, in the dtype of clipped sums."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=where_whole(parameter))
