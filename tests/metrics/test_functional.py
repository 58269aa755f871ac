"""Counts, rates, intervals by scikit-learn, brute force, simulation; pooled by the Metric."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.evaluation.metrics import (
    Counts,
    WordRecovery,
    precision_recall_f1,
    proportion,
    word_counts,
)

VOCAB = 30


def tail_at_least(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial, summed term by term in rationals of p."""
    q = Fraction(p)
    return float(sum(math.comb(n, i) * q**i * (1 - q) ** (n - i) for i in range(k, n + 1)))


def bisect(function, target: float) -> float:
    """Where an increasing function on [0, 1] crosses ``target``."""
    low, high = 0.0, 1.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


@given(
    guessed=st.lists(st.integers(0, VOCAB - 1), min_size=1),
    used=st.lists(st.integers(0, VOCAB - 1), min_size=1),
)
def test_rates_are_scikit_learns(guessed: list[int], used: list[int]) -> None:
    counts = word_counts(WordGuess(torch.tensor(guessed)), torch.tensor(used), VOCAB)
    rates = precision_recall_f1(counts)
    members = [[int(t in ids) for t in range(VOCAB)] for ids in (used, guessed)]
    expected = precision_recall_fscore_support(*members, average="binary", zero_division=np.nan)
    got = [rates[name].value for name in ("precision", "recall", "f1")]
    np.testing.assert_allclose(got, expected[:3], rtol=1e-12)
    assert counts.tp + counts.fp == len(set(guessed))
    assert counts.tp + counts.fn == len(set(used))


@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 5), (3, 7), (12, 12), (9, 40), (40, 41)])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_interval_inverts_the_binomial_tails(k: int, n: int, confidence: float) -> None:
    rate = proportion(k, n, confidence)
    alpha = (1 - confidence) / 2
    low = 0.0 if k == 0 else bisect(lambda p: tail_at_least(k, n, p), alpha)
    high = 1.0 if k == n else bisect(lambda p: tail_at_least(k + 1, n, p), 1 - alpha)
    assert rate.value == k / n
    assert rate.low == pytest.approx(low, abs=1e-9)
    assert rate.high == pytest.approx(high, abs=1e-9)


def test_f1_interval_covers_the_f1_of_independent_types() -> None:
    """Each type is a hit, a false alarm or a miss, drawn independently."""
    chances = np.array([0.6, 0.1, 0.3])
    truth = 2 * chances[0] / (2 * chances[0] + chances[1] + chances[2])
    draws = np.random.default_rng(1).multinomial(150, chances, size=2000)
    rates = [precision_recall_f1(Counts(*map(int, draw)))["f1"] for draw in draws]
    covered = np.mean([r.low <= truth <= r.high for r in rates])
    assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)
    assert np.mean([r.high - r.low for r in rates]) < 0.2


@pytest.mark.parametrize(
    ("counts", "unknown"),
    [
        (Counts(0, 0, 0), {"precision", "recall", "f1"}),
        (Counts(0, 0, 4), {"precision"}),
        (Counts(0, 4, 0), {"recall"}),
    ],
)
def test_a_rate_of_nothing_is_unknown(counts: Counts, unknown: set[str]) -> None:
    rates = precision_recall_f1(counts)
    assert {name for name, rate in rates.items() if math.isnan(rate.value)} == unknown
    for name, rate in rates.items():
        assert math.isnan(rate.low) == math.isnan(rate.high) == (name in unknown)


TYPES = 40
id_lists = st.lists(st.integers(0, TYPES - 1), max_size=15)
batches = st.lists(
    st.tuples(id_lists, id_lists, st.none() | st.floats(0, 50)), min_size=1, max_size=6
)


def guess(types: list[int], n_types: float | None = None) -> WordGuess:
    return WordGuess(torch.tensor(types, dtype=torch.int64), n_types=n_types)


def truth(types: list[int]) -> torch.Tensor:
    return torch.tensor(types, dtype=torch.int64)


@given(batches)
def test_compute_uses_pooled_counts(data: list[tuple[list[int], list[int], float | None]]) -> None:
    metric = WordRecovery(TYPES)
    pooled, errors = Counts(), []
    for guessed, used, estimate in data:
        metric.update(guess(guessed, estimate), truth(used))
        pooled += word_counts(guess(guessed), truth(used), TYPES)
        if estimate is not None and used:
            errors.append(abs(estimate - len(set(used))) / len(set(used)))
    got = metric.compute()
    for name, rate in precision_recall_f1(pooled).items():
        assert float(got[name]) == pytest.approx(rate.value, nan_ok=True)
        assert float(got[f"{name}_low"]) == pytest.approx(rate.low, nan_ok=True)
        assert float(got[f"{name}_high"]) == pytest.approx(rate.high, nan_ok=True)
    expected = sum(errors) / len(errors) if errors else math.nan
    assert float(got["type_count_error"]) == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_a_loaded_state_gives_the_same_values() -> None:
    metric = WordRecovery(TYPES)
    metric.persistent(True)
    metric.update(guess([1, 2], 3.0), truth([2, 3]))
    other = WordRecovery(TYPES)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    other._update_count = 1
    assert all(
        float(a) == pytest.approx(float(b), nan_ok=True)
        for a, b in zip(metric.compute().values(), other.compute().values(), strict=True)
    )
