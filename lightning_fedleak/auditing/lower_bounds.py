"""Lower bounds on epsilon from independent games, and the relation of neighbours they are for.

In an ``"add_remove"`` game the target is in the batch or absent, as the accountants of DP-SGD
assume. In Fig. 2's game (Vu et al. 2024) another sample stands in its place: ``"replace_one"``. A
bound is for the relation of the game unless ``accountant`` names the other one. There is a bridge
one way: to replace is to remove and to add, so that (epsilon, delta)-DP under add/remove implies
``(2 epsilon, (1 + e^epsilon) delta)``-DP under replace-one, and mu-Gaussian DP implies 2 mu. A
replace-one game that refutes the latter refutes the former; the bound is about half as large.
Nothing follows the other way round: a mechanism that is private when one record is replaced may
tell outright how many there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri
from torch import Tensor

from lightning_fedleak.defenses.noise import gaussian_epsilon

if TYPE_CHECKING:
    from lightning_fedleak.games import GameResult


Floats = NDArray[np.float64]
Relation = Literal["add_remove", "replace_one"]

WORDS = {"add_remove": "add/remove", "replace_one": "replace-one"}

Ints = NDArray[np.int64]
Claim = Literal["dp", "gaussian"]

COARSE, FINE = 2.0, 1.05


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on epsilon; too large with probability at most ``1 - confidence``.

    Attributes:
        epsilon: the bound; 0 where nothing is shown, NaN (unknown) where a score was NaN.
        delta: at which it holds.
        confidence: of the bound, over everything that was tried.
        relation: of the epsilon.
        games: games or canaries.
        limit: the bound that a perfect attack would have given in so many games.
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
        """In one line."""
        if math.isnan(self.epsilon):
            return f"epsilon is unknown: a score is NaN ({WORDS[self.relation]}, {self.method})"
        return (
            f"epsilon >= {self.epsilon:.3f} at delta {self.delta:g} ({WORDS[self.relation]}, "
            f"{self.confidence:.0%} confidence; {self.games} games, which could show "
            f"{self.limit:.2f} at most; {self.method})"
        )


def must_halve(relation: Relation, accountant: Relation | None) -> bool:
    """Whether a replace-one game is to bound an add/remove epsilon.

    Raises:
        ValueError: an unknown relation, or no bridge between the two.
    """
    for name, value in (("relation", relation), ("accountant", accountant or relation)):
        if value not in WORDS:
            raise ValueError(f"{name} must be 'add_remove' or 'replace_one', got {value!r}")
    if accountant is None or accountant == relation:
        return False
    if accountant == "replace_one":
        raise ValueError(
            "an add/remove game bounds no replace-one epsilon: a mechanism that is private when "
            "one record is replaced may still tell how many there are. Play the game that "
            "replaces the target, or audit an add/remove accountant."
        )
    return True


def columns(scores: Tensor, members: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    """Scores and bits as numpy.

    Raises:
        ValueError: lengths differ.
    """
    score = scores.detach().reshape(-1).cpu().double().numpy()
    member = members.detach().reshape(-1).bool().cpu().numpy()
    if score.size != member.size:
        raise ValueError(
            f"members holds {member.size} games, scores {score.size}: give one value for each"
        )
    return score, member


def check(delta: float, confidence: float) -> None:
    """Refuses what is no probability.

    Raises:
        ValueError: delta outside [0, 1), or confidence outside (0, 1).
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def check_claim(claim: str, delta: float) -> None:
    """Refuses a claim that is not known, or that says nothing at this delta.

    Raises:
        ValueError: says which.
    """
    if claim not in ("dp", "gaussian"):
        raise ValueError(f"claim must be 'dp' or 'gaussian', got {claim!r}")
    if claim == "gaussian" and delta == 0:
        raise ValueError("a Gaussian mechanism has no epsilon at delta 0: give delta=...")


def epsilon_from_counts(
    tp: int,
    positives: int,
    fp: int,
    negatives: int,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    relation: Relation = "add_remove",
    accountant: Relation | None = None,
    claim: Claim = "dp",
) -> float:
    """Lower bound on epsilon from the counts of independent games, the test fixed beforehand.

    Clopper-Pearson bounds FNR and FPR from above, each with an error of ``(1 - confidence) / 2``;
    both directions of the definition follow from these two.

    Args:
        tp: games with b = 1 in which b' = 1.
        positives: games with b = 1.
        fp: games with b = 0 in which b' = 1.
        negatives: games with b = 0.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        relation: of the game.
        accountant: of the epsilon; default that of the game.
        claim: as for :func:`audit_scores`.

    Raises:
        ValueError: impossible counts, delta or confidence, or no bridge between the relations.
    """
    if not (0 <= tp <= positives and 0 <= fp <= negatives):
        raise ValueError(
            f"need 0 <= tp <= positives and 0 <= fp <= negatives, got {tp} of {positives} and "
            f"{fp} of {negatives}"
        )
    test = _test(delta, confidence, relation, accountant, claim)
    error = (1 - confidence) / 2
    fnr = _above(np.array([positives - tp]), positives, error)
    fpr = _above(np.array([fp]), negatives, error)
    return test.epsilon(fnr, fpr)


