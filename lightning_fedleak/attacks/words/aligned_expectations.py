"""Rows of the head's gradient as public text predicts them, projected on a few directions.

An unused type has a row too: ``sum_i p_i(t) h_i``, its predicted mass in the direction of the
hidden states that predict it. :class:`ExpectedRows` holds what public text predicts for these rows,
projected on a few :class:`Directions`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.words.head_gradients import GradientParts

_TOKENS_AT_ONCE = 1024  # tokens whose probabilities are computed at once, which bounds the memory
_CENTRES = 64  # clusters of hidden states that rows are projected on; not tuned
_PRINCIPAL = 64  # principal directions of the hidden states, for the whitening; not tuned
_ERROR = 0.25  # variance of the relative error of expected rows; not tuned
_OPENING = 4  # directions in which the input gradients of first tokens are read; not tuned


@dataclass(frozen=True)
class Directions:
    """Directions to project gradient rows on, d the hidden dimension.

    Attributes:
        u: (d,) unit; positive on the hidden states of public text.
        centres: (K, d) unit; where hidden states cluster.
        whitening: (d, m); the m leading principal directions of the unit hidden states, each
            divided by its standard deviation.
        deviations: (m,) these standard deviations.
        opening: (d, k) orthonormal; where the input gradients of first tokens lie (k = 0 untied).
        scale: () median of ``h . u``; what one used token puts on ``u``.
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
        """Return the directions of public text."""
        states = parts.states
        unit = F.normalize(states, dim=1)
        u = separating_direction(unit)
        mean = unit.mean(0)
        spread = (unit - mean).T @ (unit - mean) / len(unit)
        values, vectors = torch.linalg.eigh(spread)
        m = min(_PRINCIPAL, unit.shape[1], len(unit))
        first = F.normalize(parts.input_grads[parts.input_first], dim=1)
        values, vectors = values.flip(0)[:m].clamp(min=1e-12), vectors.flip(1)[:, :m]
        return cls(
            u=u,
            centres=cluster_centres(unit, _CENTRES, generator),
            whitening=vectors / values.sqrt(),
            deviations=values.sqrt(),
            opening=torch.linalg.svd(first, full_matrices=False).Vh[:_OPENING].T.contiguous(),
            scale=(states @ u).median(),
            norm=states.norm(dim=1).median(),
        )

    def follow(self, states: Tensor) -> Directions:
        """Return the directions with ``u`` and its units fitted to other hidden states."""
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
    """Means over the tokens of public text, for each of V types.

    If the model caps its logits, ``p(t)`` is the probability times the cap's derivative, as it
    enters the gradient.

    Attributes:
        mass: (V, C) ``p(t) h . u`` in units of ``scale``, by cluster of the hidden state, so that
            the clusters' weights can be fitted to the text under attack.
        probability: (V,) mean of ``p(t)``.
        energy: (V,) mean of ``p(t)^2``.
        whitened: (V, m) mean of ``p(t) h``, whitened, in units of ``norm``.
        share: (C,) of the mass in each cluster.
        frequency: (V,) share of the labels.
        opening: (V,) share of the sentences that it opens.
        reference: (R,) types that public text did not use, to fit clusters' weights on.
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
            parts: of public text.
            weight: (V, d) of the head.
            bias: (V,) or None.
            directions: to project on.
            clusters: (C, d) unit centres that tokens are assigned to.
            reference: types to fit clusters' weights on; chosen if it is None.
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
    def average(cls, one: ExpectedRows, other: ExpectedRows) -> ExpectedRows:
        """Return the mean of the expectations of two halves of equal size."""
        means = {
            f.name: (getattr(one, f.name) + getattr(other, f.name)) / 2
            for f in fields(cls)
            if f.name != "reference"
        }
        return replace(one, **means)

    def rows(self, types: Tensor) -> ExpectedRows:
        """Return the expectations of some types; ``reference`` is empty."""
        columns = {
            f.name: getattr(self, f.name)[types]
            for f in fields(self)
            if f.name not in ("reference", "share")
        }
        return replace(self, **columns, reference=self.reference[:0])

    def weights(self, observed: Tensor, noise: Tensor) -> Tensor:
        """Return factors on the clusters' mass, fitted to a gradient's rows of the reference types.

        The number of tokens n is fitted first, then ``observed_t ~ n sum_c x_c mass_tc`` with
        relative error and noise, a prior at ``x_c = 1`` of variance 1, and ``x_c >= 0``. Outliers,
        which may be used types, are excluded.

        Args:
            observed: (R,) rows of the reference types along ``u``, one used token being -1.
            noise: () standard deviation of noise on ``observed``.

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
    """Return n of ``observed ~ n expected``: the median ratio of the rows far above the noise."""
    order = expected.argsort(descending=True)
    n = (observed / expected)[order[: max(8, len(order) // 8)]].median().clamp(min=0)
    for _ in range(rounds):
        clear = n * expected > 3 * noise
        if int(clear.sum()) < 8:
            break
        n = (observed / expected)[clear].median().clamp(min=0)
    return n


def _reference(probability: Tensor, used: Tensor, size: int = 4096) -> Tensor:
    """Return the unused types of largest expected mass, in ascending order."""
    unused = probability.masked_fill(used > 0, -1.0)
    k = min(size, int((unused > 0).sum()))
    return unused.topk(k).indices.sort().values


def _non_negative(gram: Tensor, target: Tensor, steps: int = 200) -> Tensor:
    """Return the minimum of ``x.Gx/2 - b.x`` over ``x >= 0``, by accelerated projected gradient."""
    rate = 1 / torch.linalg.eigvalsh(gram)[-1]
    x = torch.ones_like(target)
    ahead, momentum = x, 1.0
    for _ in range(steps):
        x_next = (ahead - rate * (gram @ ahead - target)).clamp(min=0)
        momentum_next = (1 + (1 + 4 * momentum * momentum) ** 0.5) / 2
        ahead = x_next + (momentum - 1) / momentum_next * (x_next - x)
        x, momentum = x_next, momentum_next
    return x
