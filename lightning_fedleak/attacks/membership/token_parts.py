"""The parts of single tokens in the gradients of linear maps, and their fit to a shared gradient.

The gradient of a linear map is a sum of outer products over tokens, ``sum_t e_t x_t^T``. Here x is
the map's input, and the *slope* e is the gradient of the loss with respect to the map's output. One
such product is a token's *part*. Both sides are whitened by public text (the Kronecker factors of
Martens and Grosse 2015), because directions that all texts share show no membership.

:func:`map_token_parts` runs texts and returns x and e, :class:`Moments` fits the whitening, and a
:class:`PartFit` holds the inner products of a text's whitened parts with the gradient that the
client shared. :func:`min_coefficient` turns them into a score of membership.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.public_text import leaves
from lightning_fedleak.attacks.row_space import LinearMap, whitening_matrix
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_runs import (
    labels_of,
    micro_batches,
    only_needed_hooks,
    run_logits,
    undisturbed,
)

T = TypeVar("T")

# The number of logits of one run, just under 32 MiB: larger tensors get new memory from the system
# each time. Half as many took 11% longer, twice as many 10 to 19% (24 texts of 64 tokens, two
# models with V = 32,000, one thread of a CPU).
LOGITS_AT_ONCE = (1 << 23) - (1 << 12)
# The width of the widest side that is whitened by a full matrix; wider ones are whitened by a
# diagonal, since the cost of the full matrix grows with the cube of the width.
MAX_FULL_WIDTH = 1024
# The standard errors by which two tokens may fall short without an effect. A smaller value lowers
# the scores of members by noise; a larger one keeps texts with two changed tokens high. Not tuned.
ALLOWANCE = 2.0
# The largest share of a coefficient that two tokens can take off. A larger share lets one pair of
# tokens decide the score of a text. Not tuned.
MAX_SHORTFALL = 0.5


def map_token_parts(
    anatomy: Anatomy,
    maps: Sequence[LinearMap],
    batch: TokenBatch,
    function: Callable[[Mapping[str, tuple[Tensor, Tensor]]], T],
) -> list[T]:
    """Return a function's results for the tokens' parts in the gradients of linear maps.

    Args:
        anatomy: The model, which runs in eval mode.
        maps: The linear maps.
        batch: The texts (B, L) with labels.
        function: A function of the inputs (b, L, d) and slopes (b, L, o) of a few texts, by the
            map's name, in float32. The slopes are those of the summed loss. Both are zero at
            padding. Virtual tokens are missing, and so are maps that are not called exactly once or
            do not affect the loss.

    Returns:
        The function's results, in the order of the texts.
    """
    results = []
    views, _ = leaves(anatomy, [m.name for m in maps])
    with undisturbed(anatomy) as model, torch.enable_grad(), only_needed_hooks(anatomy.root):
        for texts in micro_batches(anatomy, batch, LOGITS_AT_ONCE):
            with _record_calls(maps) as calls:
                logits = run_logits(model, texts, views)
            with torch.no_grad():
                results.append(function(_inputs_and_slopes(maps, calls, logits, texts)))
            del calls, logits  # frees their graph before the next run builds another
    return results


def _inputs_and_slopes(
    maps: Sequence[LinearMap],
    calls: Mapping[int, list[tuple[Tensor, Tensor]]],
    logits: Tensor,
    texts: TokenBatch,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the inputs and slopes by map, as :func:`map_token_parts` passes them on.

    ``logits`` are the model's, (B, L, V), with its virtual tokens in front.
    """
    length = texts.input_ids.shape[1]
    single_calls = {}
    for linear in maps:
        # DoRA also calls its maps on a unit matrix, through which no gradient flows.
        batch_calls = [(x, y) for x, y in calls.get(id(linear.reader), []) if x.dim() == 3]
        if len(batch_calls) == 1 and batch_calls[0][1].requires_grad:
            single_calls[linear.name] = batch_calls[0]
    outputs = [y for _, y in single_calls.values()]
    slopes: Sequence[Tensor | None] = ()
    if outputs:
        errors = _logit_errors(logits.detach(), labels_of(texts)).to(logits.dtype)
        slopes = torch.autograd.grad(logits, outputs, errors, allow_unused=True)
    real = None if texts.attention_mask is None else (texts.attention_mask != 0)[..., None]
    pairs = {}
    for (name, (x, _)), slope in zip(single_calls.items(), slopes, strict=True):
        if slope is None:
            continue
        x, slope = x[:, -length:].float(), slope[:, -length:].float()  # without virtual tokens
        pairs[name] = (x, slope) if real is None else (x * real, slope * real)
    return pairs


