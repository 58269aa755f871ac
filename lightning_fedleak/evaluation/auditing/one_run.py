"""Lower bounds on epsilon from one run with many canaries.

There are two kinds of bounds. Those of :func:`audit_one_run` count how many inclusion bits an
auditor guesses correctly. That of :func:`audit_gaussian_scores` is tighter, and assumes that the
scores are Gaussian.

**Counts.** From (epsilon, delta) alone: Steinke, Nasr & Jagielski 2023, arXiv 2305.08846. From the
whole trade-off curve of the claim: Mahloujifar, Melis & Chaudhuri 2024, arXiv 2410.22235. This is
the derivation of what :func:`exceeds` computes:

Consider an event that has probability x without a canary. Let F(x) be the largest probability that
the claim allows it with the canary, and the same with both exchanged; F is concave. The auditor
guesses the bits of r of m canaries, W of them correctly, and p_j is the probability of W = j. Fix a
canary i, all other bits, and a set J. "The guess for i is b, and the number of correct guesses of
the *other* canaries is in J" is an event of the released output. So its probability if i's bit is b
is at most F of its probability if the bit is 1 - b. The mean over both b, all other bits and all i
goes into F by Jensen's inequality:

    sum_(j in J) (j + 1) p_(j + 1) / m  <=  F(sum_(j in J) (r - j) p_j / m).

For J = {c - 1, c, ...} that is ``R_c <= F(H_(c - 1))``, where ``R_c = sum_(j >= c) j p_j / m``
and ``H_c = sum_(j >= c) (r - j) p_j / m``. Suppose P[W >= v] is tau or more. Then R_v is smallest
where all of tau lies at v. For smaller c, ``H_(c - 1) >= max(H_c, F^-1(R_c))``, and what is added
to H at j is (r - j) / j of what is added to R. So by Abel's summation R_j is at least an increasing
function of all R above it, and the smallest R_j follow one from the other. Because ``R_j + H_j`` is
at most ``r / m``, tau is refuted where the smallest ones add up to more.

**Gaussian scores**, of one run or of several. A guess of each inclusion bit ignores the size of a
score. Suppose that each canary is a planted gradient in a direction of its own, and that its score
is the component of a Gaussian mechanism's release in this direction. Then the sums of the scores of
included and of held-out canaries are Gaussian and sufficient (Agrawal et al. 2026, arXiv
2606.12733, of which only the abstract was read; the derivation below is classical).

Given the bits, scores are independent and normal with the same variance s^2. Their mean is a for
held-out canaries and ``a + mu s`` for included ones. Noise of ``1 / mu`` times the sensitivity
gives such scores, and no test of one canary does better than mu-Gaussian DP allows. With n1
canaries in, n0 out, and the pooled standard deviation S

    T = (mean_in - mean_out) / (S sqrt(1 / n1 + 1 / n0))

has the noncentral t distribution of ``n1 + n0 - 2`` degrees of freedom and noncentrality
``mu / sqrt(1 / n1 + 1 / n0)``, whatever a and s are. It grows with mu, so the mu at which T is
exceeded with probability ``1 - confidence`` is a lower bound with exactly that confidence.

The Gaussian model is an assumption, so a bound is evidence only against the claim of a Gaussian
mechanism. Scores that clearly do not fit the model are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, expit, ndtr, ndtri
from scipy.stats import f, nct, shapiro
from torch import Tensor

from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.evaluation.auditing import lower_bounds
from lightning_fedleak.evaluation.metrics.clustered import Floats, columns
from lightning_fedleak.validate import check_choice, check_integer, check_number

if TYPE_CHECKING:
    from lightning_fedleak.evaluation.canaries import CanarySet, InclusionRecord


BISECTIONS = 36  # halvings of an interval of 0.5, which give epsilon to 1e-11; more: slower
MIN_GUESSES = 16  # smallest default number of guesses; all correct show epsilon 1.6; not tuned
MIN_FAIR_CHANCE = 1e-9  # probability of bits as uneven; below it an audit refuses them; not tuned


def one_run_p_value(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0
) -> float:
    """Return a bound on the probability of that many correct guesses under (epsilon, delta)-DP.

    The auditor guesses r bits, and abstains on all others. Let W be binomial, of r trials with
    probability ``sigmoid(epsilon)``. By arXiv 2305.08846v1, Corollary 5.4 and Appendix D, the bound
    is ``P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i``.

    Args:
        canaries: m, the number of canaries; each has a fair inclusion bit.
        guesses: r, the number of canaries on which the auditor did not abstain. Their choice and
            number may depend on the scores, but not on the inclusion bits.
        right: v, the number of correct guesses.
        epsilon: The epsilon of the claim, for adding or removing one canary.
        delta: The delta of the claim.

    Raises:
        ValueError: impossible counts.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError("0 <= right <= guesses <= canaries must hold")
    if right == 0:
        return 1.0
    chance = float(expit(epsilon))
    value = float(bdtrc(right - 1, guesses, chance))
    if delta:
        i = np.arange(1, right + 1)
        lower = np.append(bdtr(right - 1 - i[:-1], guesses, chance), 0.0)
        window = bdtr(right - 1, guesses, chance) - lower
        value += 2 * canaries * delta * max(0.0, float((window / i).max()))
    return min(1.0, value)


