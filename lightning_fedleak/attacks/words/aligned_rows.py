"""Features of the rows of the head's gradient, by which a classifier recognises used types.

A type is a distinct token of the vocabulary; it is used if it is a label in the batch. The row of
type t is ``sum_i (p_i(t) - [y_i = t]) h_i``, with the probability ``p_i(t)`` that the model gives t
at token i, the label ``y_i`` and the hidden state ``h_i``. A direction u is aligned with the hidden
states, so that ``h_i . u > 0``. Along u the row of an unused type is positive, and that of a used
type is negative, unless the model predicts the type more often than it occurs. So each row is also
compared with the row that public text predicts for an unused type.

:class:`Directions` are fitted to public hidden states; :class:`ExpectedRows` holds the predicted
rows, projected on them. :func:`estimate_units` estimates the norm of the row of a type that was
used once, and the number of tokens in the batch. :func:`row_features` computes the features in
these units, so that they do not depend on the gradient's scale.

The head's gradient (V, d) has a row for each of V tokens. Attacks on words distinguish the rows of
tokens in the batch by their norm and by their projection on one direction (:class:`RowSummary`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.base import check_readable
from lightning_fedleak.attacks.words.head_gradients import GradientParts
from lightning_fedleak.model.model_runs import rows_at_once

_ROWS_AT_ONCE = 512  # rows converted to float32 at once, which bounds the memory


@dataclass(frozen=True)
class RowSummary:
    """The norm and the projection of every row of a gradient.

    Attributes:
        projection: (V,) projection of each row minus ``common`` on a direction of unit length.
        norms: (V,) norm of each row minus ``common``.
        common: (d,) the row that label smoothing adds to every row; zero without smoothing.
    """

    projection: Tensor
    norms: Tensor
    common: Tensor

    @classmethod
    def read(cls, gradient: Tensor, u: Tensor) -> RowSummary:
        """Return the summary of a gradient, without the row that label smoothing adds.

        Args:
            gradient: (V, d).
            u: (d,) the direction of the projections, of unit length.

        Raises:
            UnusableObservation: the gradient has NaN or infinity, or is all zero.
        """
        norms = map_rows(gradient, lambda rows: torch.linalg.vector_norm(rows, dim=1))
        check_readable(norms.max(), "the head's gradient")
        summary = cls(projections(gradient, u), norms, u.new_zeros(gradient.shape[1]))
        common = _common_row(gradient, summary)
        return summary if common is None else cls(*_subtract(gradient, u, common), common)

    @property
    def width(self) -> int:
        """Return d, the length of a row."""
        return len(self.common)

    def select(self, rows: Tensor) -> RowSummary:
        """Return the summary of some rows."""
        return RowSummary(
            self.projection.index_select(0, rows), self.norms.index_select(0, rows), self.common
        )

    def noise(self) -> Tensor:
        """Return an upper bound on the standard deviation of noise on each coordinate, ().

        The smallest rows of a noised update hold only noise, and d independent coordinates give
        them nearly equal norms, so that the 10% quantile of all norms shows it. Without noise the
        bound is about the root mean square of a coordinate of the smallest rows.
        """
        # The norm of d standard normals is nearly normal around sqrt(d) with variance 1/2, and
        # -1.2816 is the 10% quantile of a standard normal.
        spread = 1 - 1.2816 / (2 * self.width) ** 0.5
        low = self.norms.kthvalue(1 + (len(self.norms) - 1) // 10).values
        level: Tensor = low / (self.width**0.5 * max(spread, 0.1))
        return level

    def denoised_norms(self, noise: Tensor) -> Tensor:
        """Return (V,) norms of the rows without the contribution of noise of this deviation.

        The squares are reduced to no less than a twentieth, so that no norm becomes 0.
        """
        squares = self.norms.square()
        return torch.maximum(squares - self.width * noise * noise, 0.05 * squares).sqrt()


def projections(gradient: Tensor, u: Tensor) -> Tensor:
    """Return the (V,) projections of the rows on a direction ``u`` (d,), in float32."""
    return map_rows(gradient, lambda rows: rows @ u)


def map_rows(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the (V,) values of a function of rows in float32, converting few rows at a time."""
    gradient = gradient.detach()
    if gradient.dtype == torch.float32:
        return function(gradient)
    buffer = gradient.new_empty(_ROWS_AT_ONCE, gradient.shape[1], dtype=torch.float32)
    parts = torch.split(gradient, _ROWS_AT_ONCE)
    return torch.cat([function(buffer[: len(rows)].copy_(rows)) for rows in parts])


