"""DPSGD whose noise is turned up in the run, and the budget that allows it."""

import io
import math
from typing import Any

import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_fedleak.defenses import DPSGD, BudgetSpent, CanaryGradient, DefenseError, RenyiFilter
from tests.defenses.dpsgd.test_dpsgd import CLIP, Run, data, first
from tests.helpers.dpsgd_settings import grouped

EPSILON, DELTA = 3.0, 1e-3


def filtered(sigma: float | None = 6.0, **given: Any) -> DPSGD:
    budget = {"target_epsilon": EPSILON, "target_delta": DELTA}
    return DPSGD(
        CLIP, **grouped(noise_multiplier=sigma, accountant="filter", **{**budget, **given})
    )


def whole() -> DataLoader[Any]:
    """All examples in each batch."""
    return DataLoader(data(), batch_size=40)


def allowed(order: float) -> float:
    """The budget at an order: what epsilon leaves after the conversion at delta."""
    paid = math.log((order - 1) / order) - (math.log(DELTA) + math.log(order)) / (order - 1)
    return EPSILON - paid


def share_of(defense: DPSGD) -> float:
    account = defense.accountant
    return account._share(account.history)  # type: ignore[union-attr]


def order_of(defense: DPSGD) -> float:
    assert isinstance(defense.accountant, RenyiFilter)
    assert defense.accountant.order is not None
    return defense.accountant.order


