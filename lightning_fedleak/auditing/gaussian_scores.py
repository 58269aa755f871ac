"""A lower bound on epsilon from scores that are Gaussian themselves, of one run or of many.

A guess of each coin throws away by how much a score is large or small. Where scores are the
canaries' own shares of what a Gaussian mechanism released (planted gradients, each along a
direction of its own), their sums over those that are in and out are Gaussian, and hold all that
there is to know (Agrawal et al. 2026, arXiv 2606.12733, whose abstract alone was read; what follows
is classical).

**Model.** Given the coins, scores are independent and normal with one variance s^2. Their mean is a
where the canary is out and ``a + mu s`` where it is in. That is what noise of ``1 / mu`` times the
sensitivity gives, and no test of one canary does better than mu-Gaussian DP allows. With n1
canaries in, n0 out, and the pooled standard deviation S

    T = (mean_in - mean_out) / (S sqrt(1 / n1 + 1 / n0))

has the noncentral t distribution of ``n1 + n0 - 2`` degrees of freedom and noncentrality
``mu / sqrt(1 / n1 + 1 / n0)``, whatever a and s are. It grows with mu, so the mu at which T is
exceeded with chance ``1 - confidence`` is a lower bound with exactly that confidence.

The model is assumed, so a bound is evidence against the claim of a Gaussian mechanism alone. Scores
that are plainly of another form are refused.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import f, nct, shapiro
from torch import Tensor

from lightning_fedleak.auditing.lower_bounds import (
    EpsilonBound,
    Floats,
    Relation,
    check,
    check_claim,
    columns,
    must_halve,
)
from lightning_fedleak.defenses.noise import gaussian_epsilon

FEWEST = 20
"""Scores of either kind below which their form cannot be looked at."""
MOST = 5000
"""Scores of a kind that are looked at, at most: Shapiro and Wilk's test is made for so many."""
STRANGE = 1e-5
"""Chance of scores of the assumed form to be refused by one of three looks."""


def audit_gaussian_scores(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float,
    confidence: float = 0.95,
    relation: Relation = "add_remove",
    accountant: Relation | None = None,
) -> EpsilonBound:
    """Lower bound on epsilon from Gaussian scores; the module says what is assumed.

    Args:
        scores: (n,) higher is more likely a member. Linear in what was released: for instance its
            inner product with the canary's gradient, summed over steps.
        members: (n,) bool, how the coins fell.
        delta: at which epsilon is asked for.
        confidence: of the bound.
        relation: what a coin decides: whether the canary is there, or which of two is.
        accountant: of the epsilon; default that of the game.

    Raises:
        ValueError: lengths differ, fewer than 20 scores of a kind, scores that are not normal or
            spread differently with and without the canary, delta 0, or no bridge between relations.
    """
    check(delta, confidence)
    check_claim("gaussian", delta)
    halve = must_halve(relation, accountant)
    score, member = columns(scores, members)
    held, others = score[member], score[~member]
    if min(held.size, others.size) < FEWEST:
        raise ValueError(
            f"Gaussian scores need {FEWEST} canaries of either kind at least, got {held.size} in "
            f"and {others.size} out: use audit_scores or audit_one_run"
        )

    def shown(mu: float) -> float:
        mu = mu / 2 if halve else mu
        return gaussian_epsilon(sigma=1 / mu, delta=delta) if mu > 0 else 0.0

    unknown = bool(np.isnan(score).any())
    if not unknown:
        _check_form(held, others)
    return EpsilonBound(
        epsilon=math.nan if unknown else shown(_least_mu(held, others, 1 - confidence)),
        delta=delta,
        confidence=confidence,
        relation=accountant or relation,
        games=score.size,
        limit=math.inf,
        method="sums of Gaussian scores, as a Gaussian mechanism",
    )


def _least_mu(held: Floats, others: Floats, error: float) -> float:
    freedom = held.size + others.size - 2
    spread = math.sqrt((_squares(held) + _squares(others)) / freedom)
    width = math.sqrt(1 / held.size + 1 / others.size)
    seen = float(held.mean() - others.mean()) / (spread * width)

    def excess(center: float) -> float:
        return float(nct.sf(seen, freedom, center)) - error

    if excess(0.0) >= 0:
        return 0.0
    return width * float(brentq(excess, 0.0, seen, xtol=1e-9))


def _squares(values: Floats) -> float:
    return float(np.square(values - values.mean()).sum())


def _check_form(held: Floats, others: Floats) -> None:
    """Refuses scores that are not normal, or spread more with the canary than without."""
    if np.ptp(held) == 0 or np.ptp(others) == 0:
        raise ValueError(
            "all scores of a kind are alike: nothing was added to them, or they are no scores"
        )
    found = [float(shapiro(values[:MOST]).pvalue) for values in (held, others)]
    ratio = _squares(held) / (held.size - 1) / (_squares(others) / (others.size - 1))
    tail = float(f.sf(max(ratio, 1 / ratio), *_freedom(held, others, ratio)))
    strange = "normal" if min(found) < STRANGE else "spread alike with and without the canary"
    if min(*found, 2 * tail) < STRANGE:
        raise ValueError(
            f"these scores are not {strange}, so they are not those of one Gaussian mechanism with "
            "the canary's inclusion given (Poisson sampling, a score that is a maximum or a "
            "rate?). Use audit_scores or audit_one_run, which assume no such form."
        )


def _freedom(held: Floats, others: Floats, ratio: float) -> tuple[int, int]:
    sizes = held.size - 1, others.size - 1
    return sizes if ratio >= 1 else sizes[::-1]
