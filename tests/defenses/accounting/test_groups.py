"""What a group of examples costs: against one example, other code's mixtures, and plain sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from lightning_fedleak.defenses import DPSGD, DefenseError, group_epsilon
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.accounting.groups import group_rdp
from lightning_fedleak.defenses.accounting.renyi import ORDERS, rdp_of
from tests.defenses.dpsgd.test_dpsgd import Run, first
from tests.helpers.dpsgd_settings import grouped


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.3), (1.0, 0.01), (5.0, 0.999), (2.0, 1.0)])
def test_a_group_of_one_is_one_example(sigma: float, rate: float) -> None:
    removed, added = group_rdp(sigma, rate, 1)
    known = np.isfinite(removed) & np.isfinite(rdp_of(sigma, rate))
    assert known.sum() > len(ORDERS) - 3
    both = np.maximum(removed, added)[known]
    np.testing.assert_allclose(both, rdp_of(sigma, rate)[known], rtol=1e-5, atol=1e-12)


def test_whole_orders_are_sums_over_who_was_drawn() -> None:
    """E[(P / N)^a] of a whole order a: over a draws of how many rows each, exp(sum of products)."""
    sigma, rate, rows = 1.3, 0.3, 3
    chances = binom.pmf(range(rows + 1), rows, rate)
    for order in (2, 3):
        total = 0.0
        for drawn in np.ndindex(*[rows + 1] * order):
            pairs = (sum(drawn) ** 2 - sum(d * d for d in drawn)) / 2
            total += float(np.prod(chances[list(drawn)])) * math.exp(pairs / sigma**2)
        expected = math.log(total) / (order - 1)
        assert group_rdp(sigma, rate, rows)[0][ORDERS.index(order)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sigma", "rate", "rows", "releases"), [(3.0, 0.05, 4, 100), (6.0, 0.2, 3, 30)]
)
def test_it_is_an_upper_bound_and_near_a_tight_one(
    sigma: float, rate: float, rows: int, releases: int
) -> None:
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    chances = [*binom.pmf(range(rows + 1), rows, rate)]
    one = pld.from_mixture_gaussian_mechanism(
        sigma, [*range(rows + 1)], chances, value_discretization_interval=5e-3
    )
    tight = one.self_compose(releases).get_epsilon_for_delta(1e-5)
    found = group_epsilon([(sigma, rate, releases)], 1e-5, rows)
    assert tight < found < 1.25 * tight
    single = epsilon_of([(sigma, rate, releases)], 1e-5, "rdp")
    assert found > rows * single


def test_no_event_is_told_better_than_it_says() -> None:
    sigma, rate, rows, delta = 0.8, 0.2, 3, 1e-3
    epsilon = group_epsilon([(sigma, rate, 1)], delta, rows)
    chances = binom.pmf(range(rows + 1), rows, rate)
    for threshold in np.linspace(-6, 8, 50):
        inside = float(chances @ norm.sf((threshold - np.arange(rows + 1)) / sigma))
        outside = float(norm.sf(threshold / sigma))
        assert inside - math.exp(epsilon) * outside <= delta
        assert (1 - outside) - math.exp(epsilon) * (1 - inside) <= delta


def test_large_groups_and_little_noise_are_told_or_infinite() -> None:
    assert group_epsilon([], 1e-5, 3) == 0.0
    assert group_epsilon([(0.01, 0.1, 1)], 1e-5, 3) == math.inf
    assert group_epsilon([(1.0, 0.1, 10)], 1e-5, 10**6) == math.inf
    assert 0 < group_epsilon([(500.0, 0.1, 10)], 1e-5, 300) < 10
    for wrong in (0, 2.5, True):
        with pytest.raises(DefenseError, match="rows must be"):
            group_epsilon([(1.0, 0.1, 1)], 1e-5, wrong)  # type: ignore[arg-type]
    with pytest.raises(DefenseError, match="delta"):
        group_epsilon([(1.0, 0.1, 1)], 0.0, 2)


def test_a_run_tells_what_its_groups_cost() -> None:
    settings: Any = {"target_delta": 1e-3}
    run = Run(DPSGD(1.0, noise_multiplier=2.0, accountant="rdp", **grouped(**settings)))
    run.step(first(4))
    own, pair = run.defense.privacy, run.defense.group_privacy(2)
    assert run.defense.group_privacy(1).epsilon == pytest.approx(own.epsilon)
    assert pair.epsilon == group_epsilon([(2.0, 8 / 40, 1)], 1e-3, 2) > own.epsilon
    assert (pair.delta, pair.releases) == (own.delta, own.releases)
    filtered: Any = settings | {"target_epsilon": 0.5, "accountant": "filter"}
    run = Run(DPSGD(1.0, noise_multiplier=9.0, **filtered))
    pair = run.defense.group_privacy(2)
    assert pair.epsilon == 1.0
    assert pair.delta == pytest.approx(2e-3 * math.exp(0.5))
    assert run.defense.group_privacy(20).epsilon == math.inf
    run = Run(DPSGD(1.0, noise_multiplier=2.0, seed=1))
    run.step(first(4))
    assert run.defense.group_privacy(2).epsilon == math.inf
