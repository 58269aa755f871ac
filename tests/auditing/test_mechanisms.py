"""Closed forms against numerical integration and Google's dp-accounting."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.integrate import quad, trapezoid
from scipy.stats import norm

from lightning_fedleak.evaluation.auditing import (
    curve_auc,
    curve_tpr,
    dp_advantage,
    dp_auc,
    dp_tpr,
    gaussian_advantage,
    gaussian_auc,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_tpr,
    randomised_response_auc,
    randomised_response_delta,
)

SIGMAS = (0.5, 1.0, 2.0, 4.0)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_gaussian_delta_is_the_integral_of_its_definition(sigma: float, epsilon: float) -> None:
    def excess(x: float) -> float:
        gain = norm.pdf(x, 1 / sigma) - math.exp(epsilon) * norm.pdf(x)
        return max(0.0, gain)

    break_even = epsilon * sigma + 1 / (2 * sigma)
    integral, _ = quad(excess, break_even, break_even + 12 + 2 / sigma, limit=200)
    assert gaussian_delta(epsilon, sigma) == pytest.approx(integral, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_is_dp_accountings(sigma: float, delta: float) -> None:
    ours = gaussian_epsilon(sigma=sigma, delta=delta)
    assert ours == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, delta), rel=1e-8)
    assert gaussian_delta(ours, sigma) == pytest.approx(delta, rel=1e-9)
    assert dp_accounting.get_sigma_gaussian(ours, delta) == pytest.approx(sigma, rel=1e-6)
    pld = privacy_loss_distribution.from_gaussian_mechanism(sigma, use_connect_dots=True)
    assert pld.get_epsilon_for_delta(delta) == pytest.approx(ours, rel=2e-3)


def test_gaussian_extremes_do_not_overflow() -> None:
    assert gaussian_delta(1000.0, 1.0) == 0.0
    assert gaussian_delta(0.0, 1e-4) == pytest.approx(1.0)
    assert gaussian_epsilon(sigma=10.0, delta=0.5) == 0.0
    assert gaussian_epsilon(sigma=0.01, delta=1e-5) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(0.01, 1e-5), rel=1e-6
    )


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


def test_gaussian_epsilon_of_no_distance_and_of_no_noise() -> None:
    assert gaussian_epsilon(sigma=math.inf, delta=1e-5) == 0.0
    assert gaussian_epsilon(sigma=1e-200, delta=1e-5) == math.inf
    with pytest.raises(TypeError, match="positional"):
        gaussian_epsilon(1e-5, 1.0)  # type: ignore[misc]


@pytest.mark.parametrize("sigma", SIGMAS)
def test_gaussian_roc_is_that_of_two_normal_laws(sigma: float) -> None:
    cuts = np.linspace(-8, 8 + 1 / sigma, 4001)
    fpr, tpr = norm.sf(cuts), norm.sf(cuts - 1 / sigma)
    assert gaussian_tpr(float(fpr[2000]), sigma) == pytest.approx(tpr[2000], rel=1e-9)
    assert gaussian_auc(sigma) == pytest.approx(-trapezoid(tpr, fpr), abs=1e-5)
    assert gaussian_advantage(sigma) == pytest.approx((tpr - fpr).max(), abs=1e-5)
    assert gaussian_advantage(sigma) == pytest.approx(gaussian_delta(0.0, sigma), rel=1e-12)


def test_gaussian_auc_is_as_measured_for_dpsgd() -> None:
    """Literature: a planted neuron under DP-SGD at sigma .5, 1, 2, 4."""
    assert [round(gaussian_auc(s), 2) for s in SIGMAS] == [0.92, 0.76, 0.64, 0.57]


@pytest.mark.parametrize("epsilon_0", [0.1, 1.0, 4.0])
def test_randomised_response_is_dp_accountings(epsilon_0: float) -> None:
    uniform = 2 / (1 + math.exp(epsilon_0))
    pld = privacy_loss_distribution.from_randomized_response(uniform, 2)
    for epsilon in (0.0, epsilon_0 / 2, epsilon_0 + 0.01):
        ours = randomised_response_delta(epsilon, epsilon_0)
        assert ours == pytest.approx(pld.get_delta_for_epsilon(epsilon), abs=1e-4)
    assert randomised_response_auc(epsilon_0) == pytest.approx(1 - uniform / 2)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.1), (3.0, 1e-3)])
def test_what_dp_allows_is_what_its_worst_mechanism_gives(epsilon: float, delta: float) -> None:
    """With chance delta the bit is told outright, else by randomised response."""
    keep = 1 / (1 + math.exp(-epsilon))
    one = np.array([0.0, (1 - delta) * (1 - keep), (1 - delta) * keep, delta])
    roc = np.cumsum(one[::-1]), np.cumsum(one)  # TPR, FPR of "score at least"
    tpr, fpr = np.r_[0, roc[0]], np.r_[0, roc[1]]
    grid = np.linspace(0, 1, 2001)
    allowed = np.array([dp_tpr(x, epsilon, delta) for x in grid])
    np.testing.assert_allclose(allowed[1:], np.interp(grid, fpr, tpr)[1:], atol=1e-12)
    assert allowed[0] == pytest.approx(delta)
    assert dp_auc(epsilon, delta) == pytest.approx(trapezoid(allowed, grid), abs=1e-4)
    assert dp_advantage(epsilon, delta) == pytest.approx((allowed - grid).max(), abs=1e-3)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_gaussian_mechanism_never_exceeds_what_its_epsilon_allows(sigma: float) -> None:
    for epsilon in (0.1, 1.0, 4.0):
        delta = gaussian_delta(epsilon, sigma)
        for fpr in np.linspace(1e-4, 1, 50):
            assert gaussian_tpr(fpr, sigma) <= dp_tpr(fpr, epsilon, delta) + 1e-12
        assert gaussian_auc(sigma) <= dp_auc(epsilon, delta)
        assert gaussian_advantage(sigma) <= dp_advantage(epsilon, delta) + 1e-12


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_a_sigma_that_is_not_positive_is_refused(sigma: float) -> None:
    for function in (gaussian_auc, gaussian_advantage):
        with pytest.raises(ValueError, match="sigma must be"):
            function(sigma)
    for function in (gaussian_delta, gaussian_tpr):
        with pytest.raises(ValueError, match="sigma must be"):
            function(0.1, sigma)
    with pytest.raises(ValueError, match="sigma must be"):
        gaussian_epsilon(sigma=sigma, delta=0.1)
    with pytest.raises(ValueError, match="delta must"):
        gaussian_epsilon(sigma=1.0, delta=0.0)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_many_pairs_allow_what_the_gaussian_mechanism_does(sigma: float) -> None:
    epsilons = np.linspace(0, 8 / sigma, 400)
    curve = [(epsilon, gaussian_delta(epsilon, sigma)) for epsilon in epsilons.tolist()]
    for fpr in (0.001, 0.01, 0.2, 0.7):
        assert curve_tpr(fpr, curve) == pytest.approx(gaussian_tpr(fpr, sigma), rel=2e-3)
        assert curve_tpr(fpr, curve) >= gaussian_tpr(fpr, sigma) - 1e-12
    assert curve_auc(curve) == pytest.approx(gaussian_auc(sigma), abs=2e-4)


def test_one_pair_is_a_curve_and_none_allows_everything() -> None:
    assert curve_tpr(0.01, [(1.0, 0.05)]) == dp_tpr(0.01, 1.0, 0.05)
    assert curve_auc([(1.0, 0.05)]) == pytest.approx(dp_auc(1.0, 0.05), abs=1e-4)
    assert curve_auc([(0.0, 0.0)]) == pytest.approx(0.5)
    assert curve_tpr(0.01, []) == 1
    assert curve_auc([]) == pytest.approx(1, abs=1e-6)
