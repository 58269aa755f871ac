"""Intervals of games over looks, of these looks as they were."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from lightning_fedleak.engine.channels.played import GameResults, Window
from lightning_fedleak.engine.outcomes import Outcome

SHOWN = ("auc", "advantage", "accuracy", "f1")


def packed(scores: torch.Tensor, members: torch.Tensor, cut: float = 0.0) -> list[float]:
    return GameResults(scores, members, scores > cut).pack(1 + 3 * len(scores))


def right(n: int) -> list[float]:
    """A look at n members that all rank above n others."""
    return packed(torch.cat([torch.ones(n), -torch.ones(n)]), torch.arange(2 * n) < n)


def over(looks: int, look: list[float], clients: int = 1) -> list[Outcome]:
    window = Window(100)
    return [window.add(dict.fromkeys(range(clients), look)) for _ in range(looks)]


@pytest.mark.parametrize("n", [4, 8, 16])
def test_looks_that_agree_never_lower_what_is_shown(n: int) -> None:
    outcomes = over(10, right(n))
    for before, after in itertools.pairwise(outcomes):
        for name in SHOWN:
            assert after.rates[name].low > before.rates[name].low
            assert after.rates[name].high == 1.0
    assert outcomes[0].rates["auc"].low == pytest.approx(0.025 ** (1 / n))
    assert outcomes[-1].rates["auc"].low == pytest.approx(0.025 ** (1 / (10 * n)))


@given(st.lists(st.integers(0, 3), min_size=4, max_size=10), st.integers(0, 10**6))
def test_looks_that_are_the_same_never_widen_what_is_shown(values: list[int], seed: int) -> None:
    scores = torch.tensor(values, dtype=torch.float64) - 1.5
    members = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)) % 2 == 0
    widths = [o.rates["auc"].high - o.rates["auc"].low for o in over(5, packed(scores, members))]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(widths))


def test_each_look_has_the_p_value_of_its_own_games() -> None:
    window, generator = Window(100), torch.Generator().manual_seed(0)
    for _ in range(3):
        scores = torch.randn(20, generator=generator, dtype=torch.float64)
        members = torch.randperm(20, generator=generator) < 10
        outcome = window.add({0: packed(scores, members)})
        expected = mannwhitneyu(
            scores[members], scores[~members], alternative="greater", method="exact"
        ).pvalue
        assert outcome.p_value == pytest.approx(expected, rel=1e-9)
    assert over(2, right(16))[-1].p_value == pytest.approx(1 / math.comb(32, 16))


def test_of_several_clients_the_lowest_p_value_counts_times_their_number() -> None:
    window = Window(100)
    tied = packed(torch.zeros(16), torch.arange(16) < 8)
    outcome = window.add({0: right(8), 1: tied})
    assert outcome.p_value == pytest.approx(2 / math.comb(16, 8))


def test_games_of_members_alone_have_no_p_value() -> None:
    outcome = Window(100).add({0: packed(torch.ones(3), torch.ones(3, dtype=torch.bool))})
    assert math.isnan(outcome.p_value)
    assert "leakage/x/p_of_this_look" not in outcome.values("leakage/x")
