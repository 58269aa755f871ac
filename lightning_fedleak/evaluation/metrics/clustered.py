"""Rates and an AUC of games that come in clusters, with intervals.

Games of one step share the model, the batch and the noise, so they are not independent trials.
Every interval in this module treats the *clusters* (steps, clients) as independent, not the games.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import rel_entr, stdtr, stdtrit
from torch import Tensor

from lightning_fedleak.evaluation.metrics.rates import Rate, clopper_pearson

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEW_CLUSTERS = 5  # with wrong games, below which an interval's end is capped; not tuned
NUMBERS_AT_ONCE = 1 << 21  # in an array of the bootstrap (16 MiB); more: more memory, same draws


def columns(scores: Tensor, members: Tensor) -> tuple[Floats, Bools]:
    """Return scores and bits as flat arrays.

    Raises:
        ValueError: lengths differ.
    """
    score: Floats = scores.detach().reshape(-1).cpu().double().numpy()
    member: Bools = members.detach().reshape(-1).bool().cpu().numpy()
    check_length("members", member.size, score.size)
    return score, member


def check_length(name: str, length: int, n: int) -> None:
    """Raise ``ValueError`` unless a column has a value for each of n scores."""
    if length != n:
        raise ValueError(f"{name} holds {length} games, scores {n}: give one value for each game")


def share_rate(hits: Bools, population: Bools, code: Ints, alpha: float) -> Rate:
    """Return the share of the games ``population`` that are ``hits``, with its interval."""
    trials = int(population.sum())
    value = float(hits[population].mean())
    influence = (hits[population] - value) / trials
    code = code[population]
    k = np.unique(code).size
    low, high = _interval(value, influence, code, trials, alpha)
    best = (alpha / 2) ** (1 / k)
    return _capped_rate(value, low, high, best, code[~hits[population]], code[hits[population]])


def advantage_rate(right: Bools, member: Bools, code: Ints, alpha: float) -> Rate:
    """Return TPR + TNR - 1 with its interval: that of their mean p, mapped by 2 p - 1."""
    sides = [member, ~member]
    means = [float(right[side].mean()) for side in sides]
    value = sum(means) / 2
    influence = np.zeros(right.size)
    for side, rate in zip(sides, means, strict=True):
        influence[side] = (right[side] - rate) / (2 * side.sum())
    trials = 4 / sum(1 / side.sum() for side in sides)
    low, high = _interval(value, influence, code, trials, alpha)
    # Either all games of a cluster have one outcome, or only those of one side.
    a, k = alpha / 2, np.unique(code).size
    one_side = min((1 + a ** (1 / np.unique(code[side]).size)) / 2 for side in sides)
    best = min(a ** (1 / k), one_side)
    mean = _capped_rate(value, low, high, best, code[~right], code[right])
    return Rate(*(2 * p - 1 for p in (mean.value, mean.low, mean.high)))


def effective_trials(
    value: float, influence: Floats, code: Ints, trials: float, alpha: float
) -> float:
    """Return how many independent trials would determine the rate as well as these clusters do.

    Args:
        value: the rate.
        influence: (n,) what each game adds to the rate's error; sums to 0.
        code: (n,) clusters.
        trials: games; the result is never larger.
        alpha: of the interval, for Student's correction.
    """
    sums = np.bincount(code, influence)
    k = np.unique(code).size
    if k == 1:
        return 0.0
    variance = k / (k - 1) * float((sums**2).sum())
    plain = value * (1 - value) / max(trials - 1, 1)
    effective = trials if plain == 0 or variance <= plain else trials * plain / variance
    correction = stdtrit(max(trials - 1, 1), 1 - alpha / 2) / stdtrit(k - 1, 1 - alpha / 2)
    return effective * min(1.0, float(correction)) ** 2


def _interval(
    value: float, influence: Floats, code: Ints, trials: float, alpha: float
) -> tuple[float, float]:
    """Return both ends of Clopper-Pearson's interval on the effective number of trials."""
    trials = effective_trials(value, influence, code, trials, alpha)
    return clopper_pearson(value * trials, (1 - value) * trials, alpha)


def _capped_rate(
    value: float, low: float, high: float, best: float, wrong: Ints, right: Ints
) -> Rate:
    """Return the rate with its interval capped at ``best`` where few clusters have ``wrong``
    (``right``) games.
    """
    low = min(low, best) if np.unique(wrong).size < FEW_CLUSTERS else low
    high = max(high, 1 - best) if np.unique(right).size < FEW_CLUSTERS else high
    return rate_with_value(value, low, high)


