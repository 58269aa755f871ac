"""Side effects of numbers that float32 rounds, and of tensors with infinities, are compared."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedleak.evaluation.auditing.side_effects import far_apart, side_effects

LARGE = 2**40


@pytest.mark.parametrize(
    ("before", "first", "second"),
    [
        ([0.0, 1.0], [0.0, 2.0], [0.0, 3.0]),
        ([-math.inf, 1.0], [-math.inf, 2.0], [-math.inf, 3.0]),
        ([math.nan, 1.0], [math.nan, 2.0], [math.nan, 3.0]),
        ([math.inf, 1.0], [2.0, 1.0], [3.0, 1.0]),
        ([1.0, 1.0], [math.nan, 1.0], [1.0, math.nan]),
    ],
)
def test_far_apart_names_a_buffer_beside_values_that_are_not_finite(before, first, second) -> None:
    state, *steps = ({"b": torch.tensor(values)} for values in (before, first, second))
    earlier, later = (side_effects(step, state) for step in steps)
    assert far_apart(earlier, later, 0.1) == ["b"]
    assert far_apart(earlier, earlier, 0.1) == []


@pytest.mark.parametrize(
    ("before", "step"),
    [
        (torch.tensor([LARGE]), 1),
        (torch.tensor([2**28], dtype=torch.int32), 1),
        (torch.tensor([1.0], dtype=torch.float64), 1e-10),
    ],
)
def test_far_apart_names_a_change_that_float32_would_round_away(before, step) -> None:
    first, second = (side_effects({"b": before + n * step}, {"b": before}) for n in (1, 3))
    assert far_apart(first, second, 0.1) == ["b"]
    assert float(second["b"][0]) == pytest.approx(3 * step, rel=1e-5)


def test_far_apart_allows_rounding_and_the_given_share() -> None:
    before = torch.full((100,), 1.0)
    ulp = torch.finfo(torch.float32).eps
    rounded = side_effects({"w": before * (1 + ulp)}, {"w": before})
    assert far_apart(rounded, {}, 0.0) == []
    first, second = (side_effects({"w": before + c}, {"w": before}) for c in (0.5, 0.6))
    assert far_apart(first, second, 0.25) == []
    assert far_apart(first, second, 0.15) == ["w"]
