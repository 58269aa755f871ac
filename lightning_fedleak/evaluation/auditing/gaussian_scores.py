"""A lower bound on epsilon from scores that are Gaussian themselves, of one run or of many.

A guess of each inclusion bit ignores how large or small a score is. Where scores are the canaries'
own shares of what a Gaussian mechanism released (planted gradients, each along its own direction),
their sums over the canaries that are in and out are Gaussian and sufficient (Agrawal et al. 2026,
arXiv 2606.12733, of which only the abstract was read; the derivation below is classical).

**Model.** Given the bits, scores are independent and normal with one variance s^2. Their mean is a
where the canary is out and ``a + mu s`` where it is in. Noise of ``1 / mu`` times the sensitivity
gives such scores, and no test of one canary does better than mu-Gaussian DP allows. With n1
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

from lightning_fedleak.evaluation.auditing import lower_bounds

FEWEST_SCORES = 20  # of either kind; not tuned; with fewer the test of their form has little power
MOST_SCORES = 5000  # of either kind in that test; Shapiro-Wilk's p-values hold up to here (Royston)
REFUSAL_RATE = 1e-5  # chance that one of the three tests refuses Gaussian scores; not tuned


def audit_gaussian_scores(
    scores: Tensor,
    members: Tensor,
    *,
    delta: float,
    confidence: float = 0.95,
) -> lower_bounds.EpsilonBound:
    """Return a lower bound on epsilon from Gaussian scores; the module states the model.

    Args:
        scores: (n,) higher is more likely a member. Linear in what was released: for instance its
            inner product with the canary's gradient, summed over steps.
        members: (n,) bool, the inclusion bits.
        delta: of the bound.
        confidence: of the bound.

    Raises:
        ValueError: lengths differ, fewer than 20 scores of a kind, scores that are not normal or
            spread differently with and without the canary, or delta 0.
    """
    audited = lower_bounds.AuditedClaim(delta, confidence, claim="gaussian")
    score, member = lower_bounds.columns(scores, members)
    member_scores, other_scores = score[member], score[~member]
    if min(member_scores.size, other_scores.size) < FEWEST_SCORES:
        raise ValueError(
            f"Gaussian scores need {FEWEST_SCORES} canaries of either kind at least, got "
            f"{member_scores.size} in and {other_scores.size} out: use audit_scores or "
            "audit_one_run"
        )
    epsilon = math.nan
    if not np.isnan(score).any():
        _check_form(member_scores, other_scores)
        mu = _least_mu(member_scores, other_scores, audited.error)
        epsilon = audited.epsilon_of_mu(mu)
    return audited.bound(epsilon, math.inf, score.size, "sums of Gaussian scores")


def _least_mu(
    member_scores: lower_bounds.Floats, other_scores: lower_bounds.Floats, error: float
) -> float:
    freedom = member_scores.size + other_scores.size - 2
    spread = math.sqrt((_squares(member_scores) + _squares(other_scores)) / freedom)
    width = math.sqrt(1 / member_scores.size + 1 / other_scores.size)
    statistic = float(member_scores.mean() - other_scores.mean()) / (spread * width)

    def excess(center: float) -> float:
        return float(nct.sf(statistic, freedom, center)) - error

    if excess(0.0) >= 0:
        return 0.0
    return width * float(brentq(excess, 0.0, statistic, xtol=1e-9))


def _squares(values: lower_bounds.Floats) -> float:
    return float(np.square(values - values.mean()).sum())


def _check_form(member_scores: lower_bounds.Floats, other_scores: lower_bounds.Floats) -> None:
    """Raise an error for scores that are not normal, or whose spread differs with the canary."""
    if np.ptp(member_scores) == 0 or np.ptp(other_scores) == 0:
        raise ValueError(
            "all scores of the members, or all of the non-members, are equal: no noise was added "
            "to them, or they are no scores"
        )
    p_values = [
        float(shapiro(values[:MOST_SCORES]).pvalue) for values in (member_scores, other_scores)
    ]
    sizes = member_scores.size - 1, other_scores.size - 1
    ratio = _squares(member_scores) / sizes[0] / (_squares(other_scores) / sizes[1])
    tail = float(f.sf(max(ratio, 1 / ratio), *(sizes if ratio >= 1 else sizes[::-1])))
    missing = (
        "normal" if min(p_values) < REFUSAL_RATE else "spread alike with and without the canary"
    )
    if min(*p_values, 2 * tail) < REFUSAL_RATE:
        raise ValueError(
            f"these scores are not {missing}, so they are not those of one Gaussian mechanism with "
            "the canary's inclusion given (Poisson sampling, a score that is a maximum or a "
            "rate?). Use audit_scores or audit_one_run, which assume no such form."
        )