def rate_with_value(value: float, low: float, high: float) -> Rate:
    """Return a rate whose interval is widened to hold its value."""
    return Rate(value, min(low, value), max(high, value))


# ---- AUC ------------------------------------------------------------------------------------


def auc(
    score: Floats, member: Bools, code: Ints, alpha: float, resamples: int, rng: np.random.Generator
) -> Rate:
    """Return Mann-Whitney's estimate, with an interval from a bootstrap that draws clusters.

    Where each game is its own cluster nothing is drawn: the variance is that of the games' shares
    of the error (DeLong 1988). There the interval is no wider than Hoeffding's: a variance says
    next to nothing where a few games decide, such as the one member that ranks low among all.
    """
    order = np.argsort(score, kind="stable")
    score, member, code = score[order], member[order], code[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    value = float(_weighted_auc(np.ones((1, member.size)), member, starts)[0])

    clusters = int(code.max()) + 1
    by_game = np.unique(code).size == member.size
    low, high = value, value
    if 0 < value < 1:
        influence = _influence(member, starts, value)
        sums: Floats = np.bincount(code, influence).astype(np.float64)
        if by_game:
            error = math.sqrt(_delong_variance(influence, member))
        else:
            draws = _bootstrap_aucs(member, code, starts, clusters, resamples, rng)
            error = float(np.nanstd(draws, ddof=1))
        freedom = _freedom(sums)
        step = -float(stdtrit(freedom, alpha / 2)) * error / (value * (1 - value))
        logit = np.log(value) - np.log1p(-value)
        low, high = (float(1 / (1 + np.exp(-(logit + sign * step)))) for sign in (-1, 1))
    pairs = min(np.unique(code[member]).size, np.unique(code[~member]).size, clusters // 2)
    best = (alpha / 2) ** (1 / pairs) if pairs else 0.0
    wrong, right = (_decisive_clusters(sign * score, member, code) for sign in (1, -1))
    rate = _capped_rate(value, low, high, best, wrong, right)
    if not by_game:
        return rate
    n = min(int(member.sum()), int((~member).sum()))
    low, below = (_least_mean(one, n, alpha / 2) for one in (value, 1 - value))
    return Rate(value, max(rate.low, low), min(rate.high, 1 - below))


def least_error(score: Floats, member: Bools, mean: float = 0.5) -> float:
    """Return the least alpha at which :func:`auc`'s interval lies above ``mean``, at most 1.

    Each game is its own cluster.

    Args:
        score: (n,) higher is more likely a member.
        member: (n,) bool, with both classes.
        mean: an AUC within (0, 1).
    """
    order = np.argsort(score, kind="stable")
    score, member = score[order], member[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    value = float(_weighted_auc(np.ones((1, member.size)), member, starts)[0])
    if value <= mean:
        return 1.0
    n = min(int(member.sum()), int((~member).sum()))
    tail = 0.0
    if value < 1:
        influence = _influence(member, starts, value)
        error = math.sqrt(_delong_variance(influence, member)) / (value * (1 - value))
        apart = math.log(value * (1 - mean) / (mean * (1 - value)))
        tail = float(stdtr(_freedom(influence), -apart / error))
    if _decisive_clusters(score, member, np.arange(member.size)).size < FEW_CLUSTERS:
        tail = max(tail, mean**n)
    hoeffding = math.exp(-n * float(rel_entr(value, mean) + rel_entr(1 - value, 1 - mean)))
    return min(1.0, 2 * min(tail, hoeffding))


def _least_mean(value: float, n: int, alpha: float) -> float:
    """Return the least mean of a U statistic under which so high a value is not rarer than alpha.

    ``P(U >= u) <= exp(-n kl(u, mean))`` for a kernel within [0, 1] and n disjoint pairs (Hoeffding
    1963, section 5).
    """

    def excess(mean: float) -> float:
        return float(rel_entr(value, mean) + rel_entr(1 - value, 1 - mean)) + math.log(alpha) / n

    least = 1e-9
    return 0.0 if value <= least or excess(least) <= 0 else float(brentq(excess, least, value))


def _influence(member: Bools, starts: Ints, value: float) -> Floats:
    """Return (n,) what each game adds to the AUC's error: its share of pairs in the right order."""
    members, non_members = np.add.reduceat(
        np.stack([member, ~member]).astype(float), starts, axis=1
    )
    sizes = np.diff(np.append(starts, member.size))
    below = np.repeat(np.cumsum(non_members) - non_members / 2, sizes)
    above = np.repeat(members.sum() - np.cumsum(members) + members / 2, sizes)
    pairs = members.sum() * non_members.sum()
    influence: Floats = np.where(member, below, above) / pairs
    influence -= np.where(member, value / members.sum(), value / non_members.sum())
    return influence


def _delong_variance(influence: Floats, member: Bools) -> float:
    """Return DeLong's variance of the AUC; of one member (non-member) alone Van Dantzig's bound."""
    total = 0.0
    for side in (member, ~member):
        n = int(side.sum())
        total += n / (n - 1) * float((influence[side] ** 2).sum()) if n > 1 else 0.25
    return total


def _freedom(sums: Floats) -> float:
    """Return the degrees of freedom, 1 to k - 1, of a variance from k clusters, estimated from
    their kurtosis.

    k normal contributions give k - 1. Where few clusters carry most of the error, the variance is
    estimated as badly as from few clusters.
    """
    if not sums.any():
        return max(1.0, sums.size - 1.0)
    kurtosis = sums.size * float((sums**4).sum()) / float((sums**2).sum()) ** 2
    return min(sums.size - 1.0, max(1.0, 2 * sums.size / max(kurtosis - 1, 1e-9)))


def _decisive_clusters(score: Floats, member: Bools, code: Ints) -> Ints:
    """Return the clusters without whose games every member would score above every non-member."""
    members = code[member & (score <= score[~member].max())]
    non_members = code[~member & (score >= score[member].min())]
    return min(np.unique(members), np.unique(non_members), key=len)


def _bootstrap_aucs(
    member: Bools, code: Ints, starts: Ints, clusters: int, resamples: int, rng: np.random.Generator
) -> Floats:
    """Return (resamples,) AUCs of as many draws of clusters, with replacement.

    Few clusters are drawn as whole blocks of pairs (faster), many as weights of their games.
    """
    few = member.size * clusters <= NUMBERS_AT_ONCE
    blocks = _blocks(member, code, starts, clusters) if few else None
    sizes = [np.bincount(code[side], minlength=clusters) for side in (member, ~member)]
    rows = max(1, NUMBERS_AT_ONCE // member.size)
    draws: list[Floats] = []
    for first in range(0, resamples, rows):
        b = min(rows, resamples - first)
        picks = rng.integers(clusters, size=(b, clusters)) + clusters * np.arange(b)[:, None]
        counts = np.bincount(picks.ravel(), minlength=b * clusters)
        times = counts.reshape(b, clusters).astype(float)
        if blocks is None:
            draws.append(_weighted_auc(times[:, code], member, starts))
            continue
        wins = ((times @ blocks) * times).sum(1)
        draws.append(_ratio(wins, (times @ sizes[0]) * (times @ sizes[1])))
    return np.concatenate(draws)


def _blocks(member: Bools, code: Ints, starts: Ints, clusters: int) -> Floats:
    """Return (C, C): at [a, b] the rightly ordered pairs of a member of a and a non-member of b."""
    non_members_before = np.zeros((member.size + 1, clusters))
    non_members = np.flatnonzero(~member)
    non_members_before[non_members + 1, code[non_members]] = 1
    non_members_before = np.cumsum(non_members_before, axis=0)
    members = np.flatnonzero(member)
    members = members[np.argsort(code[members], kind="stable")]
    tied = np.searchsorted(starts, members, "right") - 1
    ends = np.append(starts[1:], member.size)
    below = (non_members_before[starts[tied]] + non_members_before[ends[tied]]) / 2
    present, first = np.unique(code[members], return_index=True)
    blocks = np.zeros((clusters, clusters))
    blocks[present] = np.add.reduceat(below, first, axis=0)
    return blocks


def _weighted_auc(weights: Floats, member: Bools, starts: Ints) -> Floats:
    """Return (b,) AUCs of games counted ``weights`` (b, n) times; NaN without both classes.

    The games are in the order of their scores; ``starts`` are where a new score begins.
    """
    members = np.add.reduceat(weights * member, starts, axis=1)
    non_members = np.add.reduceat(weights * ~member, starts, axis=1)
    below = np.cumsum(non_members, axis=1) - non_members / 2
    return _ratio((members * below).sum(1), members.sum(1) * non_members.sum(1))


def _ratio(wins: Floats, pairs: Floats) -> Floats:
    """Return ``wins / pairs``, NaN where there are no pairs."""
    shares: Floats = np.full_like(wins, np.nan)
    np.divide(wins, pairs, out=shares, where=pairs > 0)
    return shares
