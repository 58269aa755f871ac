"""Exact tests within one look: how rarely guessing does as well there.

What is random is which of the texts (or of the vocabulary's types) are the batch's, and nothing
else: the scores may depend on each other in any way. So no number of looks is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import hypergeom

from lightning_fedleak.evaluation.metrics.clustered import Bools, Floats, Ints

MAX_PAIRS = 48 * 48
"""Pairs of a member and a non-member up to which all choices are counted: 0.1 s at this number.

Beyond it Hoeffding's bound is returned, which is larger.
"""


def spent_at(look: int, alpha: float = 0.05) -> float:
    """Return the share of ``alpha`` that look k spends, ``alpha / (k (k + 1))``.

    Args:
        look: k, counted from 1.
        alpha: probability of error over all looks together.
    """
    return alpha / (look * (look + 1))


def over_looks(p_value: float, look: int) -> float:
    """Return a p-value of look 1, 2, ... corrected for all looks of a run, however many follow.

    Look j may spend the share ``1 / (j (j + 1))`` of the probability of error
    (:func:`~lightning_fedleak.evaluation.metrics.within.spent_at`). The shares of infinitely many
    looks sum to 1. So nobody needs to say how many there will be, and a late look pays only the
    square of its number. The lowest of these values is at most alpha by guessing with probability
    at most alpha.
    """
    return p_value if math.isnan(p_value) else min(1.0, p_value * 0.5 / spent_at(look, 0.5))


def rank_p_value(score: Floats, member: Bools) -> float:
    """Return the probability that guessing ranks the members at least so high (Mann-Whitney).

    Exact given the scores, ties among them too: of all equally likely choices of which games are
    the members', the share whose AUC is at least this one. NaN without members or non-members.

    Args:
        score: (n,) higher is more likely a member; infinities are ordinary scores.
        member: (n,) bool.
    """
    members, non_members = int(member.sum()), int((~member).sum())
    if min(members, non_members) == 0 or np.isnan(score).any():
        return math.nan
    _, rank, sizes = np.unique(score, return_inverse=True, return_counts=True)
    twice = 2 * np.cumsum(sizes) - sizes  # twice the mid-rank, less 1 that all games share
    if members * non_members > MAX_PAIRS:
        auc = (int(twice[rank[member]].sum()) - members**2) / (2 * members * non_members)
        return pairs_p_value(auc, min(members, non_members), 0.5)
    steps = twice - twice[0]
    steps //= max(1, int(np.gcd.reduce(steps)))  # fewer sums to count: without ties half of them
    counts = _counts_by_sum(steps, sizes, members)
    return float(counts[int(steps[rank[member]].sum()) :].sum() / counts.sum())


def _counts_by_sum(values: Ints, sizes: Ints, members: int) -> Floats:
    """Return how many choices of ``members`` games have each sum of their values.

    Args:
        values: (g,) of the games of each tied group.
        sizes: (g,) games of each group.
        members: games that are chosen.
    """
    max_sum = int(np.repeat(values, sizes)[-members:].sum())
    counts = np.zeros((members + 1, max_sum + 1))
    counts[0, 0] = 1
    for value, size in zip(values.tolist(), sizes.tolist(), strict=True):
        longer = counts.copy()
        for chosen in range(1, min(size, members) + 1):
            step = chosen * value
            part = counts[: members + 1 - chosen, : max(0, max_sum + 1 - step)]
            longer[chosen:, step:] += math.comb(size, chosen) * part
        counts = longer
    row: Floats = counts[members]
    return row


def naming_p_value(right: int, named: int, used: int, vocabulary: int) -> float:
    """Return the probability that ``named`` types drawn blindly hold at least ``right`` used ones.

    Each type of the vocabulary is drawn equally often. Naming the frequent words of a language does
    better than that without any gradient; a threshold (``at_most``) corresponds to what it reaches.
    NaN where nothing was used.
    """
    if not used:
        return math.nan
    return min(1.0, float(hypergeom.sf(right - 1, vocabulary, used, named)))


def pairs_p_value(mean: float, trials: int, at_most: float) -> float:
    """Return a bound on the probability of so high a mean where ``at_most`` is expected.

    ``exp(-n kl(mean, at_most))`` holds for n independent trials in [0, 1], and for the AUC of n
    disjoint pairs (Hoeffding 1963, section 5). It is exact where all are right.
    """
    if mean <= at_most:
        return 1.0
    wrong = (1 - mean) * math.log((1 - mean) / (1 - at_most)) if mean < 1 else 0.0
    return math.exp(-trials * (mean * math.log(mean / at_most) + wrong))


def lowest_p_value(p_values: Sequence[float]) -> float:
    """Return the p-value of "at no client", the lowest times their number (Bonferroni)."""
    known = [p for p in p_values if not math.isnan(p)]
    return min(1.0, len(known) * min(known)) if known else math.nan