def through_a_file(defense: DPSGD) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(defense.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


# ---- the noise -------------------------------------------------------------------------------


def test_the_next_update_has_the_noise_of_one_notch_more() -> None:
    plain, hardened = (filtered() for _ in range(2))
    a, b = Run(plain), Run(hardened)
    assert torch.equal(a.step(first(0)), b.step(first(0)))
    assert hardened.harden() == "dpsgd: noise multiplier 6 -> 12"
    assert hardened.privacy.noise_multiplier == 12.0
    before, after = a.step(first(0)), b.step(first(0))
    torch.testing.assert_close(after, 2 * before, rtol=1e-6, atol=0.0)
    noise = 8 * after / (12 * CLIP)
    low, high = scipy.stats.chi2.ppf([1e-4, 1 - 1e-4], noise.numel())
    assert low < float(noise.square().sum()) < high


def test_the_first_release_after_a_notch_is_measured_against_the_new_noise() -> None:
    defense = filtered()
    run = Run(defense)
    run.step(first(0))
    old = defense.measured_noise_multiplier
    run.step(first(0))
    assert defense.measured_noise_multiplier == old
    assert defense.harden() is not None
    run.step(first(0))
    assert defense.measured_noise_multiplier == pytest.approx(12.0, rel=0.4)
    assert old == pytest.approx(6.0, rel=0.4)


def test_a_canary_gets_the_noise_that_the_update_gets() -> None:
    def noised(notches: int) -> torch.Tensor:
        defense = filtered()
        run = Run(defense)
        run.backward(first(0))
        for _ in range(notches):
            assert defense.harden() is not None
        canary = CanaryGradient(torch.zeros(0, 2, 50))
        return defense.on_canary(canary, run.parameters, run.context).released

    torch.testing.assert_close(noised(2), 4 * noised(0), rtol=1e-6, atol=0.0)


def test_it_is_as_strong_as_it_gets() -> None:
    defense = filtered(max_hardenings=2)
    Run(defense)
    assert [defense.harden() is None for _ in range(4)] == [False, False, True, True]
    assert defense.privacy.noise_multiplier == 24.0
    assert not filtered(max_hardenings=0).can_harden
    endless = filtered(2e5)
    Run(endless)
    assert [endless.harden() is None for _ in range(4)] == [False, False, True, True]


# ---- the budget ------------------------------------------------------------------------------


@given(notches=st.lists(st.booleans(), min_size=1, max_size=12), sigma=st.floats(2.5, 8.0))
@settings(deadline=None, max_examples=15)
def test_no_release_is_made_beyond_the_budget(notches: list[bool], sigma: float) -> None:
    defense = filtered(sigma, target_epsilon=EPSILON, on_budget="raise")
    run = Run(defense, loader=whole())
    order = order_of(defense)
    spent = 0.0
    for notch in notches:
        if notch:
            assert defense.harden() is not None
        cost = order / (2 * defense.privacy.noise_multiplier**2)
        if spent + cost <= allowed(order) * (1 - 1e-9):
            run.step(first(0), lr=1e-3)
            spent += cost
        elif spent + cost > allowed(order) * (1 + 1e-9):
            run.backward(first(0))
            before = run.root.below.weight.detach().clone()
            with pytest.raises(BudgetSpent, match="one more would cost more"):
                run.release()
            assert torch.equal(before, run.root.below.weight)
            defense._step.released()
    assert share_of(defense) == pytest.approx(spent / allowed(order), rel=1e-6)
    assert defense.privacy.epsilon == EPSILON


# ---- resuming --------------------------------------------------------------------------------


def test_a_resumed_run_stays_hardened_and_forgets_nothing() -> None:
    defense = filtered()
    run = Run(defense)
    run.step(first(0))
    assert defense.harden() is not None
    run.step(first(0))
    resumed = filtered()
    resumed.load_state_dict(through_a_file(defense))
    again = Run(resumed)
    assert resumed.notches == 1
    assert resumed.privacy.noise_multiplier == 12.0
    assert share_of(resumed) == defense.accountant._share(defense.accountant.history)
    assert order_of(resumed) == order_of(defense)
    torch.testing.assert_close(again.step(first(0)), run.step(first(0)), rtol=1e-5, atol=1e-6)
    resumed.load_state_dict({"releases": 0, "notches": 0})
    assert (resumed.notches, resumed.accountant.steps, resumed.releases) == (1, 3, 3)


def test_a_budget_that_changes_is_refused() -> None:
    defense = filtered()
    Run(defense).step(first(0))
    with pytest.raises(DefenseError, match=r"checkpoint's epsilon, delta and order are \[3.0"):
        filtered(target_epsilon=4.0).load_state_dict(through_a_file(defense))
    with pytest.raises(DefenseError, match="made with another accountant"):
        DPSGD(CLIP, 6.0).load_state_dict(through_a_file(defense))
    plain = DPSGD(CLIP, 6.0, target_delta=DELTA)
    Run(plain).step(first(0))
    with pytest.raises(DefenseError, match="made with another accountant"):
        filtered().load_state_dict(through_a_file(plain))


def test_an_order_that_changes_is_refused() -> None:
    account, other, waiting = (RenyiFilter(EPSILON, DELTA) for _ in range(3))
    with pytest.raises(DefenseError, match="call begin first"):
        waiting.allows(6.0, 0.2)
    account.begin(6.0, 0.2)
    other.begin(0.9, 0.2)
    assert account.order != other.order
    with pytest.raises(DefenseError, match="epsilon, delta and order are"):
        other.load_state_dict(account.state_dict())
    several = account.state_dict() | {"orders": torch.tensor([4.0, 8.0])}
    with pytest.raises(DefenseError, match=r"4.0, 8.0\], .* begin a new run"):
        waiting.load_state_dict(several)
    waiting.load_state_dict(account.state_dict())
    waiting.begin(0.9, 0.2)
    assert waiting.order == account.order


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.1])
def test_noise_that_spends_the_budget_at_once_is_refused_at_setup(sigma: float) -> None:
    with pytest.raises(DefenseError, match="more noise is needed"):
        Run(filtered(sigma), loader=whole())


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_other_accountants_turn_nothing_up(accountant: Any) -> None:
    defense = DPSGD(CLIP, 1.0, accountant=accountant)
    run = Run(defense)
    assert not defense.can_harden
    assert defense.harden() is None
    assert defense.privacy.noise_multiplier == 1.0
    run.step(first(0))
    defense._budget.noise_multiplier = 2.0
    with pytest.raises(DefenseError, match="use a RenyiFilter"):
        run.step(first(0))
