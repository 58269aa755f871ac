"""Rates and an AUC of games that come in clusters, with intervals.

Games of one step share the model, the batch and the noise, so that they are no independent
trials. Every interval here treats the *clusters* (steps, clients) as independent, not the games.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtrit

from lightning_fedleak.metrics.rates import Rate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEW = 5
CHUNK = 1 << 21


def share(hit: Bools, among: Bools, code: Ints, alpha: float) -> Rate:
    """Share of the games ``among`` that are a ``hit``."""
    trials = int(among.sum())
    value = float(hit[among].mean())
    influence = (hit[among] - value) / trials
    code = code[among]
    k = np.unique(code).size
    low, high = _clopper_pearson(value, effective(value, influence, code, trials, alpha), alpha)
    best = (alpha / 2) ** (1 / k)
    return _capped(value, low, high, best, code[~hit[among]], code[hit[among]])


def advantage(right: Bools, member: Bools, code: Ints, alpha: float) -> Rate:
    """TPR + TNR - 1, by way of their mean p, for which 2 p - 1 is the advantage."""
    sides = [member, ~member]
    means = [float(right[side].mean()) for side in sides]
    value = sum(means) / 2
    influence = np.zeros(right.size)
    for side, rate in zip(sides, means, strict=True):
        influence[side] = (right[side] - rate) / (2 * side.sum())
    trials = 4 / sum(1 / side.sum() for side in sides)
    low, high = _clopper_pearson(value, effective(value, influence, code, trials, alpha), alpha)
    # Either all games of a cluster fall together, or those of one side alone.
    a, k = alpha / 2, np.unique(code).size
    one_side = min((1 + a ** (1 / np.unique(code[side]).size)) / 2 for side in sides)
    best = min(a ** (1 / k), one_side)
    mean = _capped(value, low, high, best, code[~right], code[right])
    return Rate(*(2 * p - 1 for p in (mean.value, mean.low, mean.high)))


def effective(value: float, influence: Floats, code: Ints, trials: float, alpha: float) -> float:
    """Independent trials that would know the rate as well as these clusters do.

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
    known = trials if plain == 0 or variance <= plain else trials * plain / variance
    few = stdtrit(max(trials - 1, 1), 1 - alpha / 2) / stdtrit(k - 1, 1 - alpha / 2)
    return known * min(1.0, float(few)) ** 2


def _clopper_pearson(value: float, trials: float, alpha: float) -> tuple[float, float]:
    """Both ends for ``value * trials`` successes, which need not be whole."""
    if trials == 0:
        return 0.0, 1.0
    hits, misses = value * trials, (1 - value) * trials
    low = float(betaincinv(hits, misses + 1, alpha / 2)) if hits else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - alpha / 2)) if misses else 1.0
    return low, high


def _capped(value: float, low: float, high: float, best: float, wrong: Ints, right: Ints) -> Rate:
    """The interval, no better than ``best`` where few clusters hold ``wrong`` (``right``) games."""
    low = min(low, best) if np.unique(wrong).size < FEW else low
    high = max(high, 1 - best) if np.unique(right).size < FEW else high
    return within(value, low, high)


def within(value: float, low: float, high: float) -> Rate:
    """A rate whose interval holds its value."""
    return Rate(value, min(low, value), max(high, value))


# ---- AUC ------------------------------------------------------------------------------------


