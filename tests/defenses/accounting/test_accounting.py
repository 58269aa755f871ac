"""Epsilon against Google's dp-accounting and closed forms; the ledger; the Renyi filter."""

import builtins
import math
import os
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate
from scipy.fft import irfft, rfft
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.accounting import Accountant, RenyiFilter, accounting
from lightning_fedleak.defenses.accounting import accounting as privacy_loss
from lightning_fedleak.defenses.accounting.account import best_order
from lightning_fedleak.defenses.accounting.accounting import (
    MAX_EPSILON,
    MIN_NOISE,
    ORDERS,
    curve_of,
    epsilon_of,
    epsilons_of_rdp,
    noise_multiplier_for,
    rdp_of,
)
from lightning_fedleak.defenses.accounting.budget import Account, Budget, BudgetSpent
from lightning_fedleak.defenses.accounting.ledger import client_path
from lightning_fedleak.evaluation.auditing import curve_tpr, gaussian_epsilon, gaussian_tpr
from tests.helpers.gaussian import gaussian_delta

pytest.importorskip("opacus")


RATES = st.floats(1e-3, 0.3)
NOISE = st.floats(0.6, 8.0)
STEPS = st.integers(1, 2000)
ONCE = (Phase.explicit, Phase.generate)  # shrinking would trace slow python loops
DELTAS = st.sampled_from([1e-4, 1e-5, 1e-7])


def google(kind: str, history, delta: float, width: float = 1e-4) -> float:
    dp = pytest.importorskip("dp_accounting")
    if kind == "rdp":
        from dp_accounting.rdp import RdpAccountant as Theirs
    else:
        from dp_accounting.pld import PLDAccountant as Theirs
    accountant = Theirs(ORDERS) if kind == "rdp" else Theirs(value_discretization_interval=width)
    for sigma, rate, count in history:
        event = dp.GaussianDpEvent(sigma)
        if rate < 1:
            event = dp.PoissonSampledDpEvent(rate, event)
        accountant.compose(dp.SelfComposedDpEvent(event, count))
    return accountant.get_epsilon(delta)


# ---- epsilon --------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-3, 1e-9])
@pytest.mark.parametrize(
    "history",
    [
        [(MIN_NOISE, 0.01, 1)],
        [(0.5, 0.7, 100)],
        [(1.0, 1e-4, 10**5)],
        [(1.1, 0.05, 1000)],
        [(4.0, 0.5, 3)],
        [(100.0, 0.01, 10**6)],
        [(1e6, 0.02, 7)],
        [(2.0, 1.0, 12)],
        [(0.6, 0.01, 50), (3.0, 0.3, 20)],
    ],
)
def test_the_search_finds_the_least_epsilon_of_all_orders(history: Any, delta: float) -> None:
    all_orders = epsilons_of_rdp(accounting.composed_rdp(history, "poisson"), delta)
    expected = float(all_orders.min())
    expected = expected if expected <= MAX_EPSILON else math.inf
    assert epsilon_of(history, delta, "rdp") == expected


@given(sigma=NOISE, rate=RATES, steps=STEPS, delta=DELTAS)
@settings(max_examples=12, deadline=None, phases=ONCE)
def test_rdp_epsilon_equals_google_rdp(sigma: float, rate: float, steps: int, delta: float) -> None:
    ours = epsilon_of([(sigma, rate, steps)], delta, "rdp")
    theirs = google("rdp", [(sigma, rate, steps)], delta)
    if theirs <= MAX_EPSILON:
        assert ours <= theirs * 1.01 + 1e-6
    if ours < theirs * 0.99:  # Google bounds orders near 1 from above, or leaves them out
        assert theirs > 10
        assert ours == pytest.approx(epsilon_by_integral(sigma, rate, steps, delta), rel=1e-3)


def renyi(order: float, sigma: float, rate: float) -> float:
    """Renyi divergence of one release, by numerical integration."""

    def integrand(x: float) -> float:
        ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * sigma**2))
        return math.exp(-(x**2) / (2 * sigma**2) + order * math.log(ratio))

    peak = order + 12 * sigma
    whole, _ = integrate.quad(integrand, -12 * sigma, peak, limit=400, points=[0, order])
    return math.log(whole / (sigma * math.sqrt(2 * math.pi))) / (order - 1)


