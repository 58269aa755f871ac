"""The budget of DP-SGD where the data change between two fits of one defence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.budget import Account, Budget, BudgetSpent
from lightning_fedleak.defenses.base import DefenseError

pytest.importorskip("opacus")

TARGET, DELTA, STEPS = 2.0, 1e-3, 100


def budget(kind: Account = "rdp") -> Budget:
    return Budget(kind, None, TARGET, DELTA, seeded=False, max_hardenings=None)


def fixed(noise: float, *, seeded: bool = False) -> Budget:
    return Budget("rdp", noise, None, DELTA, seeded=seeded, max_hardenings=None)


def spend(budget: Budget, most: int) -> int:
    for released in range(most):
        try:
            budget.check_affords_another()
        except BudgetSpent:
            return released
        budget.settle_next()[1]()
    return most


@pytest.mark.parametrize("path", [None, "ledger"])
def test_a_settled_release_counts_until_the_budget_changes(
    path: str | None, tmp_path: Path
) -> None:
    local = fixed(2.0)
    if path:
        local.open_ledger(tmp_path / path)
    local.settle(0.1, DELTA, lambda: STEPS)
    noise, count = local.settle_next()
    assert local.next_release == (noise, count)
    for _ in range(3):
        count()
    assert (noise, local.accountant.history) == (2.0, ((2.0, 0.1, 3),))
    local.noise_multiplier = 3.0
    assert local.next_release is None
    with pytest.raises(DefenseError, match="are not those of earlier releases"):
        local.settle_next()


@pytest.mark.parametrize(("kind", "saved"), [("rdp", False), ("rdp", True), ("filter", False)])
def test_noise_is_found_anew_as_long_as_nothing_was_released(kind: Account, saved: bool) -> None:
    """The first fit ends before its first release; the second has twenty times the batch size."""
    local = budget(kind)
    local.settle(0.01, DELTA, lambda: STEPS)
    before = local.noise_now
    if saved:
        state, local = local.state_dict(), budget(kind)
        local.load_state_dict(state, 0)
    local.settle(0.2, DELTA, lambda: 2 * STEPS)
    assert local.noise_now > 2 * before
    assert spend(local, 3 * STEPS) == 2 * STEPS
    assert local.privacy.epsilon <= TARGET


def test_noise_found_for_a_smaller_sample_rate_covers_nothing_at_a_larger(tmp_path: Path) -> None:
    """A checkpoint of before the first release, and a ledger with releases at another rate."""
    first = budget()
    first.settle(0.05, DELTA, lambda: STEPS)
    Accountant(ledger=tmp_path / "ledger").record(first.noise_now, 0.2)
    later = budget()
    later.open_ledger(tmp_path / "ledger")
    later.load_state_dict(first.state_dict(), 0)
    later.settle(0.2, DELTA, lambda: STEPS)
    assert later.noise_now == first.noise_now
    assert 0 < spend(later, STEPS) < STEPS / 2
    assert later.privacy.epsilon <= TARGET


@pytest.mark.parametrize("through", ["checkpoint", "ledger"])
def test_releases_with_noise_that_can_be_guessed_stay_infinite(
    tmp_path: Path, through: str
) -> None:
    def made(seeded: bool) -> Budget:
        local = fixed(1.0, seeded=seeded)
        if through == "ledger":
            local.open_ledger(tmp_path / "ledger")
        return local

    seeded = made(True)
    seeded.settle(0.1, DELTA, lambda: STEPS)
    assert spend(seeded, 3) == 3
    resumed = made(False)
    if through == "checkpoint":
        resumed.load_state_dict(seeded.state_dict(), 3)
    with pytest.raises(
        DefenseError, match=r"noise_multiplier=1 .* are not those of the 3 releases before, 0 "
    ):
        resumed.settle(0.1, DELTA, lambda: STEPS)
    assert resumed.accountant.steps == 3
    assert resumed.privacy.epsilon == math.inf
    with pytest.raises(DefenseError, match="are not those of earlier releases"):
        resumed.settle_next()[1]()


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.2), (2.0, 0.1)])
def test_another_noise_or_rate_than_before_is_refused_at_setup(noise: float, rate: float) -> None:
    first = fixed(1.0)
    first.settle(0.1, DELTA, lambda: STEPS)
    assert spend(first, 3) == 3
    first.settle(0.1, DELTA, lambda: 2 * STEPS)
    later, other = fixed(noise), fixed(noise)
    later.load_state_dict(first.state_dict(), 3)
    with pytest.raises(DefenseError, match=r"those of the 3 releases before, 1 and 0\.1"):
        later.settle(rate, DELTA, lambda: STEPS)
    other.settle(rate, DELTA, lambda: STEPS)  # restored after the loader was made
    other.load_state_dict(first.state_dict(), 3)
    with pytest.raises(DefenseError, match="those of the 3 releases"):
        other.check_not_overdrawn()


@pytest.mark.parametrize("saved", [False, True])
def test_at_the_same_rate_it_covers_the_planned_steps(saved: bool) -> None:
    plan = budget()
    plan.settle(0.05, DELTA, lambda: STEPS)
    assert spend(plan, 30) == 30
    if saved:
        state, plan = plan.state_dict(), budget()
        plan.load_state_dict(state, 30)
    plan.settle(0.05, DELTA, lambda: STEPS)
    assert spend(plan, STEPS) == STEPS - 30
    assert plan.privacy.epsilon == pytest.approx(TARGET, rel=0.01)
    assert plan.privacy.epsilon <= TARGET