def _logit_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient (B, L, V) of the summed cross-entropy in logits, softmax - one-hot.

    It is zero where no label is predicted. (To select the predicting positions first would copy the
    logits, and twice again in the backward.)
    """
    errors = logits.float().softmax(-1)
    length, labels = labels.shape[1], labels[:, 1:]
    errors[:, :-length] = 0
    errors[:, -1] = 0
    predicting, counted = errors[:, -length:-1], labels != IGNORE_INDEX
    if not bool(counted.all()):
        predicting[~counted] = 0
    ones = counted[..., None].to(errors.dtype)
    predicting.scatter_add_(2, labels.clamp_min(0)[..., None], -ones)
    return errors


@contextmanager
def _record_calls(maps: Sequence[LinearMap]) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Yield a mapping that collects the inputs and outputs of the maps, by their reader's id."""
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
    """The whitening of both sides of a map's gradient, from public text.

    Attributes:
        inputs: (d, d) the upper triangular factor that multiplies inputs from the right, so that
            their second moment is the same in all directions; (d,) for wide inputs, one factor for
            each coordinate.
        slopes: (o, o) or (o,) the same for slopes.
        axis: The parameter's axis along the input.
        sizes: The root mean square of each entry of a token's part, if inputs and slopes are
            independent, in the parameter's shape. It is multiplied by the number of public tokens,
            which is the same for all maps of one calibration.
    """

    inputs: Tensor
    slopes: Tensor
    axis: int
    sizes: Tensor

    def whiten(self, gradient: Tensor) -> Tensor:
        """Return the whitened gradient (o, d) of the parameter."""
        g = gradient if self.axis == 1 else gradient.T
        return _multiply(_multiply(g.T, self.slopes).T, self.inputs)


class Moments:
    """The second moments of inputs and slopes, summed over public tokens, by map.

    A side wider than ``MAX_FULL_WIDTH`` keeps the diagonal only. Products are in float32, of values
    that are divided by the largest of the first texts: squares of small slopes would be zero.
    """

    def __init__(self) -> None:
        # By map: the moment of the scaled values, and the size that they were divided by.
        self._inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self._slopes: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add the inputs and slopes of a few texts, by map."""
        for name, sides in parts.items():
            for sums, values in zip((self._inputs, self._slopes), sides, strict=True):
                flat = values.flatten(0, 1)
                if name not in sums:
                    shape = flat.shape[1:] if flat.shape[1] > MAX_FULL_WIDTH else flat.shape[1:] * 2
                    largest = flat.abs().max()
                    size = torch.where(largest > 0, largest, 1)
                    sums[name] = flat.new_zeros(shape), size
                moment, size = sums[name]
                scaled = flat / size
                if moment.dim() == 2:
                    moment.addmm_(scaled.T, scaled)
                else:
                    moment += scaled.square().sum(0)

    def whitenings(self, maps: Sequence[LinearMap]) -> dict[str, SideWhitening]:
        """Return the whitening of each map that public text reaches, by its name.

        The moments of these maps are dropped, to free their memory.
        """
        whitenings = {}
        for m in maps:
            if m.name in self._inputs:
                scaled = self._inputs.pop(m.name), self._slopes.pop(m.name)
                if all(bool(moment.any()) for moment, _ in scaled):
                    sides = [moment.double() * size.double() ** 2 for moment, size in scaled]
                    x, slope = (s.diagonal() if s.dim() == 2 else s for s in sides)
                    sizes = torch.outer(slope.sqrt(), x.sqrt()).float()
                    inputs, slopes = map(whitening_matrix, sides)
                    sizes = sizes if m.axis == 1 else sizes.T
                    whitenings[m.name] = SideWhitening(inputs, slopes, m.axis, sizes)
        return whitenings


def _multiply(values: Tensor, factor: Tensor) -> Tensor:
    """Return the rows of ``values`` times an upper triangular matrix (n, n), or a diagonal (n,)."""
    if factor.dim() == 1:
        return values * factor
    middle = len(factor) // 2  # below the diagonal: zeros, skipped to save a quarter
    left = values[..., :middle] @ factor[:middle, :middle]
    return torch.cat([left, values @ factor[:, middle:]], -1)


@dataclass(frozen=True)
class PartFit:
    """The inner products of token parts with the shared gradient and with each other.

    Attributes:
        products: (B, L) the inner product of each token's part with the shared gradient.
        gram: (B, L, L) the inner products of the parts of each text.
    """

    products: Tensor
    gram: Tensor

    @property
    def squares(self) -> Tensor:
        """Return the squared norm (B, L) of each part; 0 for a token without a part."""
        return self.gram.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True)
class WhiteParts:
    """The whitened parts of tokens in the gradient of one map.

    Attributes:
        inputs: (B, L, d) the whitened inputs.
        slopes: (B, L, o) the whitened slopes.
        gram: (B, L, L) the inner products of the parts of each text.
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
        """Return the fit of the parts to the whitened shared gradient (o, d)."""
        return PartFit(((self.slopes @ shared) * self.inputs).sum(-1), self.gram)