def exceeds(
    canaries: int, guesses: int, right: int, least: Callable[[float], float], error: float
) -> bool:
    """Return whether that many correct guesses have a probability below ``error`` under f-DP.

    Args:
        canaries: m, the number of canaries.
        guesses: r, as for :func:`one_run_p_value`.
        right: v, the number of correct guesses.
        least: F^-1 of the claim. Given an event's probability with a canary, it returns the
            smallest probability without the canary that the claim allows, and with both exchanged.
        error: tau, the probability of an error.
    """
    guessed_share = guesses / canaries
    member_share = error * right / canaries
    other_share = error * (guesses - right) / canaries
    for rank in range(right - 1, -1, -1):
        next_share = least(member_share)
        if next_share <= other_share:
            return False
        member_share += rank / (guesses - rank) * (next_share - other_share)
        other_share = next_share
        if member_share + other_share > guessed_share:
            return True
    return False


def least_of_gaussian(mu: float, chance: float) -> float:
    """Return F^-1 of mu-Gaussian DP: ``Phi(Phi^-1(y) - mu)``."""
    return float(ndtr(ndtri(min(chance, 1.0)) - mu))


def least_of_dp(epsilon: float, delta: float, chance: float) -> float:
    """Return F^-1 of (epsilon, delta)-DP."""
    direct = math.exp(-epsilon) * (chance - delta)
    mirrored = 1 - delta - math.exp(epsilon) * (1 - chance)
    return max(0.0, direct, mirrored)


def _epsilon_of_counts(counts: tuple[int, int, int], audited: lower_bounds.AuditedClaim) -> float:
    """Return a lower bound on epsilon from the numbers of canaries, guesses and correct guesses.

    The number of guesses must not depend on the inclusion bits.

    For (epsilon, delta)-DP it is the larger of two bounds: from :func:`one_run_p_value`, and from
    the trade-off curve (:func:`exceeds`). Both bound the probability of the same event, so they
    need not share the error.
    """
    one_run_p_value(*counts, 0.0)  # refuses impossible counts
    if audited.gaussian:

        def is_mu_refuted(mu: float) -> bool:
            return exceeds(*counts, functools.partial(least_of_gaussian, mu), audited.error)

        return audited.epsilon_of_mu(_refuted_up_to(is_mu_refuted))

    def is_refuted(epsilon: float) -> bool:
        claimed = epsilon, audited.delta
        if one_run_p_value(*counts, *claimed) <= audited.error:
            return True
        least = functools.partial(least_of_dp, *claimed)
        return audited.delta > 0 and exceeds(*counts, least, audited.error)

    return _refuted_up_to(is_refuted)


