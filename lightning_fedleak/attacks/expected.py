"""What the head's gradient would look like if no word had been used, learned on public text.

A type that is not used still has a row: ``sum_i p_i(t) h_i``, its predicted mass in the direction
of the hidden states that predict it. :class:`ExpectedRows` holds what public text says about these
rows, projected on few directions, and the directions themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.parts import GradientParts

_AT_ONCE = 1024


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
    def of(
        cls, parts: GradientParts, n_centres: int, n_principal: int, generator: torch.Generator
    ) -> Directions:
        """Directions of public text."""
        unit = F.normalize(parts.hidden, dim=1)
        u = separating_direction(unit)
        mean = unit.mean(0)
        spread = (unit - mean).T @ (unit - mean) / len(unit)
        values, vectors = torch.linalg.eigh(spread)
        m = min(n_principal, unit.shape[1], len(unit))
        values, vectors = values.flip(0)[:m].clamp(min=1e-12), vectors.flip(1)[:, :m]
        return cls(
            u=u,
            centres=cluster_centres(unit, n_centres, generator),
            whitening=vectors / values.sqrt(),
            deviations=values.sqrt(),
            opening=_leading(parts.input_grads[parts.input_first], 4),
            scale=(parts.hidden @ u).median(),
            norm=parts.hidden.norm(dim=1).median(),
        )


def separating_direction(states: Tensor, steps: int = 200, rate: float = 0.05) -> Tensor:
    """A unit vector that is positive on as many states as it can be, by as much as it can.

    Starts at the mean direction and moves towards the mean of the 2% of states with the smallest
    projection, which widens the margin.

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
    tried, lowest = [], []
    for _ in range(steps):
        values, rows = (unit @ u).topk(k, largest=False, sorted=False)
        tried.append(u)
        lowest.append(values)
        u = torch.addmv(u, unit.index_select(0, rows).T, move)
        u /= torch.linalg.vector_norm(u)
    return tried[int(torch.stack(lowest).mean(1).argmax())]


def cluster_centres(unit: Tensor, k: int, generator: torch.Generator, rounds: int = 12) -> Tensor:
    """Spherical k-means: (min(k, N), d) unit centres of (N, d) unit vectors."""
    start = torch.randperm(len(unit), generator=generator)[:k].to(unit.device)
    centres = unit[start]
    for _ in range(rounds):
        nearest = (unit @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, unit)
        empty = sums.norm(dim=1, keepdim=True) == 0
        centres = F.normalize(torch.where(empty, centres, sums), dim=1)
    return centres


def _leading(vectors: Tensor, k: int) -> Tensor:
    unit = F.normalize(vectors, dim=1)
    if len(unit) == 0:
        return unit.new_zeros(unit.shape[1], 0)
    leading: Tensor = torch.linalg.svd(unit, full_matrices=False).Vh[:k]
    return leading.T.contiguous()


