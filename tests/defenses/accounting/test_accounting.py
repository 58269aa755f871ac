"""Epsilon against Google's dp-accounting and closed forms; the ledger; the Renyi filter."""

from __future__ import annotations

import builtins
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.optimize import brentq

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.accounting import accounting
from lightning_fedleak.defenses.accounting import accounting as privacy_loss
from lightning_fedleak.defenses.accounting.account import (
    Accountant,
    RenyiFilter,
    best_order,
)
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


@given(sigma=st.floats(0.8, 5), rate=st.floats(0.005, 0.1), steps=st.integers(50, 1000))
@settings(max_examples=3, deadline=None, phases=ONCE)
def test_prv_epsilon_equals_google_pld(sigma: float, rate: float, steps: int) -> None:
    theirs = google("prv", [(sigma, rate, steps)], 1e-5)
    ours = epsilon_of([(sigma, rate, steps)], 1e-5, "prv")
    assert ours == pytest.approx(theirs, rel=0.01)


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
    assert budget._share(budget._spent()) <= 1
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
    assert fresh._share(fresh._spent()) == pytest.approx(budget._share(budget._spent()))
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
