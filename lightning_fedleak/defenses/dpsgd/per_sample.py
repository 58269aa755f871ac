"""Per-sample gradients of layers, as factors or in full, with their norms and sums.

The per-sample gradients of a layer follow from its inputs and output gradients, so one backward
pass is enough (book-keeping, Bu et al. 2023, "Differentially Private Optimization on Large Model at
Small Cost"): norms from Gram matrices over positions (ghost norms, Goodfellow 2015; Li et al.
2022), then one weighted product per layer for the clipped sum. A parameter that is used several
times (tied embeddings) has one gradient per sample, the sum over its uses; norms here include the
cross terms.

All shapes have the samples first, B of them. T counts positions of a sample, of all uses together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.conv import _ConvNd

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.model.anatomy import where_whole

Clipping = Literal["auto", "per_sample", "ghost"]

# A squared norm that rounding makes too small would break the clip, so both are upper bounds.
CANCELLATION = 1e-5  # share of a sum's absolute terms that a squared norm is at least
ROUNDING = 8  # machine epsilons of these terms that are added, for products of up to SUMMED numbers
SUMMED = 4096  # numbers in a product; for more ROUNDING grows with the root of their number
CHUNK = 1 << 24  # numbers of factors that norms are computed from at once; bounds memory. Not tuned

CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_MENDS = {
    nn.MultiheadAttention: "Build it of Linear layers around scaled_dot_product_attention.",
    nn.RNNBase: "Use opacus.layers.DP{0}, which takes its state_dict, or freeze it.",
    nn.EmbeddingBag: "Use nn.Embedding.",
}
"""What to build in place of a layer, by its class."""


@dataclass(frozen=True)
class _Outer:
    """Factors of a matrix's gradients: sample b's is ``sum_t left[b, t] right[b, t]^T``, (m, n).

    Attributes:
        left: (B, T, m).
        right: (B, T, n).
    """

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _EmbeddingRows:
    """Rows of an embedding's gradients: sample b's has ``values[b, t]`` added to ``ids[b, t]``.

    Attributes:
        ids: (B, T) int64.
        values: (B, T, d); zero where the row gets no gradient (padding).
    """

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Dense:
    """Per-sample gradients in full.

    Attributes:
        values: (B, *shape of the parameter).
    """

    values: Tensor


Part = _Outer | _EmbeddingRows | _Dense
Parts = Sequence[Part]

Rule = Callable[[Any, Tensor, Tensor, int], dict[str, Part]]
"""Returns the part of each parameter by name. Its arguments: the module, its input (whose first
dimension counts samples, or samples times positions), the gradient of its output, and B."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 matrices in float32 within this context, not in TF32.

    In TF32 (``set_float32_matmul_precision("high")``) norm and sum would each be rounded to 11 bits
    differently, and a sample whose positions cancel could exceed the clip by a large part of it.
    """
    # Since torch 2.9 each backend also has a setting of its own, which the common one overwrites.
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


def in_form(parts: Parts, shape: torch.Size, clipping: Clipping) -> Parts:
    """Return a parameter's gradients in at most one part of each kind, in the form of ``clipping``.

    ``"ghost"`` keeps factors, ``"per_sample"`` multiplies them out, ``"auto"`` multiplies out where
    the result is smaller than its factors, as in LoRA's thin matrices, which also saves the second
    product. Factors beside a part in full are always multiplied out: their sum has no ghost norm.
    """
    parts = _merged(parts) if len(parts) > 1 else parts
    if len(parts) == 1 and isinstance(parts[0], _Dense):
        return parts
    full = any(isinstance(part, _Dense) for part in parts) or clipping == "per_sample"
    if clipping == "auto" and all(isinstance(part, _Outer) for part in parts):
        size = sum(p.left[0].numel() + p.right[0].numel() for p in parts if isinstance(p, _Outer))
        full = full or shape.numel() <= size
    return [_Dense(in_full(parts, shape))] if full else parts


def _merged(parts: Parts) -> list[Part]:
    """Return at most one part of each kind; uses of a parameter become further positions."""
    outer = [part for part in parts if isinstance(part, _Outer)]
    if len(outer) > 1:
        left, right = ([_wide(getattr(p, side)) for p in outer] for side in ("left", "right"))
        outer = [_Outer(torch.cat(left, 1), torch.cat(right, 1))]
    rows = [part for part in parts if isinstance(part, _EmbeddingRows)]
    if len(rows) > 1:
        values = torch.cat([_wide(part.values) for part in rows], 1)
        rows = [_EmbeddingRows(torch.cat([part.ids for part in rows], 1), values)]
    dense = [part.values for part in parts if isinstance(part, _Dense)]
    full = [_Dense(functools.reduce(torch.add, dense))] if dense else []
    return [*outer, *rows, *full]


def in_full(parts: Parts, shape: torch.Size) -> Tensor:
    """Return per-sample gradients, (B, *shape), multiplied out; float32, or float64 if they are."""
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
        else:
            source = _wide(part.values)
            values = source.new_zeros(len(source), *shape)
            index = part.ids[..., None].expand_as(source)
            values.scatter_add_(1, index, source)
        total = values if total is None else total + values
    assert total is not None
    return total


def select_samples(parts: Parts, samples: Tensor) -> list[Part]:
    """Return the gradients of some samples, whatever the factors of the others hold.

    Args:
        parts: of all B samples.
        samples: (B,) booleans.
    """
    return [
        replace(part, **{key: value[samples.to(value.device)] for key, value in vars(part).items()})
        for part in parts
    ]


def sum_users(parts: Parts, weights: Tensor, rows: Sequence[int]) -> list[Part]:
    """Return gradients of users: weighted sums over each user's adjacent samples.

    A user's samples become further positions of one gradient, so that its norm has the cross terms
    between them.

    Args:
        parts: of all B samples.
        weights: (B,).
        rows: samples of each of the U users; together B.
    """
    counts = torch.tensor(rows, dtype=torch.int64)
    owner = torch.arange(len(rows)).repeat_interleave(counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    max_rows = max(rows, default=1)

    def by_user(values: Tensor) -> Tensor:
        """Return (U, max_rows T, ...) of (B, T, ...), zero where a user has fewer samples."""
        grouped = values.new_zeros(len(rows), max_rows, *values.shape[1:])
        grouped[owner.to(values.device), place.to(values.device)] = values
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
        else:
            values = _wide(part.values) * weights.to(_wide(part.values))[:, None, None]
            result.append(_EmbeddingRows(by_user(part.ids), by_user(values)))
    return result


def squared_norms(layers: Iterable[Parts]) -> list[Tensor]:
    """Return the squared 2-norm of every sample's gradient, (B,), for each parameter.

    Args:
        layers: parts of each parameter from :func:`in_form`.
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
    """Return the squared 2-norm of every user's gradient, (U,), for each parameter.

    The memory is at most that of twice the samples.

    Args:
        layers: from :func:`in_form`, of all B samples.
        weights: (B,).
        rows: samples of each user; together B. In falling order, users with similar numbers of
            samples are computed at once.
        clipping: as in :func:`in_form`.
    """
    squares: list[list[Tensor]] = [[] for _ in layers]
    first, start = 0, 0
    while first < len(rows):
        last, longest, shortest = first, rows[first], rows[first]
        while last < len(rows) and max(longest, rows[last]) <= 2 * min(shortest, rows[last]):
            longest, shortest = max(longest, rows[last]), min(shortest, rows[last])
            last += 1
        counts = rows[first:last]
        samples = slice(start, start + sum(counts))
        for (parameter, parts), norms in zip(layers.items(), squares, strict=True):
            group = [replace(p, **{k: v[samples] for k, v in vars(p).items()}) for p in parts]
            users = sum_users(group, weights[samples], counts)
            norms += squared_norms([in_form(users, parameter.shape, clipping)])
        first, start = last, samples.stop
    return [torch.cat(norms) for norms in squares]


