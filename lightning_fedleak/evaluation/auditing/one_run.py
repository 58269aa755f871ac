"""Lower bounds on epsilon from one run with many canaries.

From (epsilon, delta) alone: Steinke, Nasr & Jagielski 2023, arXiv 2305.08846. From the whole
trade-off curve of the claim: Mahloujifar, Melis & Chaudhuri 2024, arXiv 2410.22235. The derivation
of what :func:`exceeds` computes:

Let F(x) be the largest chance that the claim allows, with a canary, to an event that has chance x
without it, and with the two exchanged; F is concave. The auditor guesses r of m canaries, W of them
correctly, and p_j is the chance of W = j. Fix a canary i, all other bits, and a set J. "The guess
for i is b, and the number of correct guesses of the *other* canaries is in J" is an event of what
was released. So its chance where i's bit is b is at most F of its chance where the bit is the
other. The mean over both b, all other bits and all i goes into F by Jensen's inequality:

    sum_(j in J) (j + 1) p_(j + 1) / m  <=  F(sum_(j in J) (r - j) p_j / m).

For J = {c - 1, c, ...} that is ``R_c <= F(H_(c - 1))``, where ``R_c = sum_(j >= c) j p_j / m``
and ``H_c = sum_(j >= c) (r - j) p_j / m``. Suppose P[W >= v] is tau or more. Then R_v is smallest
where all of tau lies at v. For smaller c, ``H_(c - 1) >= max(H_c, F^-1(R_c))``, and what is added
to H at j is (r - j) / j of what is added to R. So by Abel's summation R_j is at least an increasing
function of all R above it, and the smallest R_j follow one from the other. Because ``R_j + H_j`` is
at most ``r / m``, tau is refuted where the smallest ones add up to more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import bdtr, bdtrc, expit, ndtr, ndtri
from torch import Tensor

from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.evaluation.auditing import lower_bounds
from lightning_fedleak.validate import check_integer, check_number

if TYPE_CHECKING:
    from lightning_fedleak.evaluation.canaries import CanarySet, InclusionRecord


BISECTIONS = 36  # of an interval of 0.5: epsilon to 1e-11; more: slower
FEWEST = 16  # guesses in the smallest choice of the default; not tuned; all can show epsilon 1.6
LEAST_FAIR = 1e-9  # chance of so uneven bits below which an audit refuses them; not tuned


def one_run_p_value(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0
) -> float:
    """Return a bound on the chance of so many right guesses under (epsilon, delta)-DP.

    arXiv 2305.08846v1, Corollary 5.4 and Appendix D: with r guesses and the rest abstentions, and W
    binomial, of r trials with chance ``sigmoid(epsilon)``, it is
    ``P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i``.

    Args:
        canaries: m, each with a fair inclusion bit.
        guesses: r, canaries on which the auditor did not abstain. Which they are, and how many,
            may depend on the scores, but not on the inclusion bits.
        right: v of them.
        epsilon: of the claim, for adding or removing one canary.
        delta: of the claim.

    Raises:
        ValueError: impossible counts.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(
            f"need 0 <= right <= guesses <= canaries, got {right}, {guesses} and {canaries}"
        )
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
    """Return whether so many right guesses have a chance below ``error`` under a claim of f-DP.

    Args:
        canaries: m.
        guesses: r, as for :func:`one_run_p_value`.
        right: v.
        least: F^-1 of the claim: the smallest chance without a canary that the claim allows to an
            event that has the chance passed with it, and with the two exchanged.
        error: tau.
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


def one_run_epsilon(
    canaries: int,
    guesses: int,
    right: int,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    claim: lower_bounds.Claim = "dp",
) -> float:
    """Return a lower bound on epsilon from one run.

    The number of guesses must not depend on the inclusion bits.

    For (epsilon, delta)-DP it is the larger of two: that of :func:`one_run_p_value`, and that of
    the trade-off curve (:func:`exceeds`). Both bound the chance of the same event, so no error is
    split between them.

    Args:
        canaries: m, each with a fair inclusion bit.
        guesses: on how many of them the auditor did not abstain.
        right: guesses that were right.
        delta: of the bound.
        confidence: of the bound.
        claim: as for :func:`~lightning_fedleak.evaluation.auditing.audit_scores`.

    Raises:
        ValueError: impossible counts, delta or confidence.
    """
    audited = lower_bounds.AuditedClaim(delta, confidence, claim=claim)
    return _epsilon_of_counts((canaries, guesses, right), audited)


def _epsilon_of_counts(counts: tuple[int, int, int], audited: lower_bounds.AuditedClaim) -> float:
    """Return the bound of :func:`one_run_epsilon` for canaries, guesses and right ones."""
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
    """Return where a claim ceases to be refuted; 0 where even the strongest is not."""
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

    The canaries with the largest scores are guessed to be in, those with the smallest to be out,
    and the auditor abstains on those between. For mechanisms other than randomised response a gap
    to the true epsilon remains that more canaries do not close. It is narrower where the claim is
    of a Gaussian mechanism; where scores are Gaussian themselves
    :func:`~lightning_fedleak.evaluation.auditing.audit_gaussian_scores` shows most.

    Args:
        scores: (m,) higher is more likely included.
        members: (m,) bool, the inclusion bits.
        delta: of the bound.
        confidence: of the bound.
        guesses: how many, half of them at either end. Default: all canaries, a fourth of them, a
            sixteenth, and so on down to 16, which share the error (Bonferroni).
        claim: as for :func:`~lightning_fedleak.evaluation.auditing.audit_scores`.
        seed: of the order of equal scores.

    Raises:
        ValueError: lengths differ, more guesses than canaries, no guesses, inclusion bits that are
            not fair, or as :func:`one_run_epsilon`.
    """
    audited = lower_bounds.AuditedClaim(delta, confidence, claim=claim)
    counts, m = _count_right(scores, members, guesses, seed), scores.numel()
    each = replace(audited, confidence=1 - audited.error / len(counts))
    unknown = bool(scores.isnan().any())
    return audited.bound(
        math.nan if unknown else max(_epsilon_of_counts((m, *count), each) for count in counts),
        max(_epsilon_of_counts((m, n, n), each) for n, _ in counts),
        m,
        f"one run, {len(counts)} choice{'s' * (len(counts) > 1)} of how many to guess",
    )