def _subtract(gradient: Tensor, u: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """Return projections and norms of the rows minus ``common``."""
    projection, norms = [], []
    buffer = torch.empty(_ROWS_AT_ONCE, len(common), device=common.device)
    for rows in torch.split(gradient.detach(), _ROWS_AT_ONCE):
        rows = torch.sub(rows, common, out=buffer[: len(rows)])
        projection.append(rows @ u)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(projection), torch.cat(norms)


def _common_row(gradient: Tensor, summary: RowSummary) -> Tensor | None:
    """Return the row (d,) that label smoothing adds to every row, or None.

    Smoothing by epsilon subtracts ``epsilon / V`` of every hidden state from every row. So the rows
    of types with almost no probability are nearly equal, and only the few types in the batch have
    lower projections. The common row is therefore the mean of the rows between the 8% and the 18%
    quantile of projections, if these are negative. If the rows there point in different directions,
    their projections come from noise, and the result is None.
    """
    if bool((summary.projection < 0).float().mean() < 0.18):
        return None
    n = len(summary.projection)
    order = summary.projection.argsort()[n * 8 // 100 : max(1, n * 18 // 100)]
    edge = gradient.detach()[order].float()
    common = edge.mean(0)
    agreement = common.norm() / (edge.norm(dim=1).mean() + 1e-30)  # 1 if all rows are equal
    return common if bool(agreement > 0.9) else None


_CENTRES = 64  # cluster centres of hidden states that rows are projected on; not tuned
_PRINCIPAL = 64  # principal directions of the hidden states, for the whitening; not tuned
_ERROR = 0.25  # assumed variance of the relative error of expected rows; not tuned
_OPENING = 4  # principal directions of the input gradients of first tokens; not tuned
_TINY = 1e-4  # added to sizes in units of a used token before a logarithm or division; not tuned


@dataclass(frozen=True)
class Directions:
    """Directions to project gradient rows on, d the hidden dimension.

    Attributes:
        u: (d,) unit; positive on the hidden states of public text.
        centres: (K, d) unit; where hidden states cluster.
        whitening: (d, m); the m leading principal directions of the unit hidden states, each
            divided by its standard deviation.
        deviations: (m,) these standard deviations.
        opening: (d, k) orthonormal; the principal directions of the input gradients of sentences'
            first tokens, which are large and are added to the rows if head and embedding are tied
            (k = 0 if they are not).
        scale: () median of ``h . u``: a token's label has a row of projection ``-scale`` on ``u``.
        norm: () median norm of a hidden state.
    """

    u: Tensor
    centres: Tensor
    whitening: Tensor
    deviations: Tensor
    opening: Tensor
    scale: Tensor
    norm: Tensor

    @classmethod
    def fit(cls, parts: GradientParts, generator: torch.Generator) -> Directions:
        """Return the directions fitted to the hidden states of public text."""
        states = parts.states  # what rows are sums of: hidden states, or for a LoRA A's outputs
        unit = F.normalize(states, dim=1)
        u = separating_direction(unit)
        mean = unit.mean(0)
        spread = (unit - mean).T @ (unit - mean) / len(unit)
        values, vectors = torch.linalg.eigh(spread)
        m = min(_PRINCIPAL, unit.shape[1], len(unit))
        openings = F.normalize(parts.input_grads[parts.input_first], dim=1)
        values, vectors = values.flip(0)[:m].clamp(min=1e-12), vectors.flip(1)[:, :m]
        return cls(
            u=u,
            centres=cluster_centres(unit, _CENTRES, generator),
            whitening=vectors / values.sqrt(),
            deviations=values.sqrt(),
            opening=torch.linalg.svd(openings, full_matrices=False).Vh[:_OPENING].T.contiguous(),
            scale=(states @ u).median(),
            norm=states.norm(dim=1).median(),
        )

    def follow(self, states: Tensor) -> Directions:
        """Return the directions with ``u``, ``scale`` and ``norm`` fitted to new hidden states."""
        u = separating_direction(states)
        return replace(self, u=u, scale=(states @ u).median(), norm=states.norm(dim=1).median())


def separating_direction(states: Tensor, steps: int = 200, rate: float = 0.05) -> Tensor:
    """Return a unit vector that is positive on as many states as possible, with a wide margin.

    The search begins at the mean direction and moves towards the mean of the 2% of states with the
    smallest projection.

    Args:
        states: (N, d); only their directions matter.
        steps: directions tried, at least 1.
        rate: length of a move, before normalisation.

    Returns:
        (d,).
    """
    unit = F.normalize(states.float(), dim=1)
    u = F.normalize(unit.mean(0), dim=0)
    k = max(1, len(unit) // 50)
    move = unit.new_full((k,), rate / k)
    candidates, lowest = [], []
    for _ in range(steps):
        values, rows = (unit @ u).topk(k, largest=False, sorted=False)
        candidates.append(u)
        lowest.append(values)
        u = torch.addmv(u, unit.index_select(0, rows).T, move)
        u /= torch.linalg.vector_norm(u)
    return candidates[int(torch.stack(lowest).mean(1).argmax())]


def cluster_centres(unit: Tensor, k: int, generator: torch.Generator, rounds: int = 12) -> Tensor:
    """Return (min(k, N), d) unit centres of (N, d) unit vectors, by spherical k-means."""
    start = torch.randperm(len(unit), generator=generator)[:k].to(unit.device)
    centres = unit[start]
    for _ in range(rounds):
        nearest = (unit @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, unit)
        empty = sums.norm(dim=1, keepdim=True) == 0
        centres = F.normalize(torch.where(empty, centres, sums), dim=1)
    return centres


@dataclass(frozen=True)
class ExpectedRows:
    """What public text predicts for the rows of unused types: means over its tokens, for V types.

    ``p(t)`` is the probability of type t, and h the hidden state. If the model caps its logits,
    ``p(t)`` is the probability times the cap's derivative, as it enters the gradient.

    Attributes:
        mass: (V, C) mean of ``p(t) h . u`` in units of ``scale``, by cluster of the hidden state.
            The clusters' weights are fitted to the gradient under attack.
        probability: (V,) mean of ``p(t)``.
        energy: (V,) mean of ``p(t)^2``.
        whitened: (V, m) mean of ``p(t) h``, whitened, in units of ``norm``.
        share: (C,) share of all mass that is in each cluster.
        frequency: (V,) share of the labels that are this type.
        opening: (V,) share of the sentences that begin with this type.
        reference: (R,) types that public text does not use, to which clusters' weights are fitted.
    """

    mass: Tensor
    probability: Tensor
    energy: Tensor
    whitened: Tensor
    share: Tensor
    frequency: Tensor
    opening: Tensor
    reference: Tensor

    @classmethod
    def compute(
        cls,
        parts: GradientParts,
        weight: Tensor,
        bias: Tensor | None,
        directions: Directions,
        clusters: Tensor,
        reference: Tensor | None = None,
    ) -> tuple[ExpectedRows, GradientParts]:
        """Return the expectations over all tokens of ``parts``, and these with log partitions.

        Args:
            parts: The hidden states and gradients of public text.
            weight: (V, d), the head's weight.
            bias: (V,), the head's bias, or None.
            directions: The directions to project on.
            clusters: (C, d) unit centres that tokens are assigned to.
            reference: types that clusters' weights are fitted to; chosen if it is None.
        """
        n, vocab = len(parts.labels), len(weight)
        states = parts.states  # what rows are sums of; logits are computed from ``parts.hidden``
        nearest = (F.normalize(states, dim=1) @ clusters.T).argmax(1)
        member = F.one_hot(nearest, len(clusters)).float()
        projection = states @ directions.u / directions.scale
        white = states @ directions.whitening / directions.norm
        target = torch.cat([member * projection[:, None], white], 1)
        projected = weight.new_zeros(vocab, target.shape[1])
        probability, energy = weight.new_zeros(vocab), weight.new_zeros(vocab)
        log_partition = weight.new_empty(n)
        step = rows_at_once(weight.device, vocab)
        for a in range(0, n, step):
            logits = parts.logit_map(F.linear(parts.hidden[a : a + step], weight, bias))
            p = logits.softmax(1)
            log_partition[a : a + step] = logits.amax(1) - p.amax(1).log()
            if parts.logit_map.softcap is not None:
                p *= parts.logit_map.steepness(logits)
            projected.addmm_(p.T, target[a : a + step])
            probability += p.sum(0)
            energy += p.square_().sum(0)
        frequency = torch.bincount(parts.labels, minlength=vocab).float() / n
        opens = parts.input_ids[parts.input_first]
        opening = torch.bincount(opens, minlength=vocab).float() / max(1, parts.n_sentences)
        if reference is None:
            reference = _reference(probability, frequency + opening)
        c = len(clusters)
        expected = cls(
            mass=projected[:, :c] / n,
            probability=probability / n,
            energy=energy / n,
            whitened=projected[:, c:] / n,
            share=projected[:, :c].sum(0) / projected[:, :c].sum(),
            frequency=frequency,
            opening=opening,
            reference=reference,
        )
        return expected, replace(parts, log_partition=log_partition)

    @classmethod
    def average(cls, first: ExpectedRows, second: ExpectedRows) -> ExpectedRows:
        """Return the mean of the expectations of two equal halves of public text."""
        means = {
            f.name: (getattr(first, f.name) + getattr(second, f.name)) / 2
            for f in fields(cls)
            if f.name != "reference"
        }
        return replace(first, **means)

    def rows(self, types: Tensor) -> ExpectedRows:
        """Return the expectations of some types, with an empty ``reference``."""
        columns = {
            f.name: getattr(self, f.name)[types]
            for f in fields(self)
            if f.name not in ("reference", "share")
        }
        return replace(self, **columns, reference=self.reference[:0])

    def weights(self, observed: Tensor, noise: Tensor) -> Tensor:
        """Return the clusters' weights, fitted to a gradient's rows of the reference types.

        The number of tokens n is fitted first, then ``observed_t ~ n sum_c x_c mass_tc`` with
        relative error and noise, a prior of mean 1 and variance 1 on ``x_c``, and ``x_c >= 0``. The
        weights are ``n x_c``. Types whose rows are negative, so that they may be used, and outliers
        are excluded.

        Args:
            observed: (R,) projections of the reference types' rows on ``u``, in units in which one
                used token gives -1.
            noise: () standard deviation of the noise on ``observed``.

        Returns:
            (C,); all zero if fewer than 8 rows are usable, or if the fitted n is 0.
        """
        mass = self.mass[self.reference]
        expected = mass.sum(1)
        usable = (observed > -4 * noise) & (expected > 0)  # noise alone is seldom below -4 of it
        if int(usable.sum()) < 8:
            return mass.new_zeros(mass.shape[1])
        mass, expected, observed = mass[usable], expected[usable], observed[usable]
        n = _amount(observed, expected, noise)
        if not bool(n > 0):
            return mass.new_zeros(mass.shape[1])
        predicted = n * expected
        variance = _ERROR + (noise / predicted) ** 2
        ratio = observed / predicted
        # Only gross outliers are excluded, because the weights x_c are not fitted yet.
        inlier = (ratio - 1).abs() < 3.5 * variance.sqrt() + 1.75
        precision = torch.where(inlier, 1 / variance, 0.0)
        share = mass / expected[:, None]
        k = mass.shape[1]
        gram = share.T @ (share * precision[:, None]) + torch.eye(k, device=mass.device)
        target = share.T @ (ratio * precision) + 1
        return n * _non_negative(gram, target)


def _amount(observed: Tensor, expected: Tensor, noise: Tensor, rounds: int = 5) -> Tensor:
    """Return n of ``observed ~ n expected``, at least 0, by a median of ratios.

    The first median is over the eighth of the rows with the largest expectations. The next ones are
    over the rows whose expected projection ``n expected`` is more than 3 times the noise.
    """
    order = expected.argsort(descending=True)
    n = (observed / expected)[order[: max(8, len(order) // 8)]].median().clamp(min=0)
    for _ in range(rounds):
        clear = n * expected > 3 * noise
        if int(clear.sum()) < 8:
            break
        n = (observed / expected)[clear].median().clamp(min=0)
    return n


def _reference(probability: Tensor, used: Tensor, size: int = 4096) -> Tensor:
    """Return the most probable types that public text does not use, in ascending order."""
    unused = probability.masked_fill(used > 0, -1.0)
    k = min(size, int((unused > 0).sum()))
    return unused.topk(k).indices.sort().values


def _non_negative(gram: Tensor, target: Tensor) -> Tensor:
    """Return the minimum of ``x.Gx/2 - b.x`` over ``x >= 0``, for a positive definite G."""
    factor = torch.linalg.cholesky(gram.double())  # G = L L^T: the minimum of |L^T x - L^-1 b|
    constant = torch.linalg.solve_triangular(factor, target.double()[:, None], upper=False)
    x, _ = nnls(factor.T.cpu().numpy(), constant[:, 0].cpu().numpy())
    return torch.from_numpy(x).to(gram)


@dataclass(frozen=True)
class _Units:
    """The scale of a gradient and the size of its batch, estimated from its rows.

    Attributes:
        noise: () upper bound on the standard deviation of the noise on each coordinate.
        use_norm: () norm of the row of a type that was used once.
        cosine: () median cosine between ``u`` and the hidden states of used tokens.
        n_used: () number of used tokens in the large rows that are negative along ``u``, less the
            model's predictions of their types.
        cluster_weights: (C,) weights of the clusters in this gradient, from
            :meth:`ExpectedRows.weights`.
        n_tokens: () estimate of the number of tokens in the batch, from the rows of unused types.
    """

    noise: Tensor
    use_norm: Tensor
    cosine: Tensor
    n_used: Tensor
    cluster_weights: Tensor
    n_tokens: Tensor


def token_norm(summary: RowSummary, noise: Tensor) -> Tensor | None:
    """Return the norm () of the row of a type that was used once; None if no row is negative.

    Only rows that are negative along ``u`` by more than 4 standard deviations of the noise count,
    and it is assumed that most of those belong to types that were used once. The result starts at
    the norm above which half of the sum of norms lies, and is refined to the median of the norms
    above 0.3 of it.
    """
    negative = (summary.projection < -4 * noise).nonzero()[:, 0]
    if len(negative) == 0:
        return None
    norms = np.sort(summary.select(negative).denoised_norms(noise).cpu().numpy())
    sums = norms.cumsum()
    use_norm = norms[min(np.searchsorted(sums, sums[-1] / 2), len(norms) - 1)]
    for _ in range(4):
        start = np.searchsorted(norms, 0.3 * use_norm, side="right")
        use_norm = norms[(start + len(norms) - 1) // 2]
    return summary.norms.new_tensor(use_norm)


def estimate_units(summary: RowSummary, expected: ExpectedRows, reference: Tensor) -> _Units | None:
    """Return the units of a gradient; None if no row is negative along ``u``.

    Args:
        summary: The summary of the gradient, or of some of its rows that include the rows of all
            used types.
        expected: The expectations of public text.
        reference: indices of the reference types in ``summary``.
    """
    noise = (summary.select(reference) if len(reference) else summary).noise()
    use_norm = token_norm(summary, noise)
    if use_norm is None:
        return None
    norms = summary.denoised_norms(noise)
    large = (summary.projection < -4 * noise) & (norms > 0.3 * use_norm)  # as in token_norm
    cosine = (-summary.projection[large] / norms[large]).median()
    scale = use_norm * cosine
    weights = expected.weights(summary.projection[reference] / scale, noise / scale)
    return _Units(
        noise=noise,
        use_norm=use_norm,
        cosine=cosine,
        n_used=-summary.projection[large].sum() / scale,
        cluster_weights=weights,
        n_tokens=(weights * expected.share).sum(),
    )


def _signed_log(values: Tensor, unit: float = 1e-3) -> Tensor:
    """Return ``sign(x) log(1 + |x| / unit)``, which resolves both tails and values near zero."""
    return values.sign() * (values.abs() / unit).log1p()


def plausible(summary: RowSummary, units: _Units) -> Tensor:
    """Return (V,) whether a row may belong to a used type: negative along ``u``, or not small.

    Not small is a norm above a tenth of the row of a type used once and above the noise.
    """
    noise, width = units.noise, summary.width
    above = summary.norms.square() - width * noise * noise
    # The squared norm of noise alone in d dimensions has the deviation sqrt(2 d) noise^2.
    floor = torch.maximum((0.1 * units.use_norm) ** 2, 3 * (2 * width) ** 0.5 * noise * noise)
    return (summary.projection < -1.5 * noise) | (above > floor)


def row_features(
    rows: Tensor, summary: RowSummary, units: _Units, directions: Directions, expected: ExpectedRows
) -> Tensor:
    """Return the features of k rows, (k, F).

    Args:
        rows: (k, d) of the shared gradient.
        summary: The summary of these rows.
        units: The units of the whole gradient.
        directions: The directions to project on.
        expected: The expected rows of the same types.
    """
    # ``common`` is the row that label smoothing adds to every row. In units of a type used once, r
    # is a row's norm, s its projection on u (-1 for one use), and ``predicted`` that of an unused
    # type.
    rows = (rows.float() - summary.common) / units.use_norm
    noise = units.noise / units.use_norm
    r = summary.denoised_norms(units.noise) / units.use_norm
    s = summary.projection / (units.use_norm * units.cosine)
    cosine = summary.projection / (units.use_norm * r + 1e-30)
    n = units.n_tokens.clamp(min=1.0)
    predicted = (expected.mass @ units.cluster_weights).clamp(min=1e-12)

    k = len(directions.centres)
    on_centres = (rows @ directions.centres.T).sort(dim=1).values  # the most negative first
    quantiles = [on_centres[:, min(i, k - 1)] for i in (0, 1, 3, 7, k // 2, k - 1)]

    white = rows @ directions.whitening
    inside = (white * directions.deviations).square().sum(1) / (r * r + 1e-30)
    opening = (rows @ directions.opening).square() / (r * r + 1e-30)[:, None]
    template = expected.whitened
    squared = template.square().sum(1) + 1e-30
    multiple = (white * template).sum(1) / squared  # of the template, by least squares
    residual = (white - multiple[:, None] * template).norm(dim=1)
    white_norm = white.norm(dim=1) + 1e-30

    columns = [
        # the row: its projection on u and norm in tokens, its cosine with u, and its share in the
        # principal directions
        _signed_log(s),
        (r + _TINY).log(),
        cosine,
        inside,
        # quantiles of its projections on the centres; the share of negative projections; three of
        # the quantiles over its norm, which are cosines
        *(_signed_log(v) for v in quantiles),
        (on_centres < 0).float().mean(1),
        *(v / (r + _TINY) for v in (quantiles[0], quantiles[2], quantiles[4])),
        # its projection on u, compared with that of an unused type
        (predicted + _TINY).log(),
        _signed_log(predicted - s),
        (s / predicted).clamp(-50, 5),
        # the type's mean probability under the model, and how concentrated it is on few tokens
        (expected.probability * n + 1e-6).log(),
        (expected.energy * n + 1e-8).log(),
        expected.energy / (expected.probability + 1e-30),
        # its fit to the row of an unused type, in the principal directions, and the residual
        multiple * squared.sqrt() / white_norm,
        (residual + _TINY).log(),
        (residual * residual / (expected.energy * n + 1e-6) + 1e-12).log(),
        _signed_log(multiple / n),
        residual / white_norm,
        # how often public text has the type as a label, and as a first token
        (expected.frequency * n + 1e-2).log(),
        (expected.opening * n + 1e-3).log(),
        # its projection in units of the noise, the noise, and the size of the batch
        _signed_log(summary.projection / (units.noise + 1e-30), 1.0),
        (noise + 1e-5).log().expand(len(rows)),
        units.n_used.clamp(min=1.0).log().expand(len(rows)),
        n.log().expand(len(rows)),
    ]
    # The last columns are squared cosines with the directions of first tokens.
    return torch.cat([torch.stack(columns, 1), opening], 1)
