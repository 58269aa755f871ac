"""Features of the rows of the head's gradient, by which a classifier recognises used types.

An unused type has a row too: ``sum_i p_i(t) h_i``, where ``p_i(t)`` is the probability that the
model gives type t at token i, and ``h_i`` is the hidden state. So each row is compared with the row
that public text predicts for an unused type. :class:`Directions` are fitted to public hidden
states; :class:`ExpectedRows` holds the predicted rows, projected on them. :func:`estimate_units`
estimates the scale of a gradient, the row of a type that was used once, so that no feature depends
on it. :func:`row_features` computes the features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.words.head_gradients import GradientParts
from lightning_fedleak.attacks.words.row_summary import RowSummary

_TOKENS_AT_ONCE = 1024  # tokens whose probabilities are computed at once, which bounds the memory
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
            first tokens (k = 0 if head and embedding are not tied).
        scale: () median of ``h . u``, the projection of one used token on ``u``.
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
        states = parts.states
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
    ) -> ExpectedRows:
        """Return the expectations over all tokens of ``parts``.

        Args:
            parts: The hidden states and gradients of public text.
            weight: (V, d), the head's weight.
            bias: (V,), the head's bias, or None.
            directions: The directions to project on.
            clusters: (C, d) unit centres that tokens are assigned to.
            reference: types that clusters' weights are fitted to; chosen if it is None.
        """
        n, vocab = len(parts.labels), len(weight)
        states = parts.states
        nearest = (F.normalize(states, dim=1) @ clusters.T).argmax(1)
        member = F.one_hot(nearest, len(clusters)).float()
        projection = states @ directions.u / directions.scale
        white = states @ directions.whitening / directions.norm
        target = torch.cat([member * projection[:, None], white], 1)
        projected = weight.new_zeros(vocab, target.shape[1])
        probability, energy = weight.new_zeros(vocab), weight.new_zeros(vocab)
        for a in range(0, n, _TOKENS_AT_ONCE):
            logits = F.linear(parts.hidden[a : a + _TOKENS_AT_ONCE], weight, bias)
            logits = parts.logit_map(logits)
            p = (logits - parts.log_partition[a : a + _TOKENS_AT_ONCE, None]).exp_()
            p *= parts.logit_map.steepness(logits)
            projected.addmm_(p.T, target[a : a + _TOKENS_AT_ONCE])
            probability += p.sum(0)
            energy += p.square_().sum(0)
        frequency = torch.bincount(parts.labels, minlength=vocab).float() / n
        opens = parts.input_ids[parts.input_first]
        opening = torch.bincount(opens, minlength=vocab).float() / max(1, parts.n_sentences)
        if reference is None:
            reference = _reference(probability, frequency + opening)
        c = len(clusters)
        return cls(
            mass=projected[:, :c] / n,
            probability=probability / n,
            energy=energy / n,
            whitened=projected[:, c:] / n,
            share=projected[:, :c].sum(0) / projected[:, :c].sum(),
            frequency=frequency,
            opening=opening,
            reference=reference,
        )

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
        weights are ``n x_c``. Outliers, which may be used types, are excluded.

        Args:
            observed: (R,) projections of the reference types' rows on ``u``, in units in which one
                used token gives -1.
            noise: () standard deviation of the noise on ``observed``.

        Returns:
            (C,); all zero if fewer than 8 rows are usable.
        """
        mass = self.mass[self.reference]
        expected = mass.sum(1)
        usable = (observed > -4 * noise) & (expected > 0)
        if int(usable.sum()) < 8:
            return mass.new_zeros(mass.shape[1])
        mass, expected, observed = mass[usable], expected[usable], observed[usable]
        n = _amount(observed, expected, noise)
        if not bool(n > 0):
            return mass.new_zeros(mass.shape[1])
        predicted = n * expected
        variance = _ERROR + (noise / predicted) ** 2
        ratio = observed / predicted
        near = (ratio - 1).abs() < 3.5 * variance.sqrt() + 1.75
        precision = torch.where(near, 1 / variance, 0.0)
        share = mass / expected[:, None]
        k = mass.shape[1]
        gram = share.T @ (share * precision[:, None]) + torch.eye(k, device=mass.device)
        target = share.T @ (ratio * precision) + 1
        return n * _non_negative(gram, target)


