"""Lower bounds on epsilon from one run with many canaries.

By (epsilon, delta) alone: Steinke, Nasr & Jagielski 2023, arXiv 2305.08846. By the whole trade-off
curve of the claim: Mahloujifar, Melis & Chaudhuri 2024, arXiv 2410.22235. What :func:`exceeds`
computes is derived here, so that it can be checked:

Let F(x) be the largest chance that the claim allows for an event of chance x without a canary once
the canary is there, and the other way round; F is concave. Say r of m canaries are guessed, W of
them right, and p_j is the chance of W = j. Fix a canary i, all other coins, and a set J. Whether i
is guessed to be b, while the number of right guesses among the *others* is in J, is an event of
what was released. So its chance where i's coin is b is at most F of its chance where it is the
other. The mean over both b, all other coins and all i goes into F by Jensen's inequality:

    sum_(j in J) (j + 1) p_(j + 1) / m  <=  F(sum_(j in J) (r - j) p_j / m).

For J = {c - 1, c, ...} that is ``R_c <= F(H_(c - 1))``, where ``R_c = sum_(j >= c) j p_j / m``
and ``H_c = sum_(j >= c) (r - j) p_j / m``. Suppose P[W >= v] is tau or more. Then R_v is smallest
where all of tau lies at v. From there down ``H_(c - 1) >= max(H_c, F^-1(R_c))``, and what is added
to H at j is (r - j) / j of what is added to R. So by Abel's summation R_j is at least an increasing
function of all R above it, and the smallest R_j follow one from the other. As ``R_j + H_j`` can be
no more than ``r / m``, tau is refuted where these smallest add up to more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import bdtr, bdtrc, expit, ndtr, ndtri
from torch import Tensor

from lightning_fedleak.auditing.lower_bounds import (
    Claim,
    EpsilonBound,
    Relation,
    check,
    check_claim,
    columns,
    must_halve,
)
from lightning_fedleak.defenses.noise import gaussian_epsilon

if TYPE_CHECKING:
    from lightning_fedleak.canaries import CanarySet, InclusionRecord


BISECTIONS = 36
FEWEST = 16
FAIR = 1e-9

RELATION: dict[str, Relation] = {"add_remove": "add_remove", "replace": "replace_one"}
"""By the game of the record: a canary is there or not, or it or an item of the data is."""


def one_run_p_value(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0
) -> float:
    """Bound on the chance of so many right guesses under (epsilon, delta)-DP.

    arXiv 2305.08846v1, Corollary 5.4 and Appendix D: with r guesses and the rest abstentions, and W
    binomial, of r trials with chance ``sigmoid(epsilon)``, it is
    ``P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i``.

    Args:
        canaries: m, each included by a fair coin of its own.
        guesses: r, canaries on which the auditor did not abstain. Which they are, and how many,
            may hang on the scores, but not on the coins.
        right: v of them.
        epsilon: of the claim, for adding or removing one canary.
        delta: of the claim.

    Raises:
        ValueError: impossible counts, or a negative epsilon or delta.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(
            f"need 0 <= right <= guesses <= canaries, got {right}, {guesses} and {canaries}"
        )
    if not (epsilon >= 0 and delta >= 0):
        raise ValueError(f"epsilon and delta cannot be negative, got {epsilon} and {delta}")
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
    """Whether so many right guesses have a chance below ``error`` under a claim of f-DP.

    Args:
        canaries: m.
        guesses: r, as for :func:`one_run_p_value`.
        right: v.
        least: F^-1 of the claim: the smallest chance that an event may have without a canary, which
            has this one with it; and the other way round.
        error: tau.
    """
    whole = guesses / canaries
    held = error * right / canaries
    missed = error * (guesses - right) / canaries
    for below in range(right - 1, -1, -1):
        more = least(held)
        if more <= missed:
            return False
        held += below / (guesses - below) * (more - missed)
        missed = more
        if held + missed > whole:
            return True
    return False


def least_of_gaussian(mu: float, chance: float) -> float:
    """F^-1 of mu-Gaussian DP: ``Phi(Phi^-1(y) - mu)``."""
    return float(ndtr(ndtri(min(chance, 1.0)) - mu))