@dataclass(frozen=True)
class ExpectedRows:
    """Per type, what public text predicts, as means over its tokens. V types.

    Where the model caps its logits, ``p(t)`` stands for the probability times the cap's derivative,
    with which it enters the gradient.

    Attributes:
        mass: (V, C) ``p(t) h . u`` in units of ``scale``, by cluster of the hidden state, so that
            the clusters' weights can be fitted to the text under attack.
        probability: (V,) mean of ``p(t)``.
        energy: (V,) mean of ``p(t)^2``.
        whitened: (V, m) mean of ``p(t) h``, whitened, in units of ``norm``.
        share: (C,) of the whole mass in each cluster.
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
    def of(
        cls,
        parts: GradientParts,
        weight: Tensor,
        bias: Tensor | None,
        directions: Directions,
        clusters: Tensor,
        reference: Tensor | None = None,
    ) -> ExpectedRows:
        """Expectations over all tokens of ``parts``.

        Args:
            parts: of public text.
            weight: (V, d) of the head.
            bias: (V,) or None.
            directions: to project on.
            clusters: (C, d) unit centres that tokens are assigned to.
            reference: types to fit on later; chosen here when missing.
        """
        n, vocab = len(parts.labels), len(weight)
        nearest = (F.normalize(parts.hidden, dim=1) @ clusters.T).argmax(1)
        member = F.one_hot(nearest, len(clusters)).float()
        along = parts.hidden @ directions.u / directions.scale
        white = parts.hidden @ directions.whitening / directions.norm
        target = torch.cat([member * along[:, None], white], 1)
        projected = weight.new_zeros(vocab, target.shape[1])
        probability, energy = weight.new_zeros(vocab), weight.new_zeros(vocab)
        for a in range(0, n, _AT_ONCE):
            logits = F.linear(parts.hidden[a : a + _AT_ONCE], weight, bias)
            logits = parts.logit_map(logits)
            p = (logits - parts.log_partition[a : a + _AT_ONCE, None]).exp_()
            p *= parts.logit_map.steepness(logits)
            projected.addmm_(p.T, target[a : a + _AT_ONCE])
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
    def averaged(cls, one: ExpectedRows, other: ExpectedRows) -> ExpectedRows:
        """Mean of the expectations of two halves of equal size."""
        means = {
            f.name: (getattr(one, f.name) + getattr(other, f.name)) / 2
            for f in fields(cls)
            if f.name != "reference"
        }
        return replace(one, **means)

    def rows(self, types: Tensor) -> ExpectedRows:
        """Only some types; ``reference`` is dropped."""
        return ExpectedRows(
            **{
                f.name: getattr(self, f.name)[types]
                for f in fields(self)
                if f.name not in ("reference", "share")
            },
            share=self.share,
            reference=self.reference[:0],
        )

    def weights(
        self, observed: Tensor, noise: Tensor, prior: float = 1.0, error: float = 0.25
    ) -> Tensor:
        """Factors on the clusters' mass, fitted to a gradient's rows of the reference types.

        First the number of tokens n, then ``observed_t ~ n sum_c x_c mass_tc`` with relative error
        and noise, a prior at ``x_c = 1``, and ``x_c >= 0``. Types far off (used after all) are
        left out.

        Args:
            observed: (R,) rows of the reference types along ``u``, one used token being -1.
            noise: () standard deviation of noise on ``observed``.
            prior: variance of ``x_c``.
            error: variance of the relative error.

        Returns:
            (C,); all zero where no row could be used.
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
        variance = error + (noise / predicted) ** 2
        ratio = observed / predicted
        near = (ratio - 1).abs() < 3.5 * variance.sqrt() + 1.75
        precision = torch.where(near, 1 / variance, 0.0)
        share = mass / expected[:, None]
        k = mass.shape[1]
        gram = share.T @ (share * precision[:, None]) + torch.eye(k, device=mass.device) / prior
        target = share.T @ (ratio * precision) + 1 / prior
        return n * _non_negative(gram, target)


def _amount(observed: Tensor, expected: Tensor, noise: Tensor, rounds: int = 5) -> Tensor:
    """N in ``observed ~ n expected``: the median ratio where noise is small beside the rows."""
    order = expected.argsort(descending=True)
    n = (observed / expected)[order[: max(8, len(order) // 8)]].median().clamp(min=0)
    for _ in range(rounds):
        clear = n * expected > 3 * noise
        if int(clear.sum()) < 8:
            break
        n = (observed / expected)[clear].median().clamp(min=0)
    return n


def _reference(probability: Tensor, used: Tensor, size: int = 4096) -> Tensor:
    """The unused types of largest expected mass, most informative first."""
    hidden = probability.masked_fill(used > 0, -1.0)
    k = min(size, int((hidden > 0).sum()))
    return hidden.topk(k).indices.sort().values


def _non_negative(gram: Tensor, target: Tensor, steps: int = 200) -> Tensor:
    """Minimiser of ``x.Gx/2 - b.x`` over ``x >= 0``, by accelerated projected gradient."""
    rate = 1 / torch.linalg.eigvalsh(gram)[-1]
    x = torch.ones_like(target)
    ahead, momentum = x, 1.0
    for _ in range(steps):
        moved = (ahead - rate * (gram @ ahead - target)).clamp(min=0)
        following = (1 + (1 + 4 * momentum * momentum) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - x)
        x, momentum = moved, following
    return x
