"""Lower bounds on epsilon from independent membership games, and the rates that a claim allows.

:func:`audit_scores` bounds epsilon from the scores of independent games, under one of two
neighbouring relations. In an ``"add_remove"`` game the target is in the batch or absent, as the
accountants of DP-SGD assume. In a ``"replace_one"`` game (Vu et al. 2024, Fig. 2) another sample
replaces it. A bound holds only for the relation of the game.

The functions before it give the rates of the best attack in closed form: against a Gaussian
mechanism, and against any mechanism with (epsilon, delta)-DP. The mechanism runs on one of two
inputs, and a test of its output guesses which one. FPR and TPR are the probabilities that the test
says "member" on the input without the target and on the input with it.

*sigma* is the noise multiplier: noise of standard deviation ``sigma * sensitivity``. The
sensitivity is the distance of the results on both inputs: the clip norm if one record is added or
removed, twice the clip norm if one is replaced (then halve sigma).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from scipy.special import ndtr, ndtri
from torch import Tensor

from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.defenses.noise import gaussian_epsilon
from lightning_fedleak.evaluation.metrics.clustered import Floats, Ints, columns
from lightning_fedleak.evaluation.metrics.rates import clopper_pearson
from lightning_fedleak.validate import check_choice, check_number

FPRS = 300  # points of an area under a curve, in each half; fewer: error above 1e-4. Not tuned
MIN_FPR = 1e-7  # smallest FPR above 0 of these points; the area below is no larger. Not tuned


def gaussian_tpr(fpr: float, sigma: float) -> float:
    """Return the TPR at an FPR: ``Phi(1 / sigma + Phi^-1(fpr))`` (Dong, Roth & Su 2022, Eq. 6)."""
    check_number("sigma", sigma, above=0)
    return float(ndtr(1 / sigma + ndtri(fpr)))


def gaussian_auc(sigma: float) -> float:
    """Return the AUC of the best test of a Gaussian mechanism, ``Phi(1 / (sigma sqrt 2))``."""
    check_number("sigma", sigma, above=0)
    return float(ndtr(1 / (sigma * math.sqrt(2))))


def dp_tpr(fpr: float, epsilon: float, delta: float = 0.0) -> float:
    """Return the largest TPR that (epsilon, delta)-DP allows at an FPR (Kairouz, Oh & Viswanath
    2015).
    """
    direct = math.exp(epsilon) * fpr + delta
    mirrored = 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return max(0.0, min(1.0, direct, mirrored))


def dp_auc(epsilon: float, delta: float = 0.0) -> float:
    """Return the largest AUC that (epsilon, delta)-DP allows: the area under :func:`dp_tpr`."""
    corner = (1 - delta) / (1 + math.exp(epsilon))
    rising = corner * (delta + 1 - corner) / 2
    flat = (1 - delta - corner) * (2 - corner) / 2
    return rising + flat + delta


def curve_tpr(fpr: float, curve: Curve) -> float:
    """Return the largest TPR at an FPR that all pairs (epsilon, delta) of a curve allow."""
    return min((dp_tpr(fpr, *pair) for pair in curve), default=1.0)


def curve_auc(curve: Curve) -> float:
    """Return the largest AUC that all pairs (epsilon, delta) of a curve allow: the area under
    :func:`curve_tpr`.
    """
    near = np.geomspace(MIN_FPR, 0.5, FPRS)
    fprs = np.concatenate([[0.0], near, 1 - near[-2::-1], [1.0]])
    return float(np.trapezoid([curve_tpr(fpr, curve) for fpr in fprs.tolist()], fprs))


if TYPE_CHECKING:
    from lightning_fedleak.evaluation.games import GameResult

Relation = Literal["add_remove", "replace_one"]
Claim = Literal["dp", "gaussian"]

RELATION_NAMES = {"add_remove": "add/remove", "replace_one": "replace-one"}

RATIO = 2.0  # ratio of successive ranks; smaller: more ranks share the error; not tuned


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on epsilon; too large with probability at most ``1 - confidence``.

    Attributes:
        epsilon: the bound; 0 if nothing is shown, NaN (unknown) if a score was NaN.
        delta: the delta at which the bound holds.
        confidence: confidence of the bound, over all thresholds or guesses that were tried.
        relation: neighbouring relation of the epsilon.
        games: number of games or canaries.
        limit: the bound of a perfect attack in as many games.
        method: how thresholds or guesses were chosen, and what else was assumed.
    """

    epsilon: float
    delta: float
    confidence: float
    relation: Relation
    games: int
    limit: float
    method: str

    def __str__(self) -> str:
        """Return the bound in one line."""
        if math.isnan(self.epsilon):
            relation = RELATION_NAMES[self.relation]
            return f"epsilon is unknown: a score is NaN ({relation}, {self.method})"
        return (
            f"epsilon >= {self.epsilon:.3f} at delta {self.delta:g} "
            f"({RELATION_NAMES[self.relation]}, {self.confidence:.0%} confidence; "
            f"{self.games} games, which could show {self.limit:.2f} at most; {self.method})"
        )