def least_of_dp(epsilon: float, delta: float, chance: float) -> float:
    """F^-1 of (epsilon, delta)-DP."""
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
    relation: Relation = "add_remove",
    accountant: Relation | None = None,
    claim: Claim = "dp",
) -> float:
    """Lower bound on epsilon from one run; ``guesses`` was settled without sight of the coins.

    Of (epsilon, delta)-DP it is the larger of two: by :func:`one_run_p_value`, and by the trade-off
    curve (:func:`exceeds`). Both bound the chance of the same event, so neither pays for the other.

    Args:
        canaries: m, each included by a fair coin of its own.
        guesses: on how many of them the auditor did not abstain.
        right: guesses that were right.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        relation: what a coin decides: whether the canary is there, or which of two is.
        accountant: of the epsilon; default that of the game.
        claim: as for :func:`~lightning_fedleak.auditing.audit_scores`.

    Raises:
        ValueError: impossible counts, delta or confidence, or no bridge between the relations.
    """
    check(delta, confidence)
    check_claim(claim, delta)
    halve = must_halve(relation, accountant)
    error = 1 - confidence
    one_run_p_value(canaries, guesses, right, 0.0)  # refuses impossible counts
    counts = canaries, guesses, right
    if claim == "gaussian":
        times = 2 if halve else 1

        def apart(mu: float) -> bool:
            return exceeds(*counts, functools.partial(least_of_gaussian, times * mu), error)

        mu = _largest(apart)
        return gaussian_epsilon(sigma=1 / mu, delta=delta) if mu > 0 else 0.0

    def refuted(epsilon: float) -> bool:
        claimed = epsilon, delta
        if halve:
            claimed = 2 * epsilon, min(1.0, (1 + math.exp(epsilon)) * delta)
        if one_run_p_value(*counts, *claimed) <= error:
            return True
        return delta > 0 and exceeds(*counts, functools.partial(least_of_dp, *claimed), error)

    return _largest(refuted)


def _largest(refuted: Callable[[float], bool]) -> float:
    """Where a claim ceases to be refuted; 0 where even the strongest is not."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 0.5
    while refuted(high):
        low, high = high, high + 0.5
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def audit_one_run(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    guesses: int | Sequence[tuple[int, int]] | None = None,
    relation: Relation = "add_remove",
    accountant: Relation | None = None,
    claim: Claim = "dp",
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on epsilon from the scores of m canaries after a single run.

    The canaries with the largest scores are guessed to be in, those with the smallest to be out,
    and the auditor abstains on those between. For mechanisms other than randomised response a gap
    to the true epsilon remains that more canaries do not close. It is narrower where the claim is
    of a Gaussian mechanism; where scores are Gaussian themselves
    :func:`~lightning_fedleak.auditing.audit_gaussian_scores` shows most.

    Args:
        scores: (m,) higher is more likely included.
        members: (m,) bool, how the coins fell.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        guesses: how many, half of them at either end; or pairs (in, out) of how many at each.
            Several pairs share the error (Bonferroni). Default: all canaries, a fourth of them, a
            sixteenth, and so on down to 16.
        relation: what a coin decides: whether the canary is there, or which of two is.
        accountant: of the epsilon; default that of the game.
        claim: as for :func:`~lightning_fedleak.auditing.audit_scores`.
        seed: of the order of equal scores.

    Raises:
        ValueError: lengths differ, more guesses than canaries, no guesses, members that fair coins
            would not have given, or as :func:`one_run_epsilon`.
    """
    check(delta, confidence)
    score, member = columns(scores, members)
    m, inside = score.size, int(member.sum())
    if min(bdtr(inside, m, 0.5), bdtr(m - inside, m, 0.5)) < FAIR:
        raise ValueError(
            f"{inside} of {m} canaries are in, which fair coins would not give: one-run audits "
            "need each canary included by an independent fair coin"
        )
    pairs = _pairs(guesses, m)
    shuffled = np.random.default_rng(seed).permutation(m)
    order = shuffled[np.argsort(score[shuffled], kind="stable")]

    def shown(total: int, right: int) -> float:
        return one_run_epsilon(
            m,
            total,
            right,
            delta=delta,
            confidence=1 - (1 - confidence) / len(pairs),
            relation=relation,
            accountant=accountant,
            claim=claim,
        )

    epsilon = limit = 0.0
    for n_in, n_out in pairs:
        right = int(member[order[m - n_in :]].sum()) + int((~member[order[:n_out]]).sum())
        epsilon = max(epsilon, shown(n_in + n_out, right))
        limit = max(limit, shown(n_in + n_out, n_in + n_out))
    return EpsilonBound(
        epsilon=math.nan if np.isnan(score).any() else epsilon,
        delta=delta,
        confidence=confidence,
        relation=accountant or relation,
        games=m,
        limit=limit,
        method=f"one run, {len(pairs)} choice{'s' * (len(pairs) > 1)} of how many to guess"
        + (", as a Gaussian mechanism" if claim == "gaussian" else ""),
    )


