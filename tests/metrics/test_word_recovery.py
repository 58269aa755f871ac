"""The Metric is the pure functions over pooled counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.evaluation.metrics import (
    Counts,
    WordRecovery,
    precision_recall_f1,
    word_counts,
)

VOCAB = 40
ids = st.lists(st.integers(0, VOCAB - 1), max_size=15)
batches = st.lists(st.tuples(ids, ids, st.none() | st.floats(0, 50)), min_size=1, max_size=6)


def guess(types: list[int], n_types: float | None = None) -> WordGuess:
    return WordGuess(torch.tensor(types, dtype=torch.int64), n_types=n_types)


def truth(types: list[int]) -> torch.Tensor:
    return torch.tensor(types, dtype=torch.int64)


@given(batches)
def test_compute_uses_pooled_counts(data: list[tuple[list[int], list[int], float | None]]) -> None:
    metric = WordRecovery(VOCAB)
    pooled, errors = Counts(), []
    for guessed, used, estimate in data:
        metric.update(guess(guessed, estimate), truth(used))
        pooled += word_counts(guess(guessed), truth(used), VOCAB)
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
    metric = WordRecovery(VOCAB)
    metric.persistent(True)
    metric.update(guess([1, 2], 3.0), truth([2, 3]))
    other = WordRecovery(VOCAB)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    other._update_count = 1
    assert all(
        float(a) == pytest.approx(float(b), nan_ok=True)
        for a, b in zip(metric.compute().values(), other.compute().values(), strict=True)
    )