def _amount(observed: Tensor, expected: Tensor, noise: Tensor, rounds: int = 5) -> Tensor:
    """Return n of ``observed ~ n expected``: the median ratio over the rows far above the noise."""
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
        token: () norm of the row of a type that was used once.
        cosine: () median cosine between ``u`` and the hidden states of used tokens.
        tokens: () number of used tokens in the large rows that are negative along ``u``, less the
            model's predictions of their types.
        clusters: (C,) weights of the clusters in this gradient, from :meth:`ExpectedRows.weights`.
        n_tokens: () estimate of the number of tokens in the batch.
    """

    noise: Tensor
    token: Tensor
    cosine: Tensor
    tokens: Tensor
    clusters: Tensor
    n_tokens: Tensor


def token_norm(summary: RowSummary, noise: Tensor) -> Tensor | None:
    """Return the norm () of the row of a type that was used once; None if no row is negative.

    It starts at the norm above which half of the sum of norms lies, and is refined to the median of
    the norms above 0.3 of it.
    """
    negative = (summary.projection < -4 * noise).nonzero()[:, 0]
    if len(negative) == 0:
        return None
    norms = np.sort(summary.select(negative).denoised_norms(noise).cpu().numpy())
    sums = norms.cumsum()
    token = norms[min(np.searchsorted(sums, sums[-1] / 2), len(norms) - 1)]
    for _ in range(4):
        start = np.searchsorted(norms, 0.3 * token, side="right")
        token = norms[(start + len(norms) - 1) // 2]
    return summary.norms.new_tensor(token)


def estimate_units(summary: RowSummary, expected: ExpectedRows, reference: Tensor) -> _Units | None:
    """Return the units of a gradient; None if no row is negative along ``u``.

    Args:
        summary: The summary of the gradient, or of some of its rows, with those of all used types.
        expected: The expectations of public text.
        reference: indices of the reference types in ``summary``.
    """
    noise = (summary.select(reference) if len(reference) else summary).noise()
    token = token_norm(summary, noise)
    if token is None:
        return None
    norms = summary.denoised_norms(noise)
    large = (summary.projection < -4 * noise) & (norms > 0.3 * token)
    cosine = (-summary.projection[large] / norms[large]).median()
    scale = token * cosine
    clusters = expected.weights(summary.projection[reference] / scale, noise / scale)
    return _Units(
        noise=noise,
        token=token,
        cosine=cosine,
        tokens=-summary.projection[large].sum() / scale,
        clusters=clusters,
        n_tokens=(clusters * expected.share).sum(),
    )


def _signed_log(values: Tensor, unit: float = 1e-3) -> Tensor:
    """Return ``sign(x) log(1 + |x| / unit)``, which resolves both tails and values near zero."""
    return values.sign() * (values.abs() / unit).log1p()


def plausible(summary: RowSummary, units: _Units) -> Tensor:
    """Return (V,) whether a row may belong to a used type: negative along ``u``, or not small."""
    noise, width = units.noise, summary.width
    above = summary.norms.square() - width * noise * noise
    floor = torch.maximum((0.1 * units.token) ** 2, 3 * (2 * width) ** 0.5 * noise * noise)
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
    rows = (rows.float() - summary.common) / units.token
    noise = units.noise / units.token
    r = summary.denoised_norms(units.noise) / units.token
    s = summary.projection / (units.token * units.cosine)
    cosine = summary.projection / (units.token * r + 1e-30)
    n = units.n_tokens.clamp(min=1.0)
    predicted = (expected.mass @ units.clusters).clamp(min=1e-12)

    k = len(directions.centres)
    near = (rows @ directions.centres.T).sort(dim=1).values
    ranks = [near[:, min(i, k - 1)] for i in (0, 1, 3, 7, k // 2, k - 1)]

    white = rows @ directions.whitening
    inside = (white * directions.deviations).square().sum(1) / (r * r + 1e-30)
    opening = (rows @ directions.opening).square() / (r * r + 1e-30)[:, None]
    template = expected.whitened
    squared = template.square().sum(1) + 1e-30
    amount = (white * template).sum(1) / squared
    residual = (white - amount[:, None] * template).norm(dim=1)
    white_norm = white.norm(dim=1) + 1e-30

    columns = [
        # the row: its projection on u and norm in tokens, its cosine with u, and its share in the
        # principal directions
        _signed_log(s),
        (r + _TINY).log(),
        cosine,
        inside,
        # its projections on the centres, some of them in order; the share of negative ones
        *(_signed_log(v) for v in ranks),
        (near < 0).float().mean(1),
        *(v / (r + _TINY) for v in (ranks[0], ranks[2], ranks[4])),
        # its projection on u, compared with that of an unused type
        (predicted + _TINY).log(),
        _signed_log(predicted - s),
        (s / predicted).clamp(-50, 5),
        # the type's mean probability under the model, and how concentrated it is on few tokens
        (expected.probability * n + 1e-6).log(),
        (expected.energy * n + 1e-8).log(),
        expected.energy / (expected.probability + 1e-30),
        # its fit to the row of an unused type, in the principal directions, and the residual
        amount * squared.sqrt() / white_norm,
        (residual + _TINY).log(),
        (residual * residual / (expected.energy * n + 1e-6) + 1e-12).log(),
        _signed_log(amount / n),
        residual / white_norm,
        # how often public text has the type as a label, and as a first token
        (expected.frequency * n + 1e-2).log(),
        (expected.opening * n + 1e-3).log(),
        # the noise, and the size of the batch
        _signed_log(summary.projection / (units.noise + 1e-30), 1.0),
        (noise + 1e-5).log().expand(len(rows)),
        units.tokens.clamp(min=1.0).log().expand(len(rows)),
        n.log().expand(len(rows)),
    ]
    return torch.cat([torch.stack(columns, 1), opening], 1)
