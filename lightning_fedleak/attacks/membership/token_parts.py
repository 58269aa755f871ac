"""Parts that single tokens add to the gradients of linear maps, and how much of each is shared.

The gradient of a linear map is a sum over tokens of outer products, ``sum_t e_t x_t^T`` of the
map's input x and the *slope* e, the loss's gradient in the map's output. Both sides are whitened by
public text (the Kronecker factors of Martens and Grosse 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.row_space import LinearMap, whitening_matrix
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import (
    micro_batches,
    only_needed_hooks,
    token_logits,
    undisturbed,
)

T = TypeVar("T")

LOGITS_AT_ONCE = 1 << 22  # of one run, 16 MB, of which a backward has two; more: no faster
WIDEST = 1024  # sides up to which whitening is a full matrix, wider ones diagonal; more: slower
ALLOWANCE = 2.0  # standard errors that two tokens may fall short for free; not tuned
MOST_LACKING = 0.5  # share of a coefficient that two tokens can take off; not tuned


def map_token_parts(
    anatomy: Anatomy,
    maps: Sequence[LinearMap],
    batch: TokenBatch,
    function: Callable[[Mapping[str, tuple[Tensor, Tensor]]], T],
) -> list[T]:
    """Return what a function makes of each token's part in the gradients of linear maps.

    Args:
        anatomy: the model, run in eval mode.
        maps: each called once in a forward.
        batch: texts (B, L) with labels.
        function: called for a few texts at a time with a mapping from the map's name to inputs
            (b, L, d) and slopes (b, L, o) of the summed loss, in float32. Padded and virtual tokens
            are missing or zero, as are maps that are not called exactly once.

    Returns:
        The function's results, in order.
    """
    results = []
    parameter_ids = {id(anatomy.parameter(m.name)) for m in maps}
    views = {
        name: p.detach().requires_grad_(id(p) in parameter_ids)
        for name, p in anatomy.model.named_parameters()
    }
    with undisturbed(anatomy) as model, torch.enable_grad(), only_needed_hooks(anatomy.root):
        for part in micro_batches(anatomy, batch, LOGITS_AT_ONCE):
            with _record_calls(maps) as calls:
                logits, labels = token_logits(model, part, views)
            with torch.no_grad():
                results.append(function(_inputs_and_slopes(maps, calls, logits, labels, part)))
            del calls, logits  # with their graph, which the next run would add to
    return results


def _inputs_and_slopes(
    maps: Sequence[LinearMap],
    calls: Mapping[int, list[tuple[Tensor, Tensor]]],
    logits: Tensor,
    labels: Tensor,
    part: TokenBatch,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return inputs and slopes by map; the logits are overwritten by the loss's gradient."""
    length = part.input_ids.shape[1]
    single_calls = {}
    for linear in maps:
        # DoRA also calls its maps on a unit matrix, through which no gradient flows.
        batch_calls = [(x, y) for x, y in calls.get(id(linear.reader), []) if x.dim() == 3]
        if len(batch_calls) == 1 and batch_calls[0][1].requires_grad:
            single_calls[linear.name] = batch_calls[0]
    outputs = [y for _, y in single_calls.values()]
    slopes: Sequence[Tensor | None] = ()
    if outputs:
        errors = logits.detach().float()  # their own memory, of which cross_entropy takes four
        errors.sub_(errors.logsumexp(1, keepdim=True)).exp_()
        errors[torch.arange(len(labels), device=labels.device), labels] -= 1
        slopes = torch.autograd.grad(logits, outputs, errors.to(logits.dtype), allow_unused=True)
    real = None if part.attention_mask is None else (part.attention_mask != 0)[..., None]
    pairs = {}
    for (name, (x, _)), slope in zip(single_calls.items(), slopes, strict=True):
        if slope is None:
            continue
        x, slope = x[:, -length:].float(), slope[:, -length:].float()
        pairs[name] = (x, slope if real is None else slope * real)
    return pairs


@contextmanager
def _record_calls(maps: Sequence[LinearMap]) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Yield a mapping that collects each map's inputs and outputs, by the id of its reader."""
    calls: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.setdefault(id(module), []).append((args[0].detach(), output))

    with ExitStack() as stack:
        for reader in {id(m.reader): m.reader for m in maps}.values():
            stack.callback(reader.register_forward_hook(record).remove)
        yield calls


@dataclass(frozen=True)
class SideWhitening:
    """Whitening of both sides of a map's gradient, from public text.

    Attributes:
        inputs: (d, d) factor of inputs from the right, which gives them one size in all directions;
            (d,) for wide inputs, one factor a number.
        slopes: (o, o) or (o,), the same for slopes.
        axis: the parameter's axis along the input.
        sizes: shaped as the parameter; root mean square of each number of a token's part.
    """

    inputs: Tensor
    slopes: Tensor
    axis: int
    sizes: Tensor

    @classmethod
    def from_moments(cls, inputs: Tensor, slopes: Tensor, axis: int) -> SideWhitening:
        """Return the whitening for second moments of inputs, (d, d) or (d,), and of slopes."""
        squares = [m.diagonal() if m.dim() == 2 else m for m in (slopes, inputs)]
        sizes = torch.outer(*(square.sqrt() for square in squares)).float()
        if axis != 1:
            sizes = sizes.T
        return cls(whitening_matrix(inputs), whitening_matrix(slopes), axis, sizes)

    def whiten(self, gradient: Tensor) -> Tensor:
        """Return the parameter's gradient, whitened, as (o, d)."""
        g = gradient if self.axis == 1 else gradient.T
        return _multiply(_multiply(g.T, self.slopes).T, self.inputs)


