"""The budget of DP-SGD where the data change between two fits of one defence."""

from __future__ import annotations

import pytest

from lightning_fedleak.defenses.budget import Budget, BudgetSpent

pytest.importorskip("opacus")

TARGET, DELTA, STEPS = 2.0, 1e-3, 100


def budget() -> Budget:
    return Budget("rdp", None, TARGET, DELTA, seeded=False, harden_factor=2.0, most_notches=None)


def spend(budget: Budget, most: int) -> int:
    for released in range(most):
        try:
            budget.check_affords_another()
        except BudgetSpent:
            return released
        budget.record(budget.noise_now)
    return most


@pytest.mark.parametrize("saved", [False, True])
def test_noise_found_for_a_smaller_sample_rate_covers_nothing_at_a_larger(saved: bool) -> None:
    """The first fit ends before its first release; the second has twenty times the batch size."""
    own = budget()
    own.settle(0.01, DELTA, lambda: STEPS)
    if saved:
        state, own = own.state_dict(), budget()
        own.load_state_dict(state, 0)
    own.settle(0.2, DELTA, lambda: STEPS)
    assert spend(own, STEPS) < 5
    assert own.privacy.epsilon <= TARGET


@pytest.mark.parametrize("saved", [False, True])
def test_at_the_same_rate_it_covers_the_planned_steps(saved: bool) -> None:
    own = budget()
    own.settle(0.05, DELTA, lambda: STEPS)
    assert spend(own, 30) == 30
    if saved:
        state, own = own.state_dict(), budget()
        own.load_state_dict(state, 30)
    own.settle(0.05, DELTA, lambda: STEPS)
    assert spend(own, STEPS) == STEPS - 30
    assert own.privacy.epsilon == pytest.approx(TARGET, rel=0.01)
    assert own.privacy.epsilon <= TARGET