def _refuted_up_to(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest parameter that is refuted, by bisection; 0 if not even 0 is refuted."""
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 0.5
    while is_refuted(high):
        low, high = high, high + 0.5
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def audit_one_run(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    guesses: int | None = None,
    claim: lower_bounds.Claim = "dp",
    seed: int = 0,
) -> lower_bounds.EpsilonBound:
    """Return a lower bound on epsilon from the scores of m canaries after a single run.

    The auditor guesses that the canaries with the largest scores are in and those with the smallest
    are out, and abstains on the others. For mechanisms other than randomised response the bound
    stays below the true epsilon, even with more canaries. The gap is narrower if the claim is of a
    Gaussian mechanism. If the scores themselves are Gaussian,
    :func:`~lightning_fedleak.evaluation.auditing.audit_gaussian_scores` gives the highest bound.

    Args:
        scores: (m,) higher is more likely included.
        members: (m,) bool, the inclusion bits.
        delta: The delta of the bound.
        confidence: The confidence of the bound.
        guesses: the number of guesses, half of them at either end. By default several numbers are
            tried, which share the error (Bonferroni): all canaries, a fourth of them, a sixteenth,
            and so on down to 16.
        claim: as for :func:`~lightning_fedleak.evaluation.auditing.audit_scores`.
        seed: The seed of the order of equal scores.

    Raises:
        ValueError: lengths differ, more guesses than canaries, no guesses, inclusion bits that are
            not fair, or a delta or confidence out of range.
    """
    audited = lower_bounds.AuditedClaim(delta, confidence, claim=claim)
    counts, m = _count_right(scores, members, guesses, seed), scores.numel()
    strict = replace(audited, confidence=1 - audited.error / len(counts))
    unknown = bool(scores.isnan().any())
    return audited.bound(
        math.nan if unknown else max(_epsilon_of_counts((m, *count), strict) for count in counts),
        max(_epsilon_of_counts((m, n, n), strict) for n, _ in counts),
        m,
        f"one run, {len(counts)} choice{'s' * (len(counts) > 1)} of how many to guess",
    )


def refutes(scores: Tensor, members: Tensor, curve: Curve, *, confidence: float = 0.95) -> bool:
    """Return whether the scores of m canaries after a single run refute a whole trade-off curve.

    A curve that holds is refuted with probability at most ``1 - confidence``. A curve that is not
    refuted is not thereby confirmed.

    Args:
        scores: (m,) higher is more likely included, as for :func:`audit_one_run`.
        members: (m,) bool, the inclusion bits.
        curve: pairs (epsilon, delta) that are claimed to hold for adding or removing one canary.
        confidence: The confidence of the refutation.

    Raises:
        ValueError: a score that is NaN, or as :func:`audit_one_run`.
    """
    check_number("confidence", confidence, above=0, below=1)
    if bool(scores.isnan().any()):
        raise ValueError("each canary needs a score, and not NaN, whether included or not")
    counts = _count_right(scores, members, None, 0)
    error = (1 - confidence) / len(counts)

    def least(chance: float) -> float:
        return max((least_of_dp(*pair, chance) for pair in curve), default=0.0)

    return any(
        exceeds(scores.numel(), *count, least, error)
        or any(one_run_p_value(scores.numel(), *count, *pair) <= error for pair in curve)
        for count in counts
    )


def _count_right(
    scores: Tensor, members: Tensor, guesses: int | None, seed: int
) -> list[tuple[int, int]]:
    """Return the number of guesses and of correct guesses, for each number that is tried."""
    score, member = columns(scores, members)
    m, inside = score.size, int(member.sum())
    if min(bdtr(inside, m, 0.5), bdtr(m - inside, m, 0.5)) < MIN_FAIR_CHANCE:
        raise ValueError(f"{inside} of {m} canaries are in, not by independent fair bits")
    shuffled = np.random.default_rng(seed).permutation(m)
    order = shuffled[np.argsort(score[shuffled], kind="stable")]
    check_integer("guesses", guesses, at_most=m, optional=True)
    choices = [m >> i for i in range(0, m.bit_length(), 2) if i == 0 or m >> i >= MIN_GUESSES]
    counts = []
    for n in choices if guesses is None else [guesses]:
        right = member[order[m - (n - n // 2) :]].sum() + (~member[order[: n // 2]]).sum()
        counts.append((n, int(right)))
    return counts


def audit_canaries(
    canaries: CanarySet | InclusionRecord,
    scores: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    claim: lower_bounds.Claim = "dp",
) -> lower_bounds.EpsilonBound:
    """Return a lower bound on the epsilon of one training run, from its canaries' scores.

    ::

        train = with_canaries(train, texts, record="secret/inclusion.json")
        scorer = CanaryScorer(train.canaries)
        ...                                     # one run with this callback
        print(audit_canaries(train.canaries, scorer.scores(), delta=1e-5))

    arXiv 2305.08846 holds for scores that depend on the inclusion bits only through what the run
    released. So every canary needs a score, even a held-out one. All scores must be computed by one
    rule: at the same steps, and reduced over steps in the same way (for example
    ``scores.amax(0)``), as :class:`~lightning_fedleak.callbacks.CanaryScorer` does. Do not score
    each canary only at the steps that had it in the batch: these steps reveal the bits.

    Epsilon is of a single record, so repeated canaries do not count. Of
    ``with_canaries(times=(1, 4, 16))`` only the canaries with one repetition count, in or out.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import audit_canaries, with_canaries
        >>> canaries = [torch.tensor([90 + n, n]) for n in range(64)]
        >>> train = with_canaries([torch.arange(2)] * 10, canaries, seed=1)
        >>> scores = train.canaries.included.float()  # of an auditor who is always right
        >>> audit_canaries(train.canaries, scores).epsilon > 2
        True

    Args:
        canaries: The canaries of :func:`~lightning_fedleak.evaluation.canaries.with_canaries`, or
            their record.
        scores: (m,) for the m canaries in their order, higher is more likely included.
        delta: The delta of the bound.
        confidence: The confidence of the bound.
        claim: as in :func:`~lightning_fedleak.evaluation.auditing.audit_one_run`.

    Raises:
        ValueError: not one score for each canary, inclusion bits that are not fair, no canary that
            is not repeated, or as :func:`~lightning_fedleak.evaluation.auditing.audit_one_run`.
    """
    source: Any = canaries
    record: InclusionRecord = getattr(source, "record", source)
    m = len(record.included)
    if scores.shape != (m,):
        raise ValueError(f"scores must be ({m},), one for each canary, included or not")
    check_choice("probability of with_canaries", record.probability, (0.5,))
    single = torch.tensor(record.repeats) == 1
    if not bool(single.any()):
        raise ValueError("epsilon is of canaries that occur once: with_canaries(times=(1, ...))")
    return audit_one_run(
        scores[single],
        torch.tensor(record.included)[single],
        delta=delta,
        confidence=confidence,
        claim=claim,
    )


MIN_SCORES = 20  # scores of each side; with fewer, the test of normality is weak; not tuned
MAX_SCORES = 5000  # scores of each side in that test; Shapiro-Wilk's p-values hold up to here
REFUSAL_RATE = 1e-5  # p-value below which a test of the Gaussian model refuses scores; not tuned


def audit_gaussian_scores(
    scores: Tensor, members: Tensor, *, delta: float, confidence: float = 0.95
) -> lower_bounds.EpsilonBound:
    """Return a lower bound on epsilon from Gaussian scores.

    The docstring of the module states the model of the scores.

    Args:
        scores: (n,) higher is more likely a member. Linear in what was released: for instance its
            inner product with the canary's gradient, summed over steps.
        members: (n,) bool, the inclusion bits.
        delta: The delta of the bound.
        confidence: The confidence of the bound.

    Raises:
        ValueError: lengths differ, fewer than 20 scores of a kind, scores that are not normal or
            spread differently with and without the canary, or delta 0.
    """
    audited = lower_bounds.AuditedClaim(delta, confidence, claim="gaussian")
    score, member = columns(scores, members)
    member_scores, other_scores = score[member], score[~member]
    if min(member_scores.size, other_scores.size) < MIN_SCORES:
        raise ValueError(
            f"Gaussian scores need {MIN_SCORES} canaries of either kind or more: use audit_scores"
        )
    epsilon = math.nan
    if not np.isnan(score).any():
        _check_form(member_scores, other_scores)
        mu = _least_mu(member_scores, other_scores, audited.error)
        epsilon = audited.epsilon_of_mu(mu)
    return audited.bound(epsilon, math.inf, score.size, "sums of Gaussian scores")


def _least_mu(member_scores: Floats, other_scores: Floats, error: float) -> float:
    """Return the lower bound on mu from the noncentral t distribution."""
    freedom = member_scores.size + other_scores.size - 2
    spread = math.sqrt((_sum_of_squares(member_scores) + _sum_of_squares(other_scores)) / freedom)
    width = math.sqrt(1 / member_scores.size + 1 / other_scores.size)
    statistic = float(member_scores.mean() - other_scores.mean()) / (spread * width)

    def excess(center: float) -> float:
        return float(nct.sf(statistic, freedom, center)) - error

    if excess(0.0) >= 0:
        return 0.0
    return width * float(brentq(excess, 0.0, statistic, xtol=1e-9))


def _sum_of_squares(values: Floats) -> float:
    """Return the sum of squares about the mean."""
    return float(np.square(values - values.mean()).sum())


def _check_form(member_scores: Floats, other_scores: Floats) -> None:
    """Raise an error if scores are not normal, or if their variance depends on inclusion."""
    if np.ptp(member_scores) == 0 or np.ptp(other_scores) == 0:
        raise ValueError("all scores of the members, or all of the non-members, are equal")
    p_values = [
        float(shapiro(values[:MAX_SCORES]).pvalue) for values in (member_scores, other_scores)
    ]
    sizes = member_scores.size - 1, other_scores.size - 1
    ratio = _sum_of_squares(member_scores) / sizes[0] / (_sum_of_squares(other_scores) / sizes[1])
    tail = float(f.sf(max(ratio, 1 / ratio), *(sizes if ratio >= 1 else sizes[::-1])))
    if min(*p_values, 2 * tail) < REFUSAL_RATE:
        raise ValueError("these are no Gaussian scores: use audit_scores or audit_one_run")
