"""Exact tests within one look: the probability that guessing does as well at this look.

A *look* is one measurement of an attack, and a *game* is one decision whether a text is in the
batch. Only the choice of the texts (or of the vocabulary's types) that are in the batch is random:
the scores may depend on each other in any way. So a single look is enough for a p-value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import hypergeom

from lightning_fedleak.evaluation.metrics.clustered import Bools, Floats, Ints

MAX_PAIRS = 48 * 48
"""Largest number of pairs of a member and a non-member for the exact p-value, which takes 0.1 s.

With more pairs Hoeffding's bound is returned, which is larger.
"""


def spent_at(look: int, alpha: float = 0.05) -> float:
    """Return the share of ``alpha`` that look k spends, ``alpha / (k (k + 1))``.

    Args:
        look: The number k of the look, counted from 1.
        alpha: The probability of error over all looks together.
    """
    return alpha / (look * (look + 1))


def over_looks(p_value: float, look: int) -> float:
    """Return the p-value of a look, corrected for all looks of a run, however many follow.

    Look j may spend the share ``1 / (j (j + 1))`` of the probability of error
    (:func:`~lightning_fedleak.evaluation.metrics.within.spent_at`). The shares of infinitely many
    looks sum to 1, so that the number of looks need not be known. The p-value of look j is
    multiplied by ``j (j + 1)``. An attack that guesses has a corrected p-value of at most alpha at
    any look with probability at most alpha.

    Args:
        p_value: The p-value of the look; NaN if unknown.
        look: The number of the look, counted from 1.
    """
    return p_value if math.isnan(p_value) else min(1.0, p_value * 0.5 / spent_at(look, 0.5))


def rank_p_value(score: Floats, member: Bools) -> float:
    """Return the probability that guessing ranks the members at least so high (Mann-Whitney).

    It is exact for any scores, also with ties: the share of all choices of members among the games,
    which are equally likely, with at least this AUC. It is NaN without members or non-members.

    Args:
        score: (n,) The scores, higher for likelier members; infinities are allowed.
        member: (n,) bool, whether each game has a member.
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
        values: (g,) The value of the games of each group with equal scores.
        sizes: (g,) The number of games of each group.
        members: The number of games that are chosen.
    """
    max_sum = int(np.repeat(values, sizes)[-members:].sum())
    counts = np.zeros((members + 1, max_sum + 1))
    counts[0, 0] = 1
    for value, size in zip(values.tolist(), sizes.tolist(), strict=True):
        next_counts = counts.copy()
        for n in range(1, min(size, members) + 1):  # the number of games chosen from this group
            step = n * value
            choices = counts[: members + 1 - n, : max(0, max_sum + 1 - step)]
            next_counts[n:, step:] += math.comb(size, n) * choices
        counts = next_counts
    row: Floats = counts[members]
    return row


def naming_p_value(right: int, named: int, used: int, vocabulary: int) -> float:
    """Return the probability that random types include at least as many used ones.

    A type is a token id of the vocabulary, and is used if it occurs in the batch. The types are
    drawn uniformly from the vocabulary. An attack that names the frequent words of a language does
    better than that without any gradient; a user's threshold on the rate has to allow for that. The
    p-value is NaN if no type was used.

    Args:
        right: The number of named types that were used.
        named: The number of named types.
        used: The number of types that were used in the batch.
        vocabulary: The number of types of the vocabulary.
    """
    if not used:
        return math.nan
    return min(1.0, float(hypergeom.sf(right - 1, vocabulary, used, named)))


def pairs_p_value(mean: float, trials: int, at_most: float) -> float:
    """Return a bound on the probability of at least this mean if ``at_most`` is expected.

    The bound ``exp(-n kl(mean, at_most))`` holds for n independent trials in [0, 1], and for the
    AUC of n disjoint pairs (Hoeffding 1963, section 5). It is exact for a mean of 1.

    Args:
        mean: The observed mean.
        trials: The number n of trials or pairs.
        at_most: The expected mean, within (0, 1).
    """
    if mean <= at_most:
        return 1.0
    wrong = (1 - mean) * math.log((1 - mean) / (1 - at_most)) if mean < 1 else 0.0
    return math.exp(-trials * (mean * math.log(mean / at_most) + wrong))


def lowest_p_value(p_values: Sequence[float]) -> float:
    """Return the p-value of "no client leaks": the lowest of all clients times their number.

    It is Bonferroni's correction; NaN values do not count.
    """
    known = [p for p in p_values if not math.isnan(p)]
    return min(1.0, len(known) * min(known)) if known else math.nan