def join_fits(fits: Iterable[Mapping[str, PartFit]]) -> dict[str, PartFit]:
    """Return the fits of several groups of texts as one, by the map's name."""
    groups: dict[str, list[PartFit]] = {}
    for fits_by_map in fits:
        for name, fit in fits_by_map.items():
            groups.setdefault(name, []).append(fit)
    return {
        name: PartFit(torch.cat([f.products for f in group]), torch.cat([f.gram for f in group]))
        for name, group in groups.items()
    }


def sum_fits(fits: Mapping[str, PartFit], weights: Mapping[str, Tensor]) -> PartFit:
    """Return the weighted sum of the fits over the maps that have a weight.

    Raises:
        UnusableObservation: No map has both a fit and a weight.
    """
    weighted = [(weights[name], fit) for name, fit in fits.items() if name in weights]
    if not weighted:
        raise UnusableObservation("the loss depends on none of the linear maps that are read")
    products = [weight * fit.products for weight, fit in weighted]
    gram = [weight * fit.gram for weight, fit in weighted]
    return PartFit(torch.stack(products).sum(0), torch.stack(gram).sum(0))


def noise_variance(fit: PartFit) -> Tensor:
    """Return the variance () of the products of unit parts, from texts outside the batch."""
    has_part = fit.squares > 0
    variance = (fit.products[has_part].square() / fit.squares[has_part]).mean()
    # The mean over no parts is NaN. An infinite variance gives such a map no weight.
    return variance.nan_to_num(nan=torch.inf).clamp_min(torch.finfo(variance.dtype).tiny)


def min_coefficient(fit: PartFit, noise: Tensor) -> Tensor:
    """Return each text's coefficient (B,), less the largest shortfall of two neighbouring tokens.

    The coefficient is the least-squares multiple of the text's gradient in the shared gradient. The
    shortfall lowers it for a text that differs from a member in a few tokens: their parts do not
    fit. It is the least-squares coefficient of two tokens' part in the residual, of which
    ``ALLOWANCE`` standard errors are forgiven. It takes off ``MAX_SHORTFALL`` of the coefficient at
    most.

    Args:
        fit: The fit of the texts, with at least two tokens each.
        noise: () the standard deviation of a unit part's inner product.
    """
    tiny = torch.finfo(fit.gram.dtype).tiny
    coefficient = fit.products.sum(1) / fit.gram.sum((1, 2)).clamp_min(tiny)
    residual = fit.products - coefficient[:, None] * fit.gram.sum(2)
    size = fit.squares[:, 1:] + fit.squares[:, :-1] + 2 * fit.gram.diagonal(1, dim1=1, dim2=2)
    has_part = size > 0
    size = size.where(has_part, torch.ones_like(size))
    differences = (residual[:, 1:] + residual[:, :-1]) / size + ALLOWANCE * noise / size.sqrt()
    shortfall = differences.masked_fill(~has_part, 0.0).amin(1).clamp(max=0.0)
    return coefficient + torch.maximum(shortfall, -MAX_SHORTFALL * coefficient.abs())


def count_numbers(linear: LinearMap, anatomy: Anatomy) -> int:
    """Return the number of values in a map's gradient and in the two factors of its whitening.

    ``SideWhitening.sizes``, as many values as the gradient again, are not counted.
    """
    slopes, inputs = sides(linear, anatomy)
    return slopes * inputs + sum(n if n > MAX_FULL_WIDTH else n * n for n in (slopes, inputs))


def sides(linear: LinearMap, anatomy: Anatomy) -> tuple[int, int]:
    """Return the widths (o, d) of a map's output and input."""
    parameter = anatomy.parameter(linear.name)
    assert parameter is not None
    return linear.rows, parameter.numel() // linear.rows
