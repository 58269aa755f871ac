"""Lemma 2 for embeddings at hand, and whether it says anything about them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from benchmarks.papers.lemma import (
    CONFIDENCE,
    Estimate,
    Floats,
    advantage_bound,
    check_arguments,
    condition,
    direction_probability,
    projection_radius,
    retrieval_error,
    smallest_beta,
)
from lightning_fedleak.metrics.rates import Rate, proportion

_EACH = 1 - (1 - CONFIDENCE) / 2
"""Of the two intervals that are joined to one."""


@dataclass(frozen=True)
class DataBound:
    """Lemma 2 for given embeddings.

    Attributes:
        sentences, tokens, dim: n, l_X (of the longest sentence) and d_X.
        n_batch, beta: as given.
        separation: Delta, the smallest of all sentences.
        separated: share of the sentences with a positive separation of their own.
        max_norm: M.
        condition: right side of (4); Delta must not be below.
        smallest_beta: from which beta on (4) holds and can say something; infinite for Delta <= 0.
        delta_bar: Delta-bar, infinite where it overflows.
        radius: 1 / (beta l_X M), the argument of ``P_proj``.
        p_proj: over pairs of tokens of different sentences.
        p_box: over tokens, around their mean.
        bound: (5), not clipped; its interval joins those of ``p_proj`` and ``p_box``, for Delta and
            M as they are in these sentences.
        random_direction: (5) with u uniform on the sphere, as Algorithm 1 draws it; a value only.
        reasons: why the bound says nothing; empty where it says something.
    """

    sentences: int
    tokens: int
    dim: int
    n_batch: int
    beta: float
    separation: float
    separated: Rate
    max_norm: float
    condition: float
    smallest_beta: float
    delta_bar: float
    radius: float
    p_proj: Estimate
    p_box: Estimate
    bound: Estimate
    random_direction: float
    reasons: tuple[str, ...]

    @property
    def vacuous(self) -> bool:
        """The lemma proves nothing about these embeddings. That is no sign of safety."""
        return bool(self.reasons)

    def __str__(self) -> str:
        head = (
            f"Lemma 2 at beta {self.beta:.4g}, {self.n_batch} sentences of {self.tokens} tokens: "
        )
        if not self.vacuous:
            return head + (
                f"the attention adversary has an advantage of at least {self.bound.value:.3f} "
                f"({self.bound.low:.3f} to {self.bound.high:.3f})"
            )
        return head + "vacuous, which is no sign of safety. " + " ".join(self.reasons)


def separation(hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """Definition 2: each sentence's ``min_i (<x_i, x_i> - max_{j != i} <x_i, x_j>)``.

    Args:
        hidden: (n, L, d).
        mask: (n, L), 0 where padded, or None.

    Returns:
        (n,) float64; infinite for a sentence of one token.
    """
    real = _real(hidden, mask)
    return torch.stack(
        [_separation_of(x[keep].double()) for x, keep in zip(hidden, real, strict=True)]
    )


def advantage_bound_of(
    hidden: Tensor,
    beta: float,
    n_batch: int,
    mask: Tensor | None = None,
    *,
    max_sentences: int = 100,
) -> DataBound:
    """Lemma 2 for embeddings at hand, and plainly whether it says anything about them.

    Delta and M are the extremes over all sentences given. ``P_proj`` is over all ordered pairs of
    tokens from different sentences, ``P_box`` over all tokens around their common mean. Intervals
    count sentences, not tokens, as independent: by jackknife for ``P_proj``, from the sentences'
    means for ``P_box``, and Clopper-Pearson's for one pair of sentences each (one sentence each)
    where all say the same. Sentences of unequal length count as the longest. The tokens of a real
    sentence are not independent, which the lemma assumes.

    Args:
        hidden: (n, L, d) hidden states of n >= 2 sentences at the layer in question.
        beta: what multiplies the products of hidden states: Algorithm 1's over ``sqrt(d - 1)``.
        n_batch: sentences in the client's batch.
        mask: (n, L), 0 where padded, or None.
        max_sentences: ``P_proj`` takes no more than these, evenly spread, as its cost is quadratic.

    Raises:
        ValueError: wrong shapes, hidden states that are not finite or all 0, a sentence of fewer
            than 2 tokens, or a number out of its range.
    """
    check_arguments(beta=beta, n_batch=n_batch)
    if hidden.dim() != 3 or len(hidden) < 2 or not hidden.is_floating_point():
        raise ValueError(
            "hidden must be floating-point hidden states (n, L, d) of n >= 2 sentences, got "
            f"{hidden.dtype} of shape {tuple(hidden.shape)}"
        )
    if max_sentences < 2:
        raise ValueError(f"max_sentences must be at least 2, got {max_sentences}")
    real = _real(hidden, mask)
    lengths = real.sum(1)
    if int(lengths.min()) < 2:
        at = int(lengths.argmin())
        raise ValueError(f"sentence {at} has fewer than 2 tokens: leave it out")
    if not bool(hidden[real].isfinite().all()):
        raise ValueError("hidden holds values that are not finite")
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    n, _, d = hidden.shape
    tokens = int(lengths.max())
    separations = separation(hidden, real)
    delta = float(separations.min())
    flat = hidden[real].double()
    norms = flat.norm(dim=1)
    norm = float(norms.max())
    if norm == 0:
        raise ValueError("hidden is 0 everywhere")
    needed = float(condition(beta, tokens, norm))
    error = float(retrieval_error(beta, tokens, delta, norm))
    radius = float(projection_radius(beta, tokens, norm))

    places = torch.linspace(0, n - 1, min(n, max_sentences), dtype=torch.float64).round().long()
    sentences = [hidden[i][real[i]] for i in places.tolist()]
    p_proj, p_both = _pair_probabilities(sentences, radius)
    inside = ((flat - flat.mean(0)).abs().amax(1) <= 3 * error).double()
    p_box = _mean_over_sentences(inside, lengths)
    p_direction = float(direction_probability(d, radius, norms.cpu().numpy()).mean())

    value = float(advantage_bound(p_proj.value, p_box.value, tokens, n_batch))
    low = float(advantage_bound(p_proj.low, p_box.high, tokens, n_batch))
    high = float(advantage_bound(p_proj.high, p_box.low, tokens, n_batch))
    least = smallest_beta(delta, tokens, norm)
    positive = int((separations > 0).sum())
    return DataBound(
        sentences=n,
        tokens=tokens,
        dim=d,
        n_batch=n_batch,
        beta=beta,
        separation=delta,
        separated=proportion(positive, n, CONFIDENCE),
        max_norm=norm,
        condition=needed,
        smallest_beta=least,
        delta_bar=error,
        radius=radius,
        p_proj=p_proj,
        p_box=p_box,
        bound=Estimate(value, math.nan, low, high),
        random_direction=p_direction + p_both ** (n_batch * tokens) - p_box.value - 1,
        reasons=_reasons(delta, n - positive, n, needed, beta, least, value),
    )


def _reasons(
    delta: float, overlapping: int, n: int, needed: float, beta: float, least: float, bound: float
) -> tuple[str, ...]:
    found = []
    if delta <= 0:
        found.append(
            f"The separation Delta is {delta:.4g}: in {overlapping} of {n} sentences some token's "
            "product with another token is not below that with itself. Then 3 Delta-bar is at "
            "least 6 M, every token lies in the box, and the bound is at most 0 for every beta."
        )
    if delta < needed:
        rest = "no larger beta helps" if math.isinf(least) else f"it holds from beta {least:.4g} on"
        found.append(
            f"Condition (4) is violated: it asks for a separation of at least {needed:.4g}, and "
            f"there is {delta:.4g}; {rest}."
        )
    elif beta < least and delta > 0:
        found.append(
            f"Condition (4) holds only because beta is tiny; beta {least:.4g} and more is meant."
        )
    if bound <= 0:
        found.append(f"Eq. 5 gives {bound:.4g}: an advantage of 0 needs no attack at all.")
    return tuple(found)


def _separation_of(x: Tensor) -> Tensor:
    if len(x) < 2:
        return x.new_tensor(math.inf)
    products = x @ x.T
    own = products.diagonal().clone()
    return (own - products.fill_diagonal_(-math.inf).amax(1)).amin()


def _pair_probabilities(sentences: list[Tensor], radius: float) -> tuple[Estimate, float]:
    """``P_proj`` and P(both heads leave out little), over pairs from different sentences.

    ``hits[s, t]`` counts pairs of x in s, v in t with |<x, v>| <= radius |v|.
    """
    k = len(sentences)
    sizes = np.array([len(s) for s in sentences], dtype=np.float64)
    everything = torch.cat(sentences)
    limit = radius * everything.norm(dim=1)
    owner = torch.repeat_interleave(
        torch.arange(k, device=everything.device),
        torch.tensor([len(s) for s in sentences], device=everything.device),
    )
    hits, both = np.zeros((k, k)), np.zeros((k, k))
    for s, x in enumerate(sentences):
        within = ((x @ everything.T).abs() <= limit).double()
        p_direction = direction_probability(
            x.shape[1], radius, x.double().norm(dim=1).cpu().numpy()
        )
        weights = torch.stack(
            [torch.ones(len(x), dtype=torch.float64), torch.from_numpy(p_direction)]
        ).to(within.device)
        sums = within.new_zeros((2, k)).index_add_(1, owner, weights @ within)
        hits[s], both[s] = sums.cpu().numpy()
    pairs = np.outer(sizes, sizes)
    for counts in (hits, both, pairs):
        np.fill_diagonal(counts, 0.0)
    value = float(hits.sum() / pairs.sum())
    return _jackknife(hits, pairs, value), float(both.sum() / pairs.sum())


def _jackknife(hits: Floats, pairs: Floats, value: float) -> Estimate:
    """Leaves out one sentence at a time."""
    k = len(hits)
    if value in (0.0, 1.0) or k < 3:
        return _counted(value, k // 2)
    rest_hits = hits.sum() - hits.sum(0) - hits.sum(1)
    rest_pairs = pairs.sum() - pairs.sum(0) - pairs.sum(1)
    replicas = rest_hits / rest_pairs
    error = math.sqrt((k - 1) / k * float(((replicas - replicas.mean()) ** 2).sum()))
    return _within_unit(value, error, k - 1)


def _mean_over_sentences(inside: Tensor, lengths: Tensor) -> Estimate:
    """Share of tokens, a ratio of sums over sentences, with the error of such a ratio."""
    sizes = lengths.double().cpu().numpy()
    starts = (lengths.cumsum(0) - lengths).cpu().numpy()
    hits = np.add.reduceat(inside.cpu().numpy(), starts)
    value = float(hits.sum() / sizes.sum())
    k = len(hits)
    if value in (0.0, 1.0):
        return _counted(value, k)
    residual = hits - value * sizes
    error = math.sqrt(k / (k - 1) * float((residual**2).sum())) / float(sizes.sum())
    return _within_unit(value, error, k - 1)


def _counted(value: float, trials: int) -> Estimate:
    """Interval for a share of 0 or 1, which has no spread, or of too few sentences to have one."""
    if value in (0.0, 1.0):
        rate = proportion(int(value) * trials, trials, _EACH)
        return Estimate(value, math.nan, rate.low, rate.high)
    return Estimate(value, math.nan, 0.0, 1.0)


def _within_unit(value: float, error: float, freedom: int) -> Estimate:
    reach = float(stdtrit(freedom, 1 - (1 - _EACH) / 2)) * error
    return Estimate(value, error, max(0.0, value - reach), min(1.0, value + reach))


def _real(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"mask must be {tuple(hidden.shape[:2])} like hidden, got {tuple(mask.shape)}"
        )
    return mask.to(hidden.device) != 0