def audit_scores(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    threshold: Literal["union", "split"] | float = "union",
    relation: Relation = "add_remove",
    accountant: Relation | None = None,
    claim: Claim = "dp",
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on epsilon from the scores of independent games.

    A threshold chosen on the games it is judged by would overstate epsilon. Hence:

    - ``"union"``: thresholds at the 1st, 2nd, 4th, 8th, ... largest score of the non-members and
      smallest of the members, ranks that are fixed before any score is seen; the error is divided
      by the number of rates that are bounded (Bonferroni). A non-member's rank bounds the FPR of
      the threshold at its score whatever the law of the scores is, and given that threshold the
      members' count is binomial; likewise with members and non-members exchanged. Tightest for
      scores that rarely tie.
    - ``"split"``: a random half of the games chooses the threshold, the other half is judged.
    - a number: chosen beforehand, from other runs. b' = 1 is ``score > threshold``.

    The claim that is refuted is either ``"dp"``, (epsilon, delta)-DP and nothing else, or
    ``"gaussian"``: that no test does better than against a Gaussian mechanism of some sigma, whose
    epsilon at delta is then given (Nasr et al. 2023, arXiv 2302.07956). The latter is far tighter
    at a small delta, and right where the accountant claims just that: a step of DP-SGD with the
    target's inclusion given. It is *not* a bound on the epsilon of a mechanism of another kind.

    Args:
        scores: (n,) higher is more likely a member.
        members: (n,) bool.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        threshold: ``"union"``, ``"split"`` or a number.
        relation: of the game.
        accountant: of the epsilon; default that of the game.
        claim: ``"dp"`` or ``"gaussian"``.
        seed: of the split.

    Raises:
        ValueError: lengths differ, members or non-members are missing, an unknown threshold or
            claim, or as :func:`epsilon_from_counts`.
    """
    test = _test(delta, confidence, relation, accountant, claim)
    score, member = columns(scores, members)
    held, others = np.sort(score[member]), np.sort(score[~member])
    if not held.size or not others.size:
        raise ValueError(
            f"an audit needs games with the target and without it; got {held.size} and "
            f"{others.size}"
        )
    error = 1 - confidence

    def shown(held: Floats, others: Floats, cut: float) -> float:
        if threshold == "union":
            return test.epsilon(*_at_ranks(held, others, error))
        if threshold == "split":
            return test.epsilon(*_at_chosen(held, others, test, error, np.random.default_rng(seed)))
        return test.epsilon(*_at_cuts(np.array([cut]), held, others, error / 2))

    cut = 0.0
    if threshold == "union":
        method = "union over thresholds"
    elif threshold == "split":
        method = "threshold chosen by one half, judged by the other"
    elif isinstance(threshold, (int, float)) and not math.isnan(threshold):
        method, cut = "threshold fixed beforehand", float(threshold)
    else:
        raise ValueError(f"threshold must be 'union', 'split' or a number, got {threshold!r}")
    return EpsilonBound(
        epsilon=math.nan if np.isnan(score).any() else shown(held, others, cut),
        delta=delta,
        confidence=confidence,
        relation=accountant or relation,
        games=score.size,
        limit=shown(np.ones(held.size), np.zeros(others.size), 0.5),
        method=method + (", as a Gaussian mechanism" if claim == "gaussian" else ""),
    )


@dataclass(frozen=True)
class _Test:
    """Turns upper bounds of FNR and FPR into what they refute.

    Attributes:
        delta: at which epsilon is asked for.
        halved: a replace-one game is to bound an add/remove epsilon.
        gaussian: the claim is that of a Gaussian mechanism.
    """

    delta: float
    halved: bool
    gaussian: bool

    def strength(self, fnr: Floats, fpr: Floats) -> Floats:
        """(K,) mu for a Gaussian mechanism, else e^epsilon of the better direction."""
        if self.gaussian:
            mu: Floats = -ndtri(fnr) - ndtri(fpr)
            return mu / 2 if self.halved else mu
        return np.maximum(self._factor(1 - fnr, fpr), self._factor(1 - fpr, fnr))

    def _factor(self, p: Floats, q: Floats) -> Floats:
        """X of ``p = x q + delta``; halved, of ``p = x^2 q + (1 + x) delta``."""
        rest = np.maximum(p - self.delta, 0.0)
        if not self.halved:
            return rest / q
        root = self.delta + np.sqrt(self.delta**2 + 4 * q * rest)
        factor: Floats = np.divide(2 * rest, root, out=np.zeros_like(rest), where=root > 0)
        return factor

    def epsilon(self, fnr: Floats, fpr: Floats) -> float:
        """The largest epsilon that any of the bounds refutes; 0 where none does."""
        best = float(self.strength(fnr, fpr).max())
        if not self.gaussian:
            return math.log(max(1.0, best))
        return gaussian_epsilon(sigma=1 / best, delta=self.delta) if best > 0 else 0.0


def _test(
    delta: float,
    confidence: float,
    relation: Relation,
    accountant: Relation | None,
    claim: Claim,
) -> _Test:
    check(delta, confidence)
    check_claim(claim, delta)
    return _Test(delta, must_halve(relation, accountant), claim == "gaussian")


# ---- rates ----------------------------------------------------------------------------------


def _at_ranks(held: Floats, others: Floats, error: float) -> tuple[Floats, Floats]:
    """(K,) upper bounds of FNR and FPR, all right with probability ``1 - error``."""
    top, bottom = _ranks(others.size, COARSE), _ranks(held.size, COARSE)
    each = error / (2 * (top.size + bottom.size))
    high, low = others[-top], held[bottom - 1]
    missed = np.searchsorted(held, high, "right")
    alarms = others.size - np.searchsorted(others, low, "left")
    fnr = _above(np.r_[missed, bottom - 1], held.size, each)
    fpr = _above(np.r_[top - 1, alarms], others.size, each)
    return fnr, fpr


def _at_chosen(
    held: Floats, others: Floats, test: _Test, error: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """(1,) upper bounds of FNR and FPR at a threshold that other games chose."""
    halves = [np.array_split(rng.permutation(scores), 2) for scores in (held, others)]
    (choose_held, judge_held), (choose_others, judge_others) = (
        [np.sort(half) for half in pair] for pair in halves
    )
    if not judge_held.size or not judge_others.size:
        return np.ones(1), np.ones(1)
    high = choose_others[-_ranks(choose_others.size, FINE)]
    low = np.nextafter(choose_held[_ranks(choose_held.size, FINE) - 1], -np.inf)
    cuts = np.r_[high, low]
    chosen = test.strength(*_at_cuts(cuts, choose_held, choose_others, error / 2))
    cut = cuts[int(np.argmax(chosen))]
    return _at_cuts(np.array([cut]), judge_held, judge_others, error / 2)


def _at_cuts(cuts: Floats, held: Floats, others: Floats, error: float) -> tuple[Floats, Floats]:
    """(K,) upper bounds of FNR and FPR of ``score > cut``, each wrong with probability ``error``.

    ``held`` and ``others`` are sorted.
    """
    missed = np.searchsorted(held, cuts, "right")
    alarms = others.size - np.searchsorted(others, cuts, "right")
    return _above(missed, held.size, error), _above(alarms, others.size, error)


def _ranks(n: int, ratio: float) -> Ints:
    """1, and so on by about ``ratio``, up to n."""
    steps = np.arange(int(math.log(n) / math.log(ratio) + 1e-9) + 1)
    return np.unique((ratio**steps + 1e-9).astype(np.int64))


def _above(count: Ints, n: int, error: float) -> Floats:
    """Clopper-Pearson's upper bound of a rate."""
    bound: Floats = np.ones(count.shape)
    some = count < n
    bound[some] = betaincinv(count[some] + 1, n - count[some], 1 - error)
    return bound


def audit_games(
    result: GameResult,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    threshold: Literal["union", "split"] | float = "union",
    accountant: Relation | None = None,
    seed: int = 0,
) -> EpsilonBound:
    """Lower bound on epsilon from the games of one adversary, in the relation that was played.

    For an accountant of DP-SGD's usual kind play ``GameConfig(relation="add_remove")``. Games of
    ``"replace_one"`` bound its epsilon at half the strength, and say the whole of a replace-one
    epsilon (a client that randomises its tokens, ``play(..., defend=...)``).

    Args:
        result: of :func:`~lightning_fedleak.games.play`, every batch with one target.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        threshold: as in :func:`~lightning_fedleak.auditing.audit_scores`.
        accountant: the relation of the epsilon; default that of the games.
        seed: of the split.

    Raises:
        ValueError: games that share batches or follow the authors' protocol, or as
            :func:`~lightning_fedleak.auditing.audit_scores`.
    """
    if result.protocol != "game":
        raise ValueError(
            "the authors' protocol flips no coin, so that its worlds bound no epsilon: play "
            "GameConfig(protocol='game')"
        )
    if len(set(result.batches.tolist())) != len(result):
        raise ValueError(
            "games that share a batch are not independent: play GameConfig(targets_per_batch=1)"
        )
    return audit_scores(
        result.scores,
        result.bits,
        delta=delta,
        confidence=confidence,
        threshold=threshold,
        relation=result.relation,
        accountant=accountant,
        seed=seed,
    )