class Moments:
    """Second moments of inputs and slopes over public tokens, by map."""

    def __init__(self) -> None:
        self._inputs: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add the parts of a few texts."""
        for name, sides in parts.items():
            for sums, values in zip((self._inputs, self._slopes), sides, strict=True):
                flat = values.flatten(0, 1).double()
                wide = flat.shape[1] > WIDEST
                moment = flat.square().sum(0) if wide else flat.T @ flat
                sums[name] = sums[name].add_(moment) if name in sums else moment

    def whitenings(self, maps: Sequence[LinearMap]) -> dict[str, SideWhitening]:
        """Return the whitening of each map that public text reaches, by its name, and forget."""
        whitenings = {}
        for m in maps:
            if m.name in self._inputs:
                sides = self._inputs.pop(m.name), self._slopes.pop(m.name)
                if all(bool(side.any()) for side in sides):
                    whitenings[m.name] = SideWhitening.from_moments(*sides, m.axis)
        return whitenings


def _multiply(values: Tensor, factor: Tensor) -> Tensor:
    """Return rows times a matrix, or times the diagonal of one."""
    return values @ factor if factor.dim() == 2 else values * factor


@dataclass(frozen=True)
class PartFit:
    """Inner products of texts' token parts with the shared gradient and with each other.

    Attributes:
        products: (B, L) inner product of each token's part with the shared gradient.
        gram: (B, L, L) of the parts of a text with each other.
    """

    products: Tensor
    gram: Tensor

    @property
    def sizes(self) -> Tensor:
        """Return (B, L): the squared norm of each part; 0 where a token has none."""
        return self.gram.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True)
class WhiteParts:
    """Whitened parts of texts' tokens in the gradient of one map.

    Attributes:
        inputs: (B, L, d).
        slopes: (B, L, o).
        gram: (B, L, L) inner products of the parts of a text with each other.
    """

    inputs: Tensor
    slopes: Tensor
    gram: Tensor

    @classmethod
    def whiten(cls, whitening: SideWhitening, x: Tensor, slope: Tensor) -> WhiteParts:
        """Return the whitened parts of inputs (B, L, d) and slopes (B, L, o)."""
        x, slope = _multiply(x, whitening.inputs), _multiply(slope, whitening.slopes)
        return cls(x, slope, (slope @ slope.mT) * (x @ x.mT))

    def fit(self, shared: Tensor) -> PartFit:
        """Return the fit of the parts to the whitened shared gradient, (o, d)."""
        return PartFit(((self.slopes @ shared) * self.inputs).sum(-1), self.gram)

    @property
    def numbers(self) -> int:
        """Return how many numbers are held."""
        return self.inputs.numel() + self.slopes.numel() + self.gram.numel()


def join_fits(fits: Iterable[Mapping[str, PartFit]]) -> dict[str, PartFit]:
    """Return one fit for all texts of several, by the map's name."""
    rows: dict[str, list[PartFit]] = {}
    for fits_by_map in fits:
        for name, fit in fits_by_map.items():
            rows.setdefault(name, []).append(fit)
    return {
        name: PartFit(torch.cat([f.products for f in row]), torch.cat([f.gram for f in row]))
        for name, row in rows.items()
    }


def sum_fits(fits: Mapping[str, PartFit], weights: Mapping[str, Tensor]) -> PartFit:
    """Return the weighted sum of the fits, over the maps that have a weight."""
    weighted = [(weights[name], fit) for name, fit in fits.items() if name in weights]
    if not weighted:
        raise UnusableObservation("the loss depends on none of the maps that are read")
    products = [weight * fit.products for weight, fit in weighted]
    gram = [weight * fit.gram for weight, fit in weighted]
    return PartFit(torch.stack(products).sum(0), torch.stack(gram).sum(0))


def noise_level(fit: PartFit) -> Tensor:
    """Return the mean square of the products of texts outside the batch, over their size."""
    counts = fit.sizes > 0
    noise = (fit.products[counts].square() / fit.sizes[counts]).mean()
    # A map that no text reaches has the mean of nothing, NaN, and gets no weight.
    return noise.nan_to_num(nan=torch.inf).clamp_min(torch.finfo(noise.dtype).tiny)


def least_coefficient(fit: PartFit, noise: Tensor) -> Tensor:
    """Return (B,) a text's coefficient, less the largest shortfall of two neighbouring tokens.

    Args:
        fit: of the texts.
        noise: () standard deviation of a part's inner product, in units of its norm.
    """
    tiny = torch.finfo(fit.gram.dtype).tiny
    coefficient = fit.products.sum(1) / fit.gram.sum((1, 2)).clamp_min(tiny)
    rest = fit.products - coefficient[:, None] * fit.gram.sum(2)
    size = fit.sizes[:, 1:] + fit.sizes[:, :-1] + 2 * fit.gram.diagonal(1, dim1=1, dim2=2)
    counts = size > 0
    size = size.where(counts, torch.ones_like(size))
    shortfalls = (rest[:, 1:] + rest[:, :-1]) / size + ALLOWANCE * noise / size.sqrt()
    lack = shortfalls.masked_fill(~counts, 0.0).amin(1).clamp(max=0.0)
    return coefficient + torch.maximum(lack, -MOST_LACKING * coefficient.abs())


def count_numbers(linear: LinearMap, anatomy: Anatomy) -> int:
    """Return how many numbers a map's gradient and the whitening of its two sides have."""
    slopes, inputs = sides(linear, anatomy)
    return slopes * inputs + sum(n if n > WIDEST else n * n for n in (slopes, inputs))


def sides(linear: LinearMap, anatomy: Anatomy) -> tuple[int, int]:
    """Return the widths of a map's output and input."""
    parameter = anatomy.parameter(linear.name)
    assert parameter is not None
    return linear.rows, parameter.numel() // linear.rows