def epsilon_by_integral(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Balle et al. 2020, Theorem 21, at the best of some orders."""
    return min(
        steps * renyi(a, sigma, rate)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in np.arange(1.1, 6.0, 0.1)
    )


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"), [(0.7, 1e-3, 10, 1e-5), (5.0, 1e-3, 10, 1e-5)]
)
def test_prv_epsilon_equals_google_pld_where_rdp_is_many_times_larger(
    sigma, rate, steps, delta
) -> None:
    history = [(sigma, rate, steps)]
    ours = epsilon_of(history, delta, "prv")
    assert ours == pytest.approx(google("prv", history, delta), rel=0.01)
    assert epsilon_of(history, delta, "rdp") > 2 * ours


def test_epsilon_of_a_schedule_equals_google_rdp() -> None:
    history = [(1.0, 0.01, 300), (2.0, 0.02, 200), (0.9, 0.005, 100)]
    for kind in ("rdp", "prv"):
        ours = epsilon_of(history, 1e-5, kind)
        assert ours == pytest.approx(google(kind, history, 1e-5, 1e-3), rel=0.01)
        assert epsilon_of(history[::-1], 1e-5, kind) == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize(
    ("sigma", "steps", "delta", "factor"),
    [
        *((sigma, steps, 1e-5, 1.01) for sigma in (0.5, 1.0, 4.0) for steps in (1, 40)),
        *((100.0, 10_000, delta, 1.05) for delta in (1e-10, 1e-13)),
        (30.0, 1000, 1e-13, 1.05),
        (5.0, 10, 1e-14, 1.05),
    ],
)
def test_full_batches_are_the_gaussian_mechanism_and_no_rounding_understates_it(
    sigma: float, steps: int, delta: float, factor: float
) -> None:
    exact = gaussian_epsilon(sigma=sigma / math.sqrt(steps), delta=delta)
    prv = epsilon_of([(sigma, 1.0, steps)], delta, "prv")
    assert exact <= prv <= exact * factor or exact > MAX_EPSILON
    assert delta < 1e-5 or prv <= epsilon_of([(sigma, 1.0, steps)], delta, "rdp")


def hockey_stick(epsilon: float, sigma: float, rate: float) -> float:
    """delta of one release, exactly, of the worse of adding and removing."""
    upper = scipy.stats.norm(0, sigma).sf
    raised = math.exp(epsilon)
    cut = sigma**2 * math.log((raised - 1 + rate) / rate) + 0.5
    removed = (1 - rate - raised) * upper(cut) + rate * upper(cut - 1)
    if 1 / raised <= 1 - rate:
        return float(removed)
    cut = sigma**2 * math.log((1 / raised - 1 + rate) / rate) + 0.5
    lower = scipy.stats.norm(0, sigma).cdf
    added = lower(cut) - raised * ((1 - rate) * lower(cut) + rate * lower(cut - 1))
    return float(max(removed, added))


@given(sigma=st.floats(0.3, 5), rate=st.floats(0.01, 0.99))
@settings(max_examples=6, deadline=None, phases=ONCE)
def test_one_sampled_release_is_the_exact_hockey_stick(sigma: float, rate: float) -> None:
    delta = 1e-4
    if hockey_stick(1e-3, sigma, rate) < delta:
        return
    exact = brentq(lambda e: hockey_stick(e, sigma, rate) - delta, 1e-3, 150)
    prv = epsilon_of([(sigma, rate, 1)], delta, "prv")
    assert exact <= prv <= exact * 1.01 + 1e-3


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.3), (1.0, 0.03), (2.0, 0.3), (5.0, 0.3)])
def test_renyi_divergences_are_the_integrals(sigma: float, rate: float) -> None:
    for order in (1.1, 1.5, 3.3, 8.0):
        exact = renyi(order, sigma, rate)
        assert rdp_of(sigma, rate)[ORDERS.index(order)] == pytest.approx(exact, rel=1e-4)


@given(st.floats(0.3, 60), st.floats(0.001, 1), st.integers(1, 3000), DELTAS)
@settings(max_examples=3, deadline=None, phases=ONCE)
def test_a_calibrated_noise_meets_its_target_and_no_more(target, rate, steps, delta) -> None:
    sigma = noise_multiplier_for(target, delta, rate, steps, "rdp")
    assert epsilon_of([(sigma, rate, steps)], delta, "rdp") <= target
    assert epsilon_of([(sigma * 0.999, rate, steps)], delta, "rdp") > target


@pytest.mark.parametrize("kind", ["prv", "rdp"])
def test_negligible_noise_gives_an_infinite_epsilon(kind, monkeypatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("the accountant was called")

    monkeypatch.setattr(accounting, "prv_epsilon", never)
    for sigma in (0.0, 1e-3, MIN_NOISE * 0.99):
        assert epsilon_of([(sigma, 0.01, 5)], 1e-5, kind) == math.inf
    assert epsilon_of([(1.0, 1.0, 10**7)], 1e-5, "rdp") == math.inf


def test_prv_gives_up_on_a_loss_beyond_floats_and_rdp_stands(monkeypatch) -> None:
    monkeypatch.setattr(privacy_loss, "PRV_MAX_LOSS", 1.0)
    history = [(1.0, 0.1, 100)]
    assert epsilon_of(history, 1e-5, "prv") == epsilon_of(history, 1e-5, "rdp")


# ---- Accountant -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prv", "rdp"])
def test_steps_accumulate_and_merge_in_the_history(kind) -> None:
    accountant = Accountant(kind)
    assert accountant.steps == 0
    assert accountant.epsilon(1e-5) == 0.0
    accountant.step(1.0, 0.01)
    accountant.step(1.0, 0.01, count=99)
    assert accountant.steps == 100
    assert accountant.history == ((1.0, 0.01, 100),)
    assert accountant.epsilon(1e-5) == epsilon_of([(1.0, 0.01, 100)], 1e-5, kind)


def test_with_slack_epsilon_is_an_upper_bound_of_few_calls(monkeypatch) -> None:
    calls = []

    def counted(history, delta, kind, sampling):
        calls.append(history)
        return epsilon_of(history, delta, "rdp")

    monkeypatch.setattr(privacy_loss, "epsilon_of", counted)
    accountant, worst = Accountant("prv"), 1.0
    for _ in range(2000):
        accountant.step(1.0, 0.01)
        bound = accountant.epsilon(1e-5, slack=0.02)
        exact = epsilon_of(accountant.history, 1e-5, "rdp")
        assert bound >= exact
        worst = max(worst, bound / exact)
    assert worst < 1.015
    assert len(calls) <= 100 + 55 * math.log(2000 / 100)
    calls.clear()
    for _ in range(3):
        accountant.epsilon(1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["prv", "rdp"])
def test_allows_is_exact_in_few_calls(kind, monkeypatch) -> None:
    calls = []

    def counted(history, delta, kind, sampling):
        calls.append(history)
        return epsilon_of(history, delta, "rdp")

    monkeypatch.setattr(privacy_loss, "epsilon_of", counted)
    accountant = Accountant(kind)
    budget = epsilon_of([(1.0, 0.01, 777)], 1e-5, "rdp")
    while accountant.allows(budget, 1e-5, 1.0, 0.01):
        accountant.step(1.0, 0.01)
    assert accountant.steps == 777
    assert len(calls) < 30
    assert not accountant.allows(budget, 1e-5, 1.0, 0.01, count=2)
    assert accountant.allows(budget * 2, 1e-5, 1.0, 0.01, count=2)
    assert not accountant.allows(budget, 1e-5, 3.0, 0.5)


def test_noise_that_changes_is_refused_unless_planned() -> None:
    accountant = Accountant("prv")
    accountant.step(1.0, 0.01)
    with pytest.raises(DefenseError, match="RenyiFilter"):
        accountant.step(2.0, 0.01)
    assert accountant.steps == 1
    accountant.step(2.0, 0.01, planned=True)
    accountant.step(1.0, 0.01)
    assert accountant.history == ((1.0, 0.01, 2), (2.0, 0.01, 1))


def test_the_counter_never_runs_backwards() -> None:
    accountant = Accountant("rdp")
    accountant.step(1.0, 0.01, count=7)
    early = accountant.state_dict()
    accountant.step(1.0, 0.01, count=5)
    late = accountant.state_dict()
    accountant.load_state_dict(early)
    assert accountant.steps == 12
    accountant.load_state_dict({})
    assert accountant.steps == 12
    fresh = Accountant("prv")
    fresh.load_state_dict(early)
    assert fresh.steps == 7
    fresh.load_state_dict(late)
    assert fresh.history == accountant.history
    assert all(isinstance(value, torch.Tensor) for value in late.values())


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(DefenseError, match="sample_rate"):
        Accountant("rdp").load_state_dict({"releases": torch.tensor([[1.0, 7.0, 1.0]])})


def test_without_opacus_the_extra_is_named(monkeypatch) -> None:
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opacus"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DefenseError, match=r"pip install .*\[dp\]"):
        Accountant("rdp")


# ---- ledger ---------------------------------------------------------------------------------


def test_releases_of_a_checkpoint_that_the_ledger_lacks_are_written_to_it(tmp_path: Path) -> None:
    elsewhere = Accountant("rdp")
    elsewhere.step(1.0, 0.01, count=9)
    here = Accountant("rdp", ledger=tmp_path / "new.ledger")
    here.load_state_dict(elsewhere.state_dict())
    assert Accountant(ledger=tmp_path / "new.ledger").steps == 9


def test_a_ledger_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first, second = Accountant(ledger=path), Accountant(ledger=path)
    first.record(1.0, 0.01, 5)
    with pytest.raises(DefenseError, match="changed by something else"):
        second.record(1.0, 0.01, 7)
    assert second.steps == 0
    third = Accountant(ledger=path)
    third.record(1.0, 0.01)
    with pytest.raises(DefenseError, match="changed by something else"):
        first.record(1.0, 0.01)
    path.unlink()
    with pytest.raises(DefenseError, match="cannot be written"):
        third.record(1.0, 0.01)
    assert not path.exists()


def test_a_line_that_does_not_reach_the_disk_is_taken_back(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    ledger = Accountant(ledger=path)
    ledger.record(1.0, 0.01)

    def fails(descriptor: int) -> None:
        raise OSError("broken disk")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails)
        with pytest.raises(DefenseError, match="broken disk"):
            ledger.record(1.0, 0.01)
    ledger.record(1.0, 0.01)
    assert ledger.steps == Accountant(ledger=path).steps == 2


# ---- RenyiFilter ----------------------------------------------------------------------------


def steps_left(budget: RenyiFilter, sigma: float, rate: float) -> int:
    """How many more releases of this kind fit, one after the other."""
    return next(n for n in range(10**6) if not budget.allows(sigma, rate, n + 1))


def started_filter(
    epsilon: float = 6.0, sigma: float = 1.0, rate: float = 0.05, **more: Any
) -> RenyiFilter:
    """A budget at the order for this noise."""
    budget = RenyiFilter(epsilon, 1e-5, **more)
    budget.begin(sigma, rate)
    return budget


def test_one_order_for_the_planned_noise_is_rdp_itself() -> None:
    budget = started_filter(4.0, 1.0, 0.01)
    assert budget.order == best_order(4.0, 1e-5, 1.0, 0.01)
    steps = steps_left(budget, 1.0, 0.01)
    assert epsilon_of([(1.0, 0.01, steps)], 1e-5, "rdp") <= 4.0
    assert epsilon_of([(1.0, 0.01, steps + 1)], 1e-5, "rdp") > 4.0


@given(st.lists(st.sampled_from([0.8, 1.0, 1.7, 3.0]), min_size=1, max_size=60))
def test_whatever_fits_costs_no_more_than_the_budget(choices) -> None:
    budget = started_filter()
    for sigma in choices:
        if budget.allows(sigma, 0.05):
            budget.step(sigma, 0.05)
        else:
            with pytest.raises(DefenseError, match="would exceed"):
                budget.step(sigma, 0.05)
    assert budget._share(budget.history) <= 1
    if budget.steps:
        assert epsilon_of(budget.history, 1e-5, "rdp") <= 6.0


def test_larger_noise_is_allowed_after_the_budget_is_used() -> None:
    budget = started_filter()
    budget.step(1.0, 0.05, count=steps_left(budget, 1.0, 0.05))
    assert not budget.allows(1.0, 0.05)
    assert steps_left(budget, 1.0, 0.05) == 0
    assert budget.allows(4.0, 0.05)


def test_the_filter_resumes_and_pickles(tmp_path: Path) -> None:
    budget = started_filter(ledger=tmp_path / "ledger")
    budget.step(1.0, 0.05, count=3)
    state = budget.state_dict()
    budget.step(2.0, 0.05, count=3)
    budget.load_state_dict(state)
    assert budget.steps == 6
    fresh = RenyiFilter(6.0, 1e-5)
    fresh.load_state_dict(budget.state_dict())
    assert fresh._share(fresh.history) == pytest.approx(budget._share(budget.history))
    assert RenyiFilter(6.0, 1e-5, ledger=tmp_path / "ledger").history == budget.history
    assert pickle.loads(pickle.dumps(budget)).history == budget.history


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: RenyiFilter(0.0, 1e-5), "epsilon"),
        (lambda: RenyiFilter(math.inf, 1e-5), "epsilon"),
        (lambda: RenyiFilter(1.0, 0.0), "delta"),
        (lambda: best_order(0.1, 1e-5, 0.1, 1.0), "not one release"),
        (lambda: best_order(100.0, 1e-5, 0.0, 1.0), "not one release"),
        (lambda: started_filter().step(0.0, 0.5), "would exceed"),
    ],
)
def test_the_filter_refuses(call, word: str) -> None:
    with pytest.raises(DefenseError, match=word):
        call()


# ---- curves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.7, 2.0, 10.0])
def test_a_curve_is_the_gaussian_mechanisms(sigma: float) -> None:
    history = [(sigma, 1.0, 1)]
    for kind, excess in (("prv", 0.02), ("rdp", 0.55)):
        curve = curve_of(history, kind)
        assert curve[0][0] == 0
        for epsilon, delta in curve:
            assert delta >= gaussian_delta(epsilon, sigma) * (1 - 1e-6)
        exact = gaussian_tpr(0.01, sigma)
        assert exact < curve_tpr(0.01, curve) < exact * (1 + excess)


@pytest.mark.parametrize("history", [[(1.0, 0.02, 300)], [(0.8, 0.1, 20), (1.5, 0.1, 50)]])
def test_a_curve_equals_google_pld(history) -> None:
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for sigma, rate, count in history:
        event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
        accountant.compose(dp.SelfComposedDpEvent(event, count))
    curve = curve_of(history, "prv")
    for epsilon, delta in curve:
        theirs = accountant.get_delta(epsilon)
        if theirs > 1e-6:
            assert theirs * 0.98 <= delta <= theirs * 1.15
    rdp = curve_of(history, "rdp")
    assert curve_tpr(0.01, curve) < curve_tpr(0.01, rdp) < 1


def test_no_release_allows_nothing_and_no_noise_everything() -> None:
    assert curve_of([], "prv") == ((0.0, 0.0),)
    assert curve_of([(0.01, 0.1, 1)], "prv") == ()


# The budget of DP-SGD where the data change between two fits of one defence.


TARGET, DELTA, BUDGET_STEPS = 2.0, 1e-3, 100


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
        budget.count_release()
    return most


@pytest.mark.parametrize("path", [None, "ledger"])
def test_a_release_counts_with_the_noise_of_the_budget(path: str | None, tmp_path: Path) -> None:
    local = fixed(2.0)
    if path:
        local.open_ledger(tmp_path / path)
    local.settle(0.1, DELTA, lambda: BUDGET_STEPS)
    for local.is_counted in (True, False, True, True):
        local.count_release()
    assert (local.noise_now, local.accountant.history) == (2.0, ((2.0, 0.1, 3),))
    local.noise_multiplier = 3.0
    with pytest.raises(DefenseError, match="are not those of earlier releases"):
        local.count_release()
    assert local.accountant.steps == 3


@pytest.mark.parametrize(("kind", "saved"), [("rdp", False), ("rdp", True), ("filter", False)])
def test_noise_is_found_anew_as_long_as_nothing_was_released(kind: Account, saved: bool) -> None:
    """The first fit ends before its first release; the second has twenty times the batch size."""
    local = budget(kind)
    local.settle(0.01, DELTA, lambda: BUDGET_STEPS)
    before = local.noise_now
    if saved:
        state, local = local.state_dict(), budget(kind)
        local.load_state_dict(state, 0)
    local.settle(0.2, DELTA, lambda: 2 * BUDGET_STEPS)
    assert local.noise_now > 2 * before
    assert spend(local, 3 * BUDGET_STEPS) == 2 * BUDGET_STEPS
    assert local.privacy.epsilon <= TARGET


def test_noise_found_for_a_smaller_sample_rate_covers_nothing_at_a_larger(tmp_path: Path) -> None:
    """A checkpoint of before the first release, and a ledger with releases at another rate."""
    first = budget()
    first.settle(0.05, DELTA, lambda: BUDGET_STEPS)
    Accountant(ledger=tmp_path / "ledger").record(first.noise_now, 0.2)
    later = budget()
    later.open_ledger(tmp_path / "ledger")
    later.load_state_dict(first.state_dict(), 0)
    later.settle(0.2, DELTA, lambda: BUDGET_STEPS)
    assert later.noise_now == first.noise_now
    assert 0 < spend(later, BUDGET_STEPS) < BUDGET_STEPS / 2
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
    seeded.settle(0.1, DELTA, lambda: BUDGET_STEPS)
    assert spend(seeded, 3) == 3
    resumed = made(False)
    if through == "checkpoint":
        resumed.load_state_dict(seeded.state_dict(), 3)
    with pytest.raises(
        DefenseError, match=r"noise_multiplier=1 .* are not those of the 3 releases before, 0 "
    ):
        resumed.settle(0.1, DELTA, lambda: BUDGET_STEPS)
    assert resumed.accountant.steps == 3
    assert resumed.privacy.epsilon == math.inf
    with pytest.raises(DefenseError, match="are not those of earlier releases"):
        resumed.count_release()


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.2), (2.0, 0.1)])
def test_another_noise_or_rate_than_before_is_refused_at_setup(noise: float, rate: float) -> None:
    first = fixed(1.0)
    first.settle(0.1, DELTA, lambda: BUDGET_STEPS)
    assert spend(first, 3) == 3
    first.settle(0.1, DELTA, lambda: 2 * BUDGET_STEPS)
    later, other = fixed(noise), fixed(noise)
    later.load_state_dict(first.state_dict(), 3)
    with pytest.raises(DefenseError, match=r"those of the 3 releases before, 1 and 0\.1"):
        later.settle(rate, DELTA, lambda: BUDGET_STEPS)
    other.settle(rate, DELTA, lambda: BUDGET_STEPS)  # restored after the loader was made
    other.load_state_dict(first.state_dict(), 3)
    with pytest.raises(DefenseError, match="those of the 3 releases"):
        other.check_not_overdrawn()


@pytest.mark.parametrize("saved", [False, True])
def test_at_the_same_rate_it_covers_the_planned_steps(saved: bool) -> None:
    plan = budget()
    plan.settle(0.05, DELTA, lambda: BUDGET_STEPS)
    assert spend(plan, 30) == 30
    if saved:
        state, plan = plan.state_dict(), budget()
        plan.load_state_dict(state, 30)
    plan.settle(0.05, DELTA, lambda: BUDGET_STEPS)
    assert spend(plan, BUDGET_STEPS) == BUDGET_STEPS - 30
    assert plan.privacy.epsilon == pytest.approx(TARGET, rel=0.01)
    assert plan.privacy.epsilon <= TARGET


# Batches of a fixed number: pairs of laws, and their composition, against computations of them.


FIXED = "without_replacement"
FIXED_BATCHES_DELTA = 1e-5
CELLS = [(3.0, 0.01, 25), (1.0, 0.1, 100)]


def composed(
    sigma: float, rate: float, rounds: int, *, up: bool, width: float = 2e-4
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return losses and masses of all rounds, by FFT of a mesh of one pair made of two.

    Losses are rounded up, so that every delta is an upper bound, or down. They are read off
    cells of the outcome, whose masses are differences of normal distribution functions.
    """
    ends = np.linspace(-10 * sigma, 1 + 10 * sigma, 400_001)
    p, q = np.diff(norm.cdf(ends, 1, sigma)), np.diff(norm.cdf(ends, 0, sigma))
    first, second = (1 - rate) * q + rate * p, (1 - rate) * p + rate * q
    seen = (p > 0) & (q > 0)
    p, q, first, second = p[seen], q[seen], first[seen], second[seen]
    above = first > q
    masses = np.concatenate([first[above], p[~above]])
    losses = np.log(np.concatenate([(first / q)[above], (p / second)[~above]]))
    return summed(masses, losses, rounds, up=up, width=width)


def summed(
    masses: NDArray[np.float64], losses: NDArray[np.float64], rounds: int, *, up: bool, width: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rounded = np.ceil if up else np.floor
    places = rounded(losses / width).astype(int)
    size = 1 << 19
    mesh = np.bincount(places % size, masses, size)
    mesh[0] += max(1 - mesh.sum(), 0.0)  # the rest is of loss 0
    sums = np.maximum(irfft(rfft(mesh) ** rounds, size), 0.0)
    steps = np.arange(size)
    return width * np.where(steps < size // 2, steps, steps - size), sums


def epsilon_at(losses: NDArray[np.float64], masses: NDArray[np.float64]) -> float:
    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        above = losses > middle
        delta = -(masses[above] * np.expm1(middle - losses[above])).sum()
        low, high = (middle, high) if delta > FIXED_BATCHES_DELTA else (low, middle)
    return high


@pytest.mark.parametrize(("sigma", "rate", "rounds"), CELLS)
def test_epsilon_is_that_of_a_mesh_of_the_pair(sigma: float, rate: float, rounds: int) -> None:
    low, high = (epsilon_at(*composed(sigma, rate, rounds, up=up)) for up in (False, True))
    found = epsilon_of([(sigma, rate, rounds)], FIXED_BATCHES_DELTA, "prv", FIXED)
    assert low <= found <= 1.006 * high
    assert (low + high) / 2 == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"), [(1.0, 0.1, 2.0), (0.6, 0.3, 5.5), (8, 0.01, 32)]
)
def test_renyi_divergence_is_the_pairs(sigma: float, rate: float, order: float) -> None:
    mp = pytest.importorskip("mpmath")
    with mp.workdps(40):

        def terms(x: float) -> float:
            p, q = (mp.npdf(x, mean, sigma) for mean in (1, 0))
            first, second = (1 - rate) * q + rate * p, (1 - rate) * p + rate * q
            return first**order * q ** (1 - order) if p > q else p**order * second ** (1 - order)

        rest = (1 - mp.mpf(rate)) * (2 * mp.ncdf(0.5 / sigma) - 1)
        places = [*mp.linspace(0.5 - 12 * sigma, 0.5, 9), *mp.linspace(0.5, order + 12 * sigma, 33)]
        moment = mp.quad(terms, places) + rest
        expected = float(mp.log(moment) / (order - 1))
    assert rdp_of(sigma, rate, FIXED)[ORDERS.index(order)] == pytest.approx(expected, rel=1e-9)


def test_accountants_targets_and_filters_use_the_same_account() -> None:
    sigma, rate, rounds = CELLS[1]
    account = Accountant("prv", sampling=FIXED)
    account.step(sigma, rate, rounds)
    assert account.epsilon(FIXED_BATCHES_DELTA) == epsilon_of(
        [CELLS[1]], FIXED_BATCHES_DELTA, "prv", FIXED
    )
    for kind in ("prv", "rdp"):
        noise = noise_multiplier_for(3.0, FIXED_BATCHES_DELTA, rate, rounds, kind, FIXED)
        assert epsilon_of(
            [(noise, rate, rounds)], FIXED_BATCHES_DELTA, kind, FIXED
        ) == pytest.approx(3, abs=1e-3)
    budget = RenyiFilter(3.0, FIXED_BATCHES_DELTA, sampling=FIXED)
    budget.begin(noise, rate)
    assert budget.allows(noise, rate, rounds - 1)
    assert not budget.allows(noise, rate, rounds + 1)


# A ledger never touches a file that is not its own, and says what it does not take and why.


OWN = b"1.0 0.01 5\n0.5 1e-05 3\n"


def names(path: Path) -> str:
    """What begins the error of a ledger at ``path``: the argument."""
    return rf"^ledger={re.escape(repr(str(path)))} "


@pytest.mark.parametrize(
    "tail", [b"", b"7", b"2.0 0.", b"2.0 0.01 ", b"2.0 0.01 4", b"1e-", b"1\r"]
)
def test_reading_writes_nothing_and_half_a_line_goes_with_the_next_release(
    tmp_path: Path, tail: bytes
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN + tail)
    ledger = Accountant(ledger=path)
    assert (ledger.steps, path.read_bytes()) == (8, OWN + tail)
    ledger.record(1.0, 0.01, 2)
    assert path.read_bytes() == OWN + b"1.0 0.01 2\n"
    assert ledger.steps == Accountant(ledger=path).steps == 10


@pytest.mark.parametrize(
    "text",
    [
        b"Dear diary",
        b"Dear diary\ntoday 1.0 0.01 5",
        b" ",
        b"\n",
        OWN + b"2.0 2.0 ",
        OWN + b"1_0",
        OWN + b"1 2 3 4",
        OWN + b"7" * 200,
        OWN + b"\xff\xfe",
        OWN + b"\n",
        OWN + b" 1.0 0.01 1\n",
        OWN + b"1.0 0.01 1 \n",
        OWN + "\uff11.0 0.01 1\n".encode(),
        OWN + b"nan 0.01 1\n",
        OWN + b"1.0 0.01 0\n",
        OWN + b"1.0 0.01 1" + b"0" * 5000 + b"\n",
    ],
    ids=lambda text: ascii(text[-24:]),
)
def test_a_file_of_someone_else_stays_as_it_was(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(text)
    with pytest.raises(DefenseError, match=names(path)) as refused:
        Accountant(ledger=path)
    assert path.read_bytes() == text
    assert "diary" not in str(refused.value)


@pytest.mark.parametrize("name", ["ledger.at-most-9-of-25", "ledger.at-most-9-of-25.0-of-2"])
@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("clients", [1, 2])
def test_a_ledger_of_truncated_batches_is_not_gone_on_from(
    tmp_path: Path, name: str, unit: str, clients: int
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DefenseError, match=f"{names(tmp_path / name)}.*another unit of privacy"):
        client_path(tmp_path / "ledger", 0, clients, unit)


def folder(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.with_name("target").write_bytes(OWN)
    path.symlink_to(path.with_name("target"))


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def local_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes and sockets")
@pytest.mark.parametrize("make", [folder, link, link_to_nowhere, pipe, local_socket])
def test_what_is_no_file_is_neither_opened_nor_written(
    tmp_path: Path, monkeypatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    path = Path("ledger")
    make(path)
    before = sorted(p.name for p in Path().iterdir())

    def opened(*_: object) -> int:
        raise AssertionError("a pipe would wait here for ever")

    with monkeypatch.context() as closed:
        closed.setattr(os, "open", opened)
        with pytest.raises(DefenseError, match=names(path) + "is no regular file"):
            Accountant(ledger=path)
    assert sorted(p.name for p in Path().iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("make", [folder, link, pipe])
def test_what_took_the_place_of_the_file_is_not_written(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger = Accountant(ledger=path)
    path.unlink()
    make(path)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert ledger.steps == 8
    if path.is_symlink():
        assert path.read_bytes() == OWN


def test_what_another_wrote_behind_a_torn_line_is_not_cut(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger, write = Accountant(ledger=path), os.write

    def beside(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data[:3])
        write(descriptor, b"someone else's")
        return written

    monkeypatch.setattr(os, "write", beside)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert path.read_bytes().endswith(b"someone else's")
    assert ledger.steps == 8


def test_a_full_disk_behind_half_a_line_counts_nothing(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN + b"1.0 0")
    ledger, write = Accountant(ledger=path), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with pytest.raises(DefenseError, match="fit on the disk"):
        ledger.record(1.0, 0.01)
    monkeypatch.undo()
    assert path.read_bytes() == OWN
    ledger.record(1.0, 0.01, 2)
    assert ledger.steps == Accountant(ledger=path).steps == 10


@pytest.mark.parametrize("count", [5, 5.0])
def test_whatever_is_recorded_can_be_read_again(tmp_path: Path, count: float) -> None:
    path = tmp_path / "ledger"
    ledger = Accountant(ledger=path)
    for sigma, rate in ((-0.0, 1), (1, 5e-324), (1.7976931348623157e308, 0.1), (1e16, 1e-5)):
        ledger.record(sigma, rate, count)  # type: ignore[arg-type]
    assert Accountant(ledger=path).history == ledger.history
    assert all(isinstance(row[2], int) for row in ledger.history)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, 1.5])
def test_of_a_checkpoint_that_holds_no_counts_nothing_is_taken(tmp_path: Path, bad: float) -> None:
    other = Accountant()
    other.record(1.0, 0.01, 3)
    other.record(2.0, 0.01, 3)
    state = other.state_dict()
    state["releases"][1, 2] = bad
    path = tmp_path / "ledger"
    ledger = Accountant(ledger=path)
    with pytest.raises(DefenseError, match="count"):
        ledger.load_state_dict(state)
    assert ledger.steps == 0
    assert not path.exists()