def refutes(scores: Tensor, members: Tensor, curve: Curve, *, confidence: float = 0.95) -> bool:
    """Return whether the scores of m canaries after a single run refute a whole trade-off curve.

    A curve that holds is refuted with probability at most ``1 - confidence``. What is not refuted
    is not confirmed.

    Args:
        scores: (m,) higher is more likely included, as for :func:`audit_one_run`.
        members: (m,) bool, the inclusion bits.
        curve: pairs (epsilon, delta) that are claimed to hold for adding or removing one canary.
        confidence: of the refutation.

    Raises:
        ValueError: a score that is NaN, or as :func:`audit_one_run`.
    """
    check_number("confidence", confidence, above=0, below=1)
    if bool(scores.isnan().any()):
        raise ValueError(
            "a canary has no score (NaN): which are scored must not depend on inclusion"
        )
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
    """Return how many guesses each choice makes, and how many of them are right."""
    score, member = lower_bounds.columns(scores, members)
    m, inside = score.size, int(member.sum())
    if min(bdtr(inside, m, 0.5), bdtr(m - inside, m, 0.5)) < LEAST_FAIR:
        raise ValueError(
            f"{inside} of {m} canaries are in, which fair inclusion bits would not give: a one-run "
            "audit needs an independent fair bit for each canary"
        )
    shuffled = np.random.default_rng(seed).permutation(m)
    order = shuffled[np.argsort(score[shuffled], kind="stable")]
    check_integer("guesses", guesses, at_most=m, hint="one for each canary", optional=True)
    choices = [m >> i for i in range(0, m.bit_length(), 2) if i == 0 or m >> i >= FEWEST]
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
    guesses: int | None = None,
    claim: lower_bounds.Claim = "dp",
    seed: int = 0,
) -> lower_bounds.EpsilonBound:
    """Return a lower bound on the epsilon of one training run, from its canaries' scores.

    ::

        train = with_canaries(train, texts, record="secret/inclusion.json")
        scorer = CanaryScorer(train.canaries)
        ...                                     # one run with this callback
        print(audit_canaries(train.canaries, scorer.scores(), delta=1e-5))

    arXiv 2305.08846 holds for scores that depend on the inclusion bits only through what the run
    released. So every canary needs a score, also a held-out one, and all by one rule: at the same
    steps, reduced over steps alike (``scores.amax(0)``, say), as
    :class:`~lightning_fedleak.callbacks.CanaryScorer` does. Do not pass scores of the steps at
    which a canary was in the batch against other canaries' scores at other steps: the steps
    reveal the bits.

    A canary that is repeated is no single neighbour. Of ``with_canaries(times=(1, 4, 16))`` those
    that occur in the data once are counted, in or out.

    Args:
        canaries: of :func:`~lightning_fedleak.evaluation.canaries.with_canaries`, or their record.
        scores: (m,) for the m canaries in their order, higher is more likely included.
        delta: of the bound.
        confidence: of the bound.
        guesses: as in :func:`~lightning_fedleak.evaluation.auditing.audit_one_run`.
        claim: as in :func:`~lightning_fedleak.evaluation.auditing.audit_one_run`.
        seed: of the order of equal scores.

    Raises:
        ValueError: not one score for each canary, inclusion bits that are not fair, no canary that
            is not repeated, or as :func:`~lightning_fedleak.evaluation.auditing.audit_one_run`.
    """
    source: Any = canaries
    record: InclusionRecord = getattr(source, "record", source)
    m = len(record.included)
    if scores.shape != (m,):
        raise ValueError(
            f"scores must be ({m},), one for each canary, included or not; got "
            f"{tuple(scores.shape)}. Reduce steps first, by one rule for all."
        )
    if record.probability != 0.5:
        raise ValueError(
            f"the canaries were included with probability {record.probability:g}, but a one-run "
            "audit needs fair inclusion bits: with_canaries(..., probability=0.5)"
        )
    single = torch.tensor(record.repeats) == 1
    if not bool(single.any()):
        raise ValueError(
            "every canary is repeated, and epsilon is of one record: with_canaries(times=(1, ...))"
        )
    return audit_one_run(
        scores[single],
        torch.tensor(record.included)[single],
        delta=delta,
        confidence=confidence,
        guesses=guesses,
        claim=claim,
        seed=seed,
    )