def weighted_sum(
    parts: Parts, weights: Tensor, shape: torch.Size, target: Tensor | None = None
) -> Tensor:
    """Return ``sum_b weights[b] gradient_b``, of the parameter's shape.

    Args:
        parts: of all B samples.
        weights: (B,).
        shape: of the parameter.
        target: a tensor of this shape and of the gradients' dtype, to which the sum is added in
            place; None for zeros.
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
            term = left.T @ right
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
    """Return ``left^T (sum_b gradient_b) right`` of a matrix, or ``left . sum_b gradient_b``.

    It needs no product of the layer's size. Over random vectors a gradient of autograd that differs
    from the sum of these parts also differs in this form, with probability 1.

    Args:
        parts: of all samples.
        left: (m,) random numbers, m the parameter's first dimension.
        right: (n,) of the flattened other dimensions.

    Returns:
        The bilinear form, and the sum of the squared norms of all terms (positions, or samples in
        full): both scalars, the latter in float64. Over random vectors the form of a sum has its
        norm for a standard deviation, whatever it is by chance along this one.
    """
    value, squares = left.new_zeros(()), left.new_zeros((), dtype=torch.float64)
    for part in parts:
        if isinstance(part, _Dense):
            terms = _wide(part.values).flatten(1)
            numbers = (terms.view(len(terms), len(left), -1) @ right) @ left
            norms = _norms(terms)
        elif isinstance(part, _Outer):
            numbers = (_wide(part.left) @ left) * (_wide(part.right) @ right)
            norms = _norms(part.left) * _norms(part.right)
        else:
            numbers = left[part.ids] * (_wide(part.values) @ right)
            norms = _norms(part.values)
        value, squares = value + numbers.sum(), squares + norms.square().sum()
    return value, squares


def random_direction(index: int, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random vectors, of a parameter's first and of its other dimensions.

    They depend on ``index`` and the shape alone.
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
    """Return whether products of float32 may be rounded (TF32, which is cuDNN's default)."""
    try:
        rounded = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # a backend's setting contradicts the common one
        rounded = True
    on_card = context.device.type == "cuda"
    return rounded or (on_card and any(isinstance(m, _ConvNd) for m in context.root.modules()))


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms


def _squared_norms(parts: Parts, rows: slice) -> Tensor:
    """Return the squared norms of some samples, so that copies and Gram matrices stay small."""
    total: Tensor | None = None
    absolute: Tensor | None = None
    outer = next((part for part in parts if isinstance(part, _Outer)), None)
    if outer is not None:
        left, right = _wide(outer.left[rows]), _wide(outer.right[rows])
        total, absolute = _add(None, None, (left @ left.mT).mul_(right @ right.mT))
    for part in parts:
        if isinstance(part, _Dense):
            raise AssertionError("parts in full and factors together have no ghost norm")
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
    widest = max(v.shape[2] for part in parts for v in vars(part).values() if v.dim() == 3)
    share = ROUNDING * torch.finfo(total.dtype).eps * max(1.0, (widest / SUMMED) ** 0.5)
    total = total + share * (absolute - total)
    return torch.maximum(total, CANCELLATION * absolute)


def _add(total: Tensor | None, absolute: Tensor | None, terms: Tensor) -> tuple[Tensor, Tensor]:
    value, size = terms.sum((1, 2)), terms.abs_().sum((1, 2))
    return value if total is None else total + value, size if absolute is None else absolute + size


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def rule_of(name: str, module: nn.Module) -> Rule:
    """Return the rule by which a layer's input and output gradient give per-sample gradients.

    Args:
        name: of the module in the root, "" for the root itself.
        module: has trainable parameters itself.

    Raises:
        DefenseError: its parameters have no per-sample gradients; says why.
    """
    if reason := _refusal(name, module):
        raise DefenseError(f"DPSGD: {reason}")
    kind = _plain_type(module)
    # Hugging Face's Linear with its weight transposed.
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return _conv1d
    return _RULES.get(kind, _any)


def _refusal(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    inside = {p for child in module.children() for p in child.parameters()}
    trained = [k for k, p in module._parameters.items() if p is not None and p.requires_grad]
    loose = [k for k in trained if module._parameters[k] not in inside]
    if not loose:
        return ""
    names = ", ".join(f"'{name}.{key}'" if name else f"'{key}'" for key in loose)
    for base, mend in _MENDS.items():
        if isinstance(module, base):
            return f"'{name}' is a {kind}, which has no per-sample gradients. {mend.format(kind)}"
    if kind.startswith("Dora"):
        return f"{names} is DoRA's magnitude, which no sample passes: LoraConfig(use_dora=False)"
    if inside or not name or isinstance(module, CONTAINERS):
        return (
            f"the parameters {names} belong to a {kind}, whose inputs and outputs do not give "
            "their per-sample gradients. Put them into a module of their own that computes with "
            "them in its `forward`, or freeze them."
        )
    if type(module) in _RULES and not {"weight", "bias"}.issuperset(loose):
        return (
            f"'{name}' ({kind}) trains {names}, from which its weight is computed. Remove that "
            "(torch.nn.utils.remove_weight_norm), or freeze it."
        )
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if isinstance(module, nn.Embedding) and getattr(module, setting) not in (None, False):
            return (
                f"the embedding '{name}' has `{setting}`, which mixes samples or hides rows: build "
                "it without"
            )
    return ""


def _linear(
    module: Any, source: Tensor, gradient: Tensor, samples: int, *, transposed: bool = False
) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    gradient = gradient.reshape(samples, -1, gradient.shape[-1])
    if module.weight.requires_grad:
        source = source.reshape(samples, -1, source.shape[-1])
        parts["weight"] = _Outer(source, gradient) if transposed else _Outer(gradient, source)
    if module.bias is not None and module.bias.requires_grad:
        parts["bias"] = _Dense(_wide(gradient).sum(1))
    return parts


_conv1d = functools.partial(_linear, transposed=True)


def _embedding(
    module: nn.Embedding, source: Tensor, gradient: Tensor, samples: int
) -> dict[str, Part]:
    ids = source.reshape(samples, -1)
    values = gradient.reshape(samples, -1, gradient.shape[-1])
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    return {"weight": _EmbeddingRows(ids, values)}


def _layer_norm(
    module: nn.LayerNorm, source: Tensor, gradient: Tensor, samples: int
) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    shape = module.normalized_shape
    gradient = _wide(gradient).reshape(samples, -1, *shape)
    if module.weight.requires_grad:
        normal = nn.functional.layer_norm(_wide(source), shape, eps=module.eps)
        parts["weight"] = _Dense((normal.reshape_as(gradient) * gradient).sum(1))
    if module.bias is not None and module.bias.requires_grad:
        parts["bias"] = _Dense(gradient.sum(1))
    return parts


def _any(module: nn.Module, source: Tensor, gradient: Tensor, samples: int) -> dict[str, Part]:
    """Run the layer again for one sample at a time, vectorized."""
    parameters = {k: p.detach() for k, p in module.named_parameters() if p.requires_grad}
    if any(isinstance(p, DTensor) for p in parameters.values()):
        raise DefenseError(
            f"DPSGD: a {_plain_type(module).__name__} is sharded (FSDP2) when its gradient comes, "
            "and is needed whole. Shard the block around it instead, or leave `output_dtype` out "
            "of its MixedPrecisionPolicy."
        )
    # Not its state_dict: FSDP2 would take that for a moment in which to free what is whole.
    everything = [*module.named_parameters(), *module.named_buffers()]
    rest = {key: value.detach() for key, value in everything}
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    module._forward_hooks, module._forward_pre_hooks = type(hooks)(), type(pre_hooks)()

    def pull_sample(x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
        def run(trained: dict[str, Tensor]) -> Tensor:
            output: Tensor = functional_call(module, {**rest, **trained}, (x,))
            return output

        output, pull = vjp(run, parameters)[:2]
        result: dict[str, Tensor] = pull(upstream.to(output.dtype))[0]
        return result

    try:
        with torch.enable_grad():
            rows = len(source) // samples
            x = source.reshape(samples, rows, *source.shape[1:])
            upstream = gradient.reshape(samples, rows, *gradient.shape[1:])
            gradients = vmap(pull_sample, randomness="error")(x, upstream)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise DefenseError(
            f"DPSGD: a {_plain_type(module).__name__} cannot be run again for one sample at a time "
            f"({error}). A trained layer must take one tensor of samples, return one, and draw "
            "nothing at random. Freeze it."
        ) from error
    finally:
        module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks
    return {key: _Dense(values) for key, values in gradients.items()}


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a layer had before FSDP2 replaced it."""
    kind = type(module)
    if issubclass(kind, FSDPModule) and kind.__bases__[0] is FSDPModule:
        return kind.__bases__[1]
    return kind


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
}
GHOST_RULES: tuple[Rule, ...] = (_linear, _conv1d, _embedding)
"""Rules of layers whose matrices stay factors."""


def zeros_of(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's whole shape, float32 or float64 as clipped sums are."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=where_whole(parameter))