def auc(
    score: Floats,
    member: Bools,
    code: Ints,
    alpha: float,
    resamples: int,
    rng: np.random.Generator,
) -> Rate:
    """Mann-Whitney's estimate, with an interval from a bootstrap that draws clusters."""
    order = np.argsort(score, kind="stable")
    score, member, code = score[order], member[order], code[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    value = float(_weighted_auc(np.ones((1, member.size)), member, starts)[0])

    clusters = int(code.max()) + 1
    drawn = _drawn_aucs(member, code, starts, clusters, resamples, rng)
    error = float(np.nanstd(drawn, ddof=1))

    low, high = value, value
    if 0 < value < 1:
        freedom = _freedom(_by_cluster(code, _influence(member, starts, value)))
        step = float(stdtrit(freedom, 1 - alpha / 2)) * error / (value * (1 - value))
        logit = np.log(value) - np.log1p(-value)
        low, high = (float(1 / (1 + np.exp(-(logit + sign * step)))) for sign in (-1, 1))
    held, missed = np.unique(code[member]).size, np.unique(code[~member]).size
    pairs = min(held, missed, clusters // 2)
    best = (alpha / 2) ** (1 / pairs) if pairs else 0.0
    wrong, right = (_involved(sign * score, member, code) for sign in (1, -1))
    return _capped(value, low, high, best, wrong, right)


def _influence(member: Bools, starts: Ints, value: float) -> Floats:
    """(n,) what each game adds to the AUC's error: its share of pairs in the right order."""
    held, others = np.add.reduceat(np.stack([member, ~member]).astype(float), starts, axis=1)
    sizes = np.diff(np.append(starts, member.size))
    below = np.repeat(np.cumsum(others) - others / 2, sizes)
    above = np.repeat(held.sum() - np.cumsum(held) + held / 2, sizes)
    pairs = held.sum() * others.sum()
    influence: Floats = np.where(member, below, above) / pairs
    influence -= np.where(member, value / held.sum(), value / others.sum())
    return influence


def _by_cluster(code: Ints, influence: Floats) -> Floats:
    sums: Floats = np.bincount(code, influence).astype(np.float64)
    return sums


def _freedom(sums: Floats) -> float:
    """Degrees of freedom of a variance estimated from k clusters, by their kurtosis; 1 to k - 1.

    k normal contributions leave k - 1. Where few clusters carry the error, the variance is known
    as badly as from few.
    """
    if not sums.any():
        return max(1.0, sums.size - 1.0)
    kurtosis = sums.size * float((sums**4).sum()) / float((sums**2).sum()) ** 2
    return min(sums.size - 1.0, max(1.0, 2 * sums.size / max(kurtosis - 1, 1e-9)))


def _involved(score: Floats, member: Bools, code: Ints) -> Ints:
    """Clusters without whose games every member would score above every non-member."""
    held = code[member & (score <= score[~member].max())]
    others = code[~member & (score >= score[member].min())]
    return min(np.unique(held), np.unique(others), key=len)


def _drawn_aucs(
    member: Bools,
    code: Ints,
    starts: Ints,
    clusters: int,
    resamples: int,
    rng: np.random.Generator,
) -> Floats:
    """(resamples,) AUC of as many draws of clusters, with replacement.

    Few clusters are drawn as whole blocks of pairs, many as weights of their games.
    """
    blocks = _blocks(member, code, starts, clusters) if member.size * clusters <= CHUNK else None
    rows = max(1, CHUNK // member.size)
    drawn: list[Floats] = []
    for first in range(0, resamples, rows):
        b = min(rows, resamples - first)
        picks = rng.integers(clusters, size=(b, clusters)) + clusters * np.arange(b)[:, None]
        times = (
            np.bincount(picks.ravel(), minlength=b * clusters).reshape(b, clusters).astype(float)
        )
        if blocks is None:
            drawn.append(_weighted_auc(times[:, code], member, starts))
            continue
        wins = ((times @ blocks) * times).sum(1)
        held, others = (np.bincount(code[side], minlength=clusters) for side in (member, ~member))
        drawn.append(_share_of(wins, (times @ held) * (times @ others)))
    return np.concatenate(drawn)


def _blocks(member: Bools, code: Ints, starts: Ints, clusters: int) -> Floats:
    """(C, C) at [a, b]: pairs of a member of a and a non-member of b in the right order."""
    seen = np.zeros((member.size + 1, clusters))
    outside = np.flatnonzero(~member)
    seen[outside + 1, code[outside]] = 1
    seen = np.cumsum(seen, axis=0)
    inside = np.flatnonzero(member)
    inside = inside[np.argsort(code[inside], kind="stable")]
    tied = np.searchsorted(starts, inside, "right") - 1
    ends = np.append(starts[1:], member.size)
    below = (seen[starts[tied]] + seen[ends[tied]]) / 2
    present, first = np.unique(code[inside], return_index=True)
    blocks = np.zeros((clusters, clusters))
    blocks[present] = np.add.reduceat(below, first, axis=0)
    return blocks


def _weighted_auc(weights: Floats, member: Bools, starts: Ints) -> Floats:
    """(b,) AUC of games counted ``weights`` (b, n) times; NaN without both classes.

    The games are in the order of their scores; ``starts`` are where a new score begins.
    """
    inside = np.add.reduceat(weights * member, starts, axis=1)
    outside = np.add.reduceat(weights * ~member, starts, axis=1)
    below = np.cumsum(outside, axis=1) - outside / 2
    return _share_of((inside * below).sum(1), inside.sum(1) * outside.sum(1))


def _share_of(wins: Floats, pairs: Floats) -> Floats:
    """``wins / pairs``, NaN where there are no pairs."""
    share: Floats = np.full_like(wins, np.nan)
    np.divide(wins, pairs, out=share, where=pairs > 0)
    return share
