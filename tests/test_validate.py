"""Checks of arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.validate import check_choice, check_integer, check_number


@given(st.integers(), st.integers(), st.integers(0, 5))
def test_an_integer_is_compared_with_its_bounds(value: int, low: int, width: int) -> None:
    if low <= value <= low + width:
        check_integer("steps", value, at_least=low, at_most=low + width)
        check_integer("steps", np.int64(value) if abs(value) < 2**62 else value, at_least=low)
        return
    with pytest.raises(ValueError, match=rf"^steps must be an integer from {low} to {low + width}"):
        check_integer("steps", value, at_least=low, at_most=low + width)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, math.nan])
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"steps must be an integer of at least 0, got "):
        check_integer("steps", value, at_least=0)


@given(st.floats(), st.floats(-10, 10), st.floats(-10, 10))
def test_a_number_is_compared_with_its_bounds(value: float, low: float, high: float) -> None:
    for bounds, holds in (
        ({"above": low, "below": high}, low < value < high),
        ({"at_least": low, "at_most": high}, low <= value <= high),
        ({}, True),
    ):
        if holds and math.isfinite(value):
            check_number("lr", value, **bounds)
            continue
        with pytest.raises(ValueError, match=r"^lr must be a number"):
            check_number("lr", value, **bounds)


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, 1j])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"lr must be a number above 0, got "):
        check_number("lr", value, above=0)


def test_a_choice_is_one_of_its_values() -> None:
    check_choice("unit", "row", ("row", "user"))
    check_choice("level", 1, (1, 2))
    for value in ("rows", None, 1, True):
        with pytest.raises(ValueError, match=r"^unit must be 'row' or 'user', got "):
            check_choice("unit", value, ("row", "user"))
    with pytest.raises(ValueError, match="level must be 1 or 2, got True"):
        check_choice("level", True, (1, 2))


def test_none_hint_and_error() -> None:
    check_integer("width", None, optional=True)
    check_number("tau", None, optional=True)
    check_choice("unit", None, ("row",), optional=True)
    message = "^width must be an integer of at least 2, or None, got 1: how many neurons are read$"
    with pytest.raises(TypeError, match=message):
        check_integer(
            "width", 1, at_least=2, optional=True, hint="how many neurons are read", error=TypeError
        )
    with pytest.raises(ValueError, match=r"^q must be a number above 0 and of at most 1, got 2$"):
        check_number("q", 2, above=0, at_most=1)
