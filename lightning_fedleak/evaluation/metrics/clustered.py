"""Rates and an AUC of games that come in clusters, with intervals, and exact tests within one look.

Games of one step share the model, the batch and the noise, so they are not independent trials.
Every interval in this module treats the *clusters* (steps, clients) as independent, not the games.

The columns of n games are ``score`` (n,), which is higher for likelier members, ``member`` (n,) for
the secret bits, and ``code`` (n,) for the index of each game's cluster, from 0 without gaps. A game
is *right* if the attack's decision is the secret bit. An interval has confidence ``1 - alpha``.

A *look* is one measurement of an attack. Within it only the choice of the texts (or of the
vocabulary's types) that are in the batch is random: the scores may depend on each other in any way.
So a single look is enough for a p-value, the probability that guessing does as well at this look.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import rel_entr, stdtr, stdtrit
from scipy.stats import hypergeom
from torch import Tensor

from lightning_fedleak.evaluation.metrics.rates import Rate, clopper_pearson

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# If fewer clusters have a wrong game, the interval's low end is at most a cap; if fewer have a
# right game, its high end is at least 1 - cap. A smaller value trusts a variance of few clusters.
MIN_CLUSTERS = 5
# The largest number of float64 values in an array of the bootstrap (16 MiB). It bounds the memory,
# and does not change the draws.
NUMBERS_AT_ONCE = 1 << 21


def columns(scores: Tensor, members: Tensor) -> tuple[Floats, Bools]:
    """Return scores and secret bits as flat arrays.

    Raises:
        ValueError: The lengths of the columns differ.
    """
    score: Floats = scores.detach().reshape(-1).cpu().double().numpy()
    member: Bools = members.detach().reshape(-1).bool().cpu().numpy()
    check_length("members", member.size, score.size)
    return score, member


def check_length(name: str, length: int, n: int) -> None:
    """Raise ``ValueError`` unless the column ``name`` has ``n`` values, as many as the scores."""
    if length != n:
        raise ValueError(f"{name} has {length} values, scores has {n}: give one for each game")


def share_rate(hits: Bools, population: Bools, code: Ints, alpha: float) -> Rate:
    """Return the share of ``hits`` (n,) among the games of ``population`` (n,), as a rate.

    The population must not be empty.
    """
    trials = int(population.sum())
    value = float(hits[population].mean())
    influence = (hits[population] - value) / trials
    code = code[population]
    k = np.unique(code).size
    low, high = _interval(value, influence, code, trials, alpha)
    # Clopper-Pearson's low end for k hits in k trials: each cluster is one trial.
    cap = (alpha / 2) ** (1 / k)
    return _capped_rate(value, low, high, cap, code[~hits[population]], code[hits[population]])


def advantage_rate(right: Bools, member: Bools, code: Ints, alpha: float) -> Rate:
    """Return the rate TPR + TNR - 1 of the games that are ``right`` (n,).

    Its interval is the interval of the mean p of TPR and TNR, mapped by 2 p - 1.
    """
    sides = [member, ~member]
    means = [float(right[side].mean()) for side in sides]
    value = sum(means) / 2
    influence = np.zeros(right.size)
    for side, rate in zip(sides, means, strict=True):
        influence[side] = (right[side] - rate) / (2 * side.sum())
    # The games that one share would need for this mean's variance: twice the harmonic mean.
    trials = 4 / sum(1 / side.sum() for side in sides)
    low, high = _interval(value, influence, code, trials, alpha)
    # The cap is the lowest of three: all games of a cluster share one outcome; only its members do,
    # and all non-members are right; or only its non-members do, and all members are right.
    tail, k = alpha / 2, np.unique(code).size
    one_side_cap = min((1 + tail ** (1 / np.unique(code[side]).size)) / 2 for side in sides)
    cap = min(tail ** (1 / k), one_side_cap)
    mean = _capped_rate(value, low, high, cap, code[~right], code[right])
    return Rate(*(2 * p - 1 for p in (mean.value, mean.low, mean.high)))


def effective_trials(
    value: float, influence: Floats, code: Ints, trials: float, alpha: float
) -> float:
    """Return the number of independent trials that determine the rate as well as the clusters do.

    It is the number of games over the design effect, times a factor of at most 1 for the number of
    clusters: the squared quotient of two Student's quantiles (Korn & Graubard 1998).

    Args:
        value: The rate.
        influence: (n,) the contribution of each game to the rate's error; it sums to 0.
        code: (n,) the cluster of each game.
        trials: The number of independent games that one share would need for the same variance;
            the result is never larger.
        alpha: The error probability of the interval, for Student's correction.
    """
    sums = np.bincount(code, influence)
    k = np.unique(code).size
    if k == 1:
        return 0.0
    variance = k / (k - 1) * float((sums**2).sum())
    binomial = value * (1 - value) / max(trials - 1, 1)
    effective = trials if binomial == 0 or variance <= binomial else trials * binomial / variance
    correction = stdtrit(max(trials - 1, 1), 1 - alpha / 2) / stdtrit(k - 1, 1 - alpha / 2)
    return effective * min(1.0, float(correction)) ** 2


def _interval(
    value: float, influence: Floats, code: Ints, trials: float, alpha: float
) -> tuple[float, float]:
    """Return both ends of the Clopper-Pearson interval on the effective number of trials."""
    trials = effective_trials(value, influence, code, trials, alpha)
    return clopper_pearson(value * trials, (1 - value) * trials, alpha)


def _capped_rate(
    value: float, low: float, high: float, cap: float, wrong: Ints, right: Ints
) -> Rate:
    """Return the rate, with low <= cap if few clusters have a wrong game.

    Few wrong games do not show how the games of a cluster depend on each other. The high end is
    likewise at or above 1 - cap if few clusters have a right game.

    Args:
        value: The rate.
        low: The low end of the interval.
        high: The high end of the interval.
        cap: The low end for a perfect rate if all games of a cluster have one outcome.
        wrong: The clusters of the wrong games; they may repeat.
        right: The clusters of the right games; they may repeat.
    """
    low = min(low, cap) if np.unique(wrong).size < MIN_CLUSTERS else low
    high = max(high, 1 - cap) if np.unique(right).size < MIN_CLUSTERS else high
    return rate_with_value(value, low, high)


def rate_with_value(value: float, low: float, high: float) -> Rate:
    """Return the rate, with an interval that is widened to contain its value."""
    return Rate(value, min(low, value), max(high, value))


# ---- AUC ------------------------------------------------------------------------------------


def auc(
    score: Floats, member: Bools, code: Ints, alpha: float, resamples: int, rng: np.random.Generator
) -> Rate:
    """Return the Mann-Whitney estimate of the AUC; its interval is on the logit scale.

    The variance comes from a bootstrap over clusters. If each game is its own cluster, nothing is
    drawn: the variance is DeLong's (1988), and the interval is cut to Hoeffding's. A variance that
    depends on very few games, such as a single member with a low score, makes the interval on the
    logit scale too wide.

    Equal scores have no variance. Then each of two populations has at most a share ``1 - cap`` of
    games with another score, at the level alpha / 2 (Clopper-Pearson), and an AUC is at most half
    of both shares away from 0.5.
    """
    order = np.argsort(score, kind="stable")
    score, member, code = score[order], member[order], code[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    value = float(_weighted_auc(np.ones((1, member.size)), member, starts)[0])

    clusters = int(code.max()) + 1
    by_game = np.unique(code).size == member.size
    # The trials of the cap: disjoint pairs of a cluster with a member and one with a non-member.
    pairs = min(np.unique(code[member]).size, np.unique(code[~member]).size, clusters // 2)
    cap = (alpha / 2) ** (1 / pairs) if pairs else 0.0
    if starts.size == 1:
        return Rate(value, max(0.0, cap - 0.5), min(1.0, 1.5 - cap))
    low, high = value, value
    if 0 < value < 1:
        influence = _influence(member, starts, value)
        sums: Floats = np.bincount(code, influence).astype(np.float64)
        if by_game:
            error = math.sqrt(_delong_variance(influence, member))
        else:
            draws = _bootstrap_aucs(member, code, starts, clusters, resamples, rng)
            error = float(np.nanstd(draws, ddof=1))
        # Without a difference between the draws (up to rounding) nothing is known of the error.
        error = error if error > 1e-12 else math.inf
        quantile = -float(stdtrit(_degrees_of_freedom(sums), alpha / 2))
        half_width = quantile * error / (value * (1 - value))  # on the logit scale (delta method)
        logit = np.log(value) - np.log1p(-value)
        low, high = (float(1 / (1 + np.exp(-(logit + sign * half_width)))) for sign in (-1, 1))
    wrong, right = (_decisive_clusters(sign * score, member, code) for sign in (1, -1))
    rate = _capped_rate(value, low, high, cap, wrong, right)
    if not by_game:
        return rate
    n = min(int(member.sum()), int((~member).sum()))
    low, low_of_complement = (_hoeffding_low(share, n, alpha / 2) for share in (value, 1 - value))
    return Rate(value, max(rate.low, low), min(rate.high, 1 - low_of_complement))


def least_error(score: Floats, member: Bools, mean: float = 0.5) -> float:
    """Return the smallest alpha at which the interval of :func:`auc` lies above ``mean``.

    Each game is its own cluster. The result is at most 1.

    Args:
        score: (n,) the scores; a higher one is evidence of membership.
        member: (n,) bool, the secret bits, with both classes.
        mean: The AUC to exceed, within (0, 1).
    """
    order = np.argsort(score, kind="stable")
    score, member = score[order], member[order]
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    value = float(_weighted_auc(np.ones((1, member.size)), member, starts)[0])
    if value <= mean:
        return 1.0
    n = min(int(member.sum()), int((~member).sum()))
    if starts.size == 1:
        return min(1.0, 2 * (mean + 0.5) ** n)
    tail = 0.0
    if value < 1:
        influence = _influence(member, starts, value)
        error = math.sqrt(_delong_variance(influence, member)) / (value * (1 - value))
        log_odds_ratio = math.log(value * (1 - mean) / (mean * (1 - value)))
        tail = float(stdtr(_degrees_of_freedom(influence), -log_odds_ratio / error))
    if _decisive_clusters(score, member, np.arange(member.size)).size < MIN_CLUSTERS:
        tail = max(tail, mean**n)
    hoeffding = math.exp(-n * float(rel_entr(value, mean) + rel_entr(1 - value, 1 - mean)))
    return min(1.0, 2 * min(tail, hoeffding))


def _hoeffding_low(value: float, n: int, alpha: float) -> float:
    """Return the smallest mean of a U statistic that Hoeffding's bound does not reject.

    The bound is ``P(U >= u) <= exp(-n kl(u, mean))`` for a kernel within [0, 1] and n disjoint
    pairs (Hoeffding 1963, section 5). A mean is rejected if the bound at ``value`` is below
    ``alpha``.
    """

    def excess(mean: float) -> float:
        return float(rel_entr(value, mean) + rel_entr(1 - value, 1 - mean)) + math.log(alpha) / n

    start = 1e-9  # the bracket's low end: the divergence is infinite at a mean of 0
    return 0.0 if value <= start or excess(start) <= 0 else float(brentq(excess, start, value))


def _influence(member: Bools, starts: Ints, value: float) -> Floats:
    """Return each game's contribution (n,) to the AUC's error; the contributions sum to 0.

    It is the game's share of the rightly ordered pairs, less the mean of its class. The games are
    in the order of their scores; ``starts`` are the indices at which a new score begins.
    """
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
    """Return DeLong's variance of the AUC.

    One member (non-member) has no variance; its term is Van Dantzig's upper bound 1/4.
    """
    total = 0.0
    for side in (member, ~member):
        n = int(side.sum())
        total += n / (n - 1) * float((influence[side] ** 2).sum()) if n > 1 else 0.25
    return total


def _degrees_of_freedom(sums: Floats) -> float:
    """Return the degrees of freedom of a variance from the contributions ``sums`` (k,) of clusters.

    They are estimated from the kurtosis, and lie between 1 and k - 1: k normal contributions give
    k - 1. If few clusters contribute most of the error, the variance is as uncertain as one from
    few clusters.
    """
    if not sums.any():
        return max(1.0, sums.size - 1.0)
    kurtosis = sums.size * float((sums**4).sum()) / float((sums**2).sum()) ** 2
    return max(1.0, min(sums.size - 1.0, 2 * sums.size / max(kurtosis - 1, 1e-9)))


def _decisive_clusters(score: Floats, member: Bools, code: Ints) -> Ints:
    """Return the clusters of the misranked members, or of the misranked non-members if fewer.

    Without these games every member would score above every non-member.
    """
    members = code[member & (score <= score[~member].max())]
    non_members = code[~member & (score >= score[member].min())]
    return min(np.unique(members), np.unique(non_members), key=len)


def _bootstrap_aucs(
    member: Bools, code: Ints, starts: Ints, clusters: int, resamples: int, rng: np.random.Generator
) -> Floats:
    """Return the AUCs (resamples,) of draws of clusters with replacement."""
    rows = max(1, NUMBERS_AT_ONCE // member.size)
    draws: list[Floats] = []
    for first in range(0, resamples, rows):
        b = min(rows, resamples - first)
        # Each draw counts in its own range of bins, so that one bincount serves all.
        picks = rng.integers(clusters, size=(b, clusters)) + clusters * np.arange(b)[:, None]
        counts = np.bincount(picks.ravel(), minlength=b * clusters)
        times = counts.reshape(b, clusters).astype(float)
        draws.append(_weighted_auc(times[:, code], member, starts))
    return np.concatenate(draws)


def _weighted_auc(weights: Floats, member: Bools, starts: Ints) -> Floats:
    """Return the AUCs (b,) of games that count ``weights`` (b, n) times; NaN without both classes.

    The games are in the order of their scores; ``starts`` are the indices at which a new score
    begins.
    """
    members = np.add.reduceat(weights * member, starts, axis=1)
    non_members = np.add.reduceat(weights * ~member, starts, axis=1)
    below = np.cumsum(non_members, axis=1) - non_members / 2
    wins, pairs = (members * below).sum(1), members.sum(1) * non_members.sum(1)
    shares: Floats = np.full_like(wins, np.nan)
    np.divide(wins, pairs, out=shares, where=pairs > 0)
    return shares


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

    Look j may spend the share ``1 / (j (j + 1))`` of the probability of error (:func:`spent_at`).
    The shares of infinitely many looks sum to 1, so that the number of looks need not be known. The
    p-value of look j is multiplied by ``j (j + 1)``. An attack that guesses has a corrected p-value
    of at most alpha at any look with probability at most alpha.

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
