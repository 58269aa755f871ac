"""Rates of words and means over batches are those of pooled counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.evaluation.metrics import (
    Counts,
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
def test_rates_are_of_pooled_counts(data: list[tuple[list[int], list[int], float | None]]) -> None:
    pooled, errors, types = Counts(), [], [set(), set(), set()]
    for number, (guessed, used, estimate) in enumerate(data):
        pooled += word_counts(guess(guessed, estimate), truth(used), VOCAB)
        for pool, ids_of_pool in zip(types, (guessed, used, {*guessed} & {*used}), strict=True):
            pool |= {(number, one) for one in ids_of_pool}
        if estimate is not None and used:
            errors.append(abs(estimate - len(set(used))) / len(set(used)))
    n_guessed, n_used, n_right = map(len, types)
    rates = precision_recall_f1(pooled)
    for name, n in (("precision", n_guessed), ("recall", n_used), ("f1", (n_guessed + n_used) / 2)):
        expected = n_right / n if n else math.nan
        assert rates[name].value == pytest.approx(expected, nan_ok=True)
    expected = sum(errors) / len(errors) if errors else math.nan
    assert pooled.means()["type_count_error"] == pytest.approx(expected, rel=1e-5, nan_ok=True)