@dataclass(frozen=True)
class AuditedClaim:
    """The kind of claim that an audit refutes, with the settings of its bound.

    Attributes:
        delta: delta of the bound.
        confidence: confidence of the bound.
        relation: relation of the game.
        claim: as for :func:`audit_scores`.

    Raises:
        ValueError: a value out of range, or a claim without an epsilon at this delta.
    """

    delta: float
    confidence: float
    relation: Relation = "add_remove"
    claim: Claim = "dp"

    def __post_init__(self) -> None:
        above, least = (0.0, None) if self.gaussian else (None, 0.0)
        check_number("delta", self.delta, above=above, at_least=least, below=1)
        check_number("confidence", self.confidence, above=0, below=1)
        check_choice("claim", self.claim, get_args(Claim))
        check_choice("relation", self.relation, list(RELATION_NAMES))

    @property
    def gaussian(self) -> bool:
        """Return whether the claim is that of a Gaussian mechanism."""
        return self.claim == "gaussian"

    @property
    def error(self) -> float:
        """Return the probability that the bound is too large."""
        return 1 - self.confidence

    def strength(self, fnr: Floats, fpr: Floats) -> Floats:
        """Return (K,) mu for a Gaussian mechanism, else the larger e^epsilon of both directions.

        Args:
            fnr: (K,) upper bounds of false negative rates.
            fpr: (K,) upper bounds of false positive rates.
        """
        if self.gaussian:
            mu: Floats = -ndtri(fnr) - ndtri(fpr)
            return mu
        tpr, tnr = np.maximum(1 - fnr - self.delta, 0.0), np.maximum(1 - fpr - self.delta, 0.0)
        return np.maximum(tpr / fpr, tnr / fnr)

    def epsilon(self, fnr: Floats, fpr: Floats) -> float:
        """Return the largest epsilon that any pair of rates refutes; 0 if none does."""
        best = float(self.strength(fnr, fpr).max())
        return self.epsilon_of_mu(best) if self.gaussian else math.log(max(1.0, best))

    def epsilon_of_mu(self, mu: float) -> float:
        """Return the epsilon of the Gaussian mechanism with noise ``1 / mu``; 0 for mu below 0."""
        return gaussian_epsilon(sigma=1 / mu, delta=self.delta) if mu > 0 else 0.0

    def bound(self, epsilon: float, limit: float, games: int, method: str) -> EpsilonBound:
        """Return the bound with the settings and assumptions of this claim."""
        method += ", as a Gaussian mechanism" if self.gaussian else ""
        stated = epsilon, self.delta, self.confidence, self.relation
        return EpsilonBound(*stated, games, limit, method)


