"""Closed forms against numerical integration and Google's dp-accounting."""

from __future__ import annotations

import math
from functools import cache

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.integrate import trapezoid
from scipy.stats import norm

from lightning_fedleak.evaluation.auditing import (
    curve_auc,
    curve_tpr,
    dp_auc,
    dp_tpr,
    gaussian_auc,
    gaussian_epsilon,
    gaussian_tpr,
)
from tests.helpers.gaussian import gaussian_delta

SIGMAS = (0.5, 1.0, 2.0, 4.0)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_is_dp_accountings(sigma: float, delta: float) -> None:
    ours = gaussian_epsilon(sigma=sigma, delta=delta)
    assert ours == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, delta), rel=1e-8)
    assert gaussian_delta(ours, sigma) == pytest.approx(delta, rel=1e-9)
    assert dp_accounting.get_sigma_gaussian(ours, delta) == pytest.approx(sigma, rel=1e-6)
    assert privacy_loss(sigma).get_epsilon_for_delta(delta) == pytest.approx(ours, rel=2e-3)


@cache
def privacy_loss(sigma: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return dp-accounting's distribution of the privacy loss; to make one takes seconds."""
    return privacy_loss_distribution.from_gaussian_mechanism(sigma, use_connect_dots=True)


def bisected(sigma: float, delta: float) -> float:
    """By nothing but halves, from the definition."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, sigma) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, sigma) > delta else (low, middle)
    return high


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-3])
def test_gaussian_epsilon_is_the_root_and_never_below(sigma: float, delta: float) -> None:
    found = gaussian_epsilon(sigma=sigma, delta=delta)
    assert found == pytest.approx(bisected(sigma, delta), rel=1e-9, abs=1e-12)
    assert gaussian_delta(found, sigma) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_gaussian_roc_is_that_of_two_normal_laws(sigma: float) -> None:
    cuts = np.linspace(-8, 8 + 1 / sigma, 4001)
    fpr, tpr = norm.sf(cuts), norm.sf(cuts - 1 / sigma)
    assert gaussian_tpr(float(fpr[2000]), sigma) == pytest.approx(tpr[2000], rel=1e-9)
    assert gaussian_auc(sigma) == pytest.approx(-trapezoid(tpr, fpr), abs=1e-5)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.1), (3.0, 1e-3)])
def test_what_dp_allows_is_what_its_worst_mechanism_gives(epsilon: float, delta: float) -> None:
    """With chance delta the bit is revealed, else by randomised response."""
    keep = 1 / (1 + math.exp(-epsilon))
    one = np.array([0.0, (1 - delta) * (1 - keep), (1 - delta) * keep, delta])
    roc = np.cumsum(one[::-1]), np.cumsum(one)  # TPR, FPR of "score at least"
    tpr, fpr = np.r_[0, roc[0]], np.r_[0, roc[1]]
    grid = np.linspace(0, 1, 2001)
    allowed = np.array([dp_tpr(x, epsilon, delta) for x in grid])
    np.testing.assert_allclose(allowed[1:], np.interp(grid, fpr, tpr)[1:], atol=1e-12)
    assert allowed[0] == pytest.approx(delta)
    assert dp_auc(epsilon, delta) == pytest.approx(trapezoid(allowed, grid), abs=1e-4)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_many_pairs_allow_what_the_gaussian_mechanism_does(sigma: float) -> None:
    epsilons = np.linspace(0, 8 / sigma, 400)
    curve = [(epsilon, gaussian_delta(epsilon, sigma)) for epsilon in epsilons.tolist()]
    for fpr in (0.001, 0.01, 0.2, 0.7):
        assert curve_tpr(fpr, curve) == pytest.approx(gaussian_tpr(fpr, sigma), rel=2e-3)
        assert curve_tpr(fpr, curve) >= gaussian_tpr(fpr, sigma) - 1e-12
    assert curve_auc(curve) == pytest.approx(gaussian_auc(sigma), abs=2e-4)
