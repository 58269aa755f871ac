"""Betting tests against exact enumeration, their guarantee by simulation, and their power."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from lightning_fedleak.evaluation.metrics.betting import (
    BETS,
    LOG_SHARE,
    MeanTest,
    bet,
    log_evidence,
    start,
)

ALPHA = 0.05


def exact(values: list[Fraction], m: Fraction) -> Fraction:
    """The e-process in rationals, every start of every gambler written out."""
    total = Fraction(0)
    n = len(values)
    for share, weight in zip(BETS.tolist(), np.exp(LOG_SHARE).tolist(), strict=True):
        stake = Fraction(share) / m
        starts = range(1, n + 1)
        for j in starts:
            capital = Fraction(1, j * (j + 1))
            for value in values[j - 1 :]:
                capital *= 1 + stake * (value - m)
            total += Fraction(weight) * capital
    return total + Fraction(1, n + 1)


def evidence(values, m: float) -> float:
    capital = start()
    for i, value in enumerate(values):
        capital = bet(capital, i, float(value), m)
    return math.exp(log_evidence(capital, len(values)))


def test_evidence_is_the_product_of_all_bets() -> None:
    values = [Fraction(k, 16) for k in (3, 16, 0, 7, 9, 0, 16, 1)]
    for m in (Fraction(1, 4), Fraction(15, 16)):
        for n in range(len(values) + 1):
            expected = float(exact(values[:n], m))
            assert evidence(values[:n], float(m)) == pytest.approx(expected, rel=1e-9)


def test_evidence_is_expected_to_stay_one_at_the_threshold_and_to_fall_below_it() -> None:
    """The mean over all 2^8 paths of coins, each path weighted with its chance."""
    for p, sign in ((0.3, 0), (0.2, -1), (0.4, 1)):
        mean = 0.0
        for path in itertools.product((0, 1), repeat=8):
            chance = math.prod(p if x else 1 - p for x in path)
            mean += chance * evidence(path, 0.3)
        assert np.sign(round(mean - 1, 9)) == sign


def processes(rng: np.random.Generator, runs: int, m: float):
    """Values of which each has a conditional mean of m, or less, given all before it."""
    half = np.full(runs, m)
    beta = rng.beta(30 * m, 30 * (1 - m), size=runs)
    coin = (rng.random(runs) < half).astype(float)
    return coin, beta


def adaptive(rng: np.random.Generator, last: np.ndarray, mean: np.ndarray, m: float):
    """Rises after high values and falls after low ones, but is never expected above m."""
    mean = np.clip(np.where(last > mean, 1.3 * mean, 0.6 * mean) + 0.01, 0.01, m)
    return (rng.random(mean.size) < mean).astype(float), mean


@pytest.mark.slow
@pytest.mark.parametrize("m", [0.3, 0.02])
def test_ten_thousand_looks_below_the_threshold_stop_with_probability_alpha(m) -> None:
    """Coins and beta values at the threshold, and autocorrelated ones below; 150 runs each."""
    runs, rng = 150, np.random.default_rng(0)
    capital = start((3 * runs,))
    crossed = np.zeros(3 * runs, dtype=bool)
    last, mean = np.zeros(runs), np.full(runs, m / 2)
    for t in range(10_000):
        coin, beta = processes(rng, runs, m)
        last, mean = adaptive(rng, last, mean, m)
        capital = bet(capital, t, np.concatenate([coin, beta, last]), m)
        crossed |= log_evidence(capital, t + 1) >= -math.log(ALPHA)
    for kind in crossed.reshape(3, runs):
        assert kind.mean() <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)
    assert crossed.any()


def first_crossings(values: np.ndarray, m: float) -> np.ndarray:
    """(runs,) look at which the evidence suffices; values (looks, runs)."""
    capital = start(values.shape[1:])
    first = np.full(values.shape[1], np.inf)
    for t, value in enumerate(values):
        capital = bet(capital, t, value, m)
        enough = log_evidence(capital, t + 1) >= -math.log(ALPHA)
        first = np.where(enough & np.isinf(first), t + 1, first)
    return first


def test_a_mean_above_is_found() -> None:
    rng = np.random.default_rng(0)
    coins = (rng.random((300, 100)) < 0.5).astype(float)
    assert np.median(first_crossings(coins, 0.3)) < 70
    steady = np.clip(rng.normal(0.35, 0.05, (100, 100)), 0, 1)
    assert np.median(first_crossings(steady, 0.3)) < 40
    small = np.clip(rng.normal(0.03, 0.02, (400, 100)), 0, 1)
    assert np.isfinite(first_crossings(small, 0.02)).mean() > 0.95


# ---- the stateful test ----------------------------------------------------------------------


def test_mean_test_is_the_core_on_scaled_values() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, 50)
    test = MeanTest(0.2, span=(-1, 1))
    highest = 0.0
    for n, value in enumerate(values.tolist(), 1):
        test.update(value)
        expected = math.log(evidence((values[:n] + 1) / 2, 0.6))
        highest = max(highest, expected)
        assert test.log_evidence == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert test.highest == pytest.approx(highest, abs=1e-12)
    assert test.mean == pytest.approx(values.mean())


def test_state_survives_as_plain_numbers() -> None:
    import json

    whole, first, second = (MeanTest(0.3) for _ in range(3))
    values = np.random.default_rng(0).random(40).tolist()
    for value in values:
        whole.update(value)
    for value in values[:17]:
        first.update(value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[17:]:
        second.update(value)
    assert second.state_dict() == whole.state_dict()
    assert second.log_evidence == whole.log_evidence
    assert math.isnan(MeanTest(0.3).mean)


def test_very_long_runs_stay_finite() -> None:
    low, high = MeanTest(0.5), MeanTest(0.5)
    for _ in range(5_000):
        low.update(0.0)
        high.update(1.0)
    assert -20 < low.log_evidence < 0
    assert 2_500 < high.log_evidence < math.inf


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: MeanTest(0.0), "strictly between 0 and 1"),
        (lambda: MeanTest(1.0, span=(-1, 1)), "strictly between -1 and 1"),
        (lambda: MeanTest(0.5).update(1.1), "outside the span"),
        (lambda: MeanTest(0.5).update(math.nan), "outside the span"),
    ],
)
def test_what_cannot_be_meant_is_refused(act, words) -> None:
    with pytest.raises(ValueError, match=words):
        act()


# ---- values that are means of trials ------------------------------------------------------------


def test_a_bet_on_trials_is_a_bet_on_each_of_them() -> None:
    n, m, late = 8, 0.6, 10**9  # at so late a look next to no capital joins
    for right in range(n + 1):
        at_once = bet(np.zeros(8), late, right / n, m, trials=n)
        each = np.zeros(8)
        for value in [1.0] * right + [0.0] * (n - right):
            each = bet(each, late, value, m)
        assert at_once == pytest.approx(each)


@pytest.mark.parametrize(("members", "others"), [(1, 1), (2, 3), (4, 4)])
def test_a_bet_on_an_auc_gains_nothing_on_average_over_all_ways_to_guess(members, others) -> None:
    """All choices of members among scores with ties, by enumeration."""
    n = members + others
    for score in (np.arange(n), np.arange(n) // 2, np.zeros(n)):
        gains = []
        for chosen in itertools.combinations(range(n), members):
            member = np.isin(np.arange(n), chosen)
            pairs = [(x > y) + (x == y) / 2 for x in score[member] for y in score[~member]]
            value, late = float(np.mean(pairs)), 10**9  # so late next to no capital joins
            capital = bet(np.zeros(8), late, value, 0.5, trials=min(members, others))
            gains.append(np.exp(capital))
        assert (np.mean(gains, axis=0) <= 1 + 1e-12).all()


def test_trials_on_another_scale() -> None:
    test = MeanTest(0.2, span=(-1.0, 1.0))
    test.update(1.0, (1.0, 0.2, 16))
    assert test.log_evidence == pytest.approx(_of_sixteen(0.6))


def _of_sixteen(m: float) -> float:
    whole = log_evidence(bet(start(), 0, 1.0, m), 1)
    parts = log_evidence(bet(start(), 0, 1.0, m, trials=16), 1)
    return float(np.logaddexp(whole, parts)) - math.log(2)
