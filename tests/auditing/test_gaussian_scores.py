"""Sums of Gaussian scores: how often the bound is too large, how near it comes, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import nct, ttest_ind

from lightning_fedleak.evaluation.auditing import audit_gaussian_scores, gaussian_epsilon

DELTA, CANARIES = 1e-5, 500


def bound(mu: float, rng: np.random.Generator, n: int = CANARIES, **settings):
    members = rng.random(n) < 0.5
    scores = 7 - 3 * (rng.normal(size=n) - mu * members)  # its place and unit do not matter
    scores = torch.from_numpy(scores)
    return audit_gaussian_scores(scores, torch.from_numpy(members), delta=DELTA, **settings)


@pytest.mark.parametrize(("sigma", "reached"), [(0.5, 0.85), (1.0, 0.75), (2.0, 0.6)])
def test_it_comes_near_and_is_too_large_as_often_as_it_may_be(sigma: float, reached: float) -> None:
    rng, runs = np.random.default_rng(0), 100
    truth = gaussian_epsilon(sigma=sigma, delta=DELTA)
    bounds = np.array([bound(1 / sigma, rng).epsilon for _ in range(runs)])
    assert np.median(bounds) > reached * truth
    assert 0 < (bounds > truth).sum() <= 0.05 * runs + 6


def test_the_bound_is_the_noncentral_ts() -> None:
    rng = np.random.default_rng(1)
    members = torch.arange(60) < 25
    scores = torch.from_numpy(rng.normal(size=60)) + 1.5 * members
    bound_of_scores = audit_gaussian_scores(scores, members, delta=DELTA)
    statistic = ttest_ind(scores[members], scores[~members]).statistic
    mu = brentq(
        lambda s: gaussian_epsilon(sigma=1 / s, delta=DELTA) - bound_of_scores.epsilon, 0.01, 9
    )
    chance = nct.sf(statistic, 58, mu / math.sqrt(1 / 25 + 1 / 35))
    assert chance == pytest.approx(0.05, rel=1e-4)
    assert "sums of Gaussian scores" in str(bound_of_scores)
    assert audit_gaussian_scores(-scores, members, delta=DELTA).epsilon == 0.0
    assert math.isnan(
        audit_gaussian_scores(
            scores.index_fill(0, torch.tensor(3), math.nan), members, delta=DELTA
        ).epsilon
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, m: (s.exp(), m), "no Gaussian scores"),
        (lambda s, m: (s + 6 * (torch.rand(len(s)) < 0.5) * m, m), "no Gaussian scores"),
        (lambda s, m: (torch.where(m, 2 * s, s), m), "no Gaussian scores"),
        (lambda s, m: (torch.where(m, s, 2 * s), m), "no Gaussian scores"),
        (lambda s, m: (m.double(), m), "all scores of the members"),
        (lambda s, m: (s, torch.arange(len(s)) < 19), "need 20 canaries"),
        (lambda s, m: (s[:-1], m), "give one for each game"),
    ],
)
def test_scores_of_another_form_are_refused(change, said: str) -> None:
    torch.manual_seed(0)
    scores, members = torch.randn(CANARIES, dtype=torch.float64), torch.arange(CANARIES) % 2 == 0
    with pytest.raises(ValueError, match=said):
        audit_gaussian_scores(*change(scores, members), delta=DELTA)
    with pytest.raises(ValueError, match="delta must be a number above 0"):
        audit_gaussian_scores(scores, members, delta=0.0)