def audit_scores(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    threshold: Literal["union"] | float = "union",
    relation: Relation = "add_remove",
    claim: Claim = "dp",
) -> EpsilonBound:
    """Return a lower bound on epsilon from the scores of independent games.

    If the same games chose a threshold and judged it, epsilon would be overstated. Hence:

    - ``"union"``: thresholds at the 1st, 2nd, 4th, 8th, ... largest score of the non-members and
      smallest of the members. These ranks are fixed before any score is seen. The error is divided
      by the number of rates that are bounded (Bonferroni). A non-member's rank bounds the FPR of
      the threshold at its score, for any distribution of the scores. Given that threshold, the
      members' count is binomial. The same holds with members and non-members exchanged. This is
      the tightest choice for scores that rarely tie.
    - a number, which was chosen before, from other runs. b' = 1 if ``score > threshold``.

    ``claim="dp"`` refutes (epsilon, delta)-DP and assumes nothing else. ``claim="gaussian"``
    refutes the stronger claim that no test does better than against a Gaussian mechanism of some
    sigma, and returns this mechanism's epsilon at delta (Nasr et al. 2023, arXiv 2302.07956). The
    bound is then far tighter at a small delta. It is right if the accountant claims just that: for
    a step of DP-SGD whose batch is fixed except for the target. It is *not* a bound on the epsilon
    of another mechanism.

    Args:
        scores: (n,), higher for likelier members.
        members: (n,) bool.
        delta: delta of the bound.
        confidence: confidence of the bound.
        threshold: ``"union"`` or a number.
        relation: relation of the game, and so of the epsilon.
        claim: ``"dp"`` or ``"gaussian"``.

    Raises:
        ValueError: lengths differ, members or non-members are missing, an unknown threshold or
            claim, or delta or confidence out of range.
    """
    audited = AuditedClaim(delta, confidence, relation, claim)
    score, member = columns(scores, members)
    member_scores, other_scores = np.sort(score[member]), np.sort(score[~member])
    if not member_scores.size or not other_scores.size:
        raise ValueError("games with the target and games without are needed")

    is_fixed = isinstance(threshold, (int, float)) and not math.isnan(threshold)
    if not is_fixed and threshold != "union":
        raise ValueError(f"threshold must be 'union' or a number, got {threshold!r}")

    def bound_at(member_scores: Floats, other_scores: Floats, cut: Any) -> float:
        if is_fixed:
            rates = _rates_at_cut(cut, member_scores, other_scores, audited.error / 2)
        else:
            rates = _rates_at_ranks(member_scores, other_scores, audited.error)
        return audited.epsilon(*rates)

    is_unknown = np.isnan(score).any()
    return audited.bound(
        math.nan if is_unknown else bound_at(member_scores, other_scores, threshold),
        # The limit: the bound of an attack that separates all games, by a cut at 0.5.
        bound_at(np.ones(member_scores.size), np.zeros(other_scores.size), 0.5),
        score.size,
        "threshold fixed beforehand" if is_fixed else "union over thresholds",
    )


# ---- rates ----------------------------------------------------------------------------------


def _rates_at_ranks(
    member_scores: Floats, other_scores: Floats, error: float
) -> tuple[Floats, Floats]:
    """Return (K,) upper bounds of FNR and FPR, all right with probability ``1 - error``."""
    top, bottom = _ranks(other_scores.size), _ranks(member_scores.size)
    error_of_each = error / (2 * (top.size + bottom.size))
    high, low = other_scores[-top], member_scores[bottom - 1]
    misses = np.searchsorted(member_scores, high, "right")
    false_alarms = other_scores.size - np.searchsorted(other_scores, low, "left")
    fnr = _upper_bounds(np.r_[misses, bottom - 1], member_scores.size, error_of_each)
    fpr = _upper_bounds(np.r_[top - 1, false_alarms], other_scores.size, error_of_each)
    return fnr, fpr


def _rates_at_cut(
    cut: float, member_scores: Floats, other_scores: Floats, error: float
) -> tuple[Floats, Floats]:
    """Return (1,) Clopper-Pearson's upper bounds of FNR and FPR of ``score > cut``."""
    misses, false_alarms = (member_scores <= cut).sum(), (other_scores > cut).sum()
    fnr = _upper_bounds(np.array([misses]), member_scores.size, error)
    return fnr, _upper_bounds(np.array([false_alarms]), other_scores.size, error)


def _ranks(n: int) -> Ints:
    """Return ranks from 1 to n at most, each about ``RATIO`` times the one before."""
    # 1e-9: logarithms and powers may be just below an integer.
    steps = np.arange(int(math.log(n) / math.log(RATIO) + 1e-9) + 1)
    return np.unique((RATIO**steps + 1e-9).astype(np.int64))


def _upper_bounds(count: Ints, n: int, error: float) -> Floats:
    """Return Clopper-Pearson's upper bounds of rates."""
    return np.array([clopper_pearson(k, n - k, 2 * error)[1] for k in count.tolist()])


def audit_games(
    result: GameResult, *, delta: float = 0.0, confidence: float = 0.95
) -> EpsilonBound:
    """Return a lower bound on epsilon from the games of one adversary.

    For the usual accountant of DP-SGD play ``GameConfig(relation="add_remove")``. Games of
    ``"replace_one"`` are for a replace-one epsilon: that of a client that randomises its tokens,
    ``play(..., defend=...)``.

    Args:
        result: what :func:`~lightning_fedleak.evaluation.games.play` returned, with one target in
            each batch.
        delta: delta of the bound.
        confidence: confidence of the bound.

    Raises:
        ValueError: games that share batches, or what
            :func:`~lightning_fedleak.evaluation.auditing.audit_scores` refuses.
    """
    if len(set(result.batches.tolist())) != len(result):
        raise ValueError("play GameConfig(targets_per_batch=1) to bound epsilon")
    return audit_scores(
        result.scores, result.bits, delta=delta, confidence=confidence, relation=result.relation
    )