def _pairs(guesses: int | Sequence[tuple[int, int]] | None, m: int) -> list[tuple[int, int]]:
    if guesses is None or isinstance(guesses, int):
        totals = [m >> i for i in range(0, m.bit_length(), 2) if i == 0 or m >> i >= FEWEST]
        totals = totals if guesses is None else [guesses]
        pairs = [(n - n // 2, n // 2) for n in totals]
    else:
        pairs = [(n_in, n_out) for n_in, n_out in guesses]
    if not pairs:
        raise ValueError("guesses=[] makes no guess: give a number, pairs (in, out), or None")
    for n_in, n_out in pairs:
        if n_in < 0 or n_out < 0 or not 1 <= n_in + n_out <= m:
            raise ValueError(f"cannot make {n_in} + {n_out} guesses about {m} canaries")
    return pairs


def audit_canaries(
    canaries: CanarySet | InclusionRecord,
    scores: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    guesses: int | Sequence[tuple[int, int]] | None = None,
    accountant: Relation | None = None,
    claim: Claim = "dp",
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on the epsilon of one training run, from its canaries' scores.

    ::

        train = with_canaries(train, texts, record="secret/inclusion.json")
        games = Games(canaries=train.canaries, score_canaries="max")
        monitor = LeakageMonitor(attack, games=games)
        ...                                     # one run; an attack scores every canary
        print(audit_canaries(train.canaries, monitor.canary_scores(), delta=1e-5))

    arXiv 2305.08846 holds for scores that follow from what the run released, and from the coins
    through that alone. So every canary needs a score, those that were left out as well, all made in
    one way: at the same steps, reduced over steps by the same rule (``scores.amax(0)``, say).
    :meth:`LeakageMonitor.canary_scores` gives such scores; it says under which defences they are
    evidence. Scores of the steps at which a canary was in the
    batch, against others' at other steps, show the coins by themselves; what the monitor logs as
    ``audit/`` are rates over such games, and not to be used here.

    Args:
        canaries: of :func:`~lightning_fedleak.canaries.with_canaries`, or their record.
        scores: (m,) for the m canaries in their order, higher is more likely included.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        guesses: as in :func:`~lightning_fedleak.auditing.audit_one_run`.
        accountant: the relation of the epsilon, default that of the record's game.
        claim: as in :func:`~lightning_fedleak.auditing.audit_one_run`.
        seed: of the order of equal scores.

    Raises:
        ValueError: not one score for each canary, a score that is NaN, coins that are not fair, or
            as :func:`~lightning_fedleak.auditing.audit_one_run`.
    """
    given: Any = canaries
    record: InclusionRecord = getattr(given, "record", given)
    m = len(record.included)
    if scores.shape != (m,):
        raise ValueError(
            f"scores must be ({m},), one for each canary, included or not; got "
            f"{tuple(scores.shape)}. Reduce steps first, by one rule for all."
        )
    if bool(scores.isnan().any()):
        raise ValueError(
            f"{int(scores.isnan().sum())} of {m} canaries have no score (NaN): which ones are "
            "scored must not hang on the coins, so score all of them"
        )
    if record.probability != 0.5:
        raise ValueError(
            f"the canaries were included with probability {record.probability:g}, and a one-run "
            "audit needs fair coins: with_canaries(..., probability=0.5)"
        )
    return audit_one_run(
        scores,
        torch.tensor(record.included),
        delta=delta,
        confidence=confidence,
        guesses=guesses,
        relation=RELATION[record.game],
        accountant=accountant,
        claim=claim,
        seed=seed,
    )
