"""A low number counts only as far as its control is high: the rule of gates and of reports."""

import functools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_fedleak.report.records import default_limit, judge_value

NO = math.nan
SHARES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("value", "control", "part", "expected"),
    [
        (0.6, None, NO, 0.6),  # above the threshold: nothing else counts
        (0.6, 0.1, NO, 0.6),
        (0.4, None, NO, 0.4),  # an attack that is given no control
        (0.4, 1.0, NO, 0.4),
        (0.4, 0.8, NO, 0.5),  # half of what could be read
        (0.45, 0.6, NO, 0.75),  # more than is allowed of what could be read
        (0.4, 0.5, NO, NO),  # the gate could not have rung
        (0.4, 0.3, 0.9, 0.4),  # by aggregation
        (0.4, 0.3, 0.4, NO),
        (0.4, NO, 0.9, 0.4),  # by aggregation; the whole could not be read
        (0.4, NO, 0.4, NO),
        (0.4, NO, NO, NO),
        (NO, 1.0, NO, NO),
    ],
)
def test_the_rule_of_a_gate_at_one_half(value, control, part, expected) -> None:
    result = judge_value(value, control, part=part, at_most=0.5, chance=0.0, cause="it failed")
    assert result.value == pytest.approx(expected, nan_ok=True)
    assert result.by_aggregation == (part == 0.9)
    changed = not math.isnan(value) and result.value != value
    assert bool(result.why) == (changed or result.by_aggregation)


def test_both_numbers_are_in_the_reason() -> None:
    blind = judge_value(0.22, 0.3, at_most=0.5, chance=0.0).why
    assert blind == (
        "it reads 0.22, and 0.30 of known words in the same step: this attack cannot show more "
        "than 0.30 here"
    )
    share = judge_value(0.6, 0.75, at_most=0.65, chance=0.5, known="texts").why
    assert "0.60, and 0.75 of known texts" in share
    assert share.endswith("counts as 0.70")
    assert judge_value(0.2, NO, at_most=0.5, chance=0.0, cause="it broke").why.endswith(
        "could not be checked on known words (it broke)"
    )
    assert judge_value(0.2, NO, at_most=0.5, chance=0.0).why.endswith(
        "not be checked on known words"
    )
    assert judge_value(0.2, NO, part=0.9, at_most=0.5, chance=0.0).why == (
        "low by aggregation: it reads 0.20, and could not be checked on known words, but 0.90 of "
        "known words of a part of the batch, which holds more than this attack can distinguish"
    )


@pytest.mark.parametrize(
    ("control", "bound", "expected"),
    [
        (1.0, 0.3, 0.2),
        (1.0, 0.6, NO),
        (1.0, 1.0, NO),
        (NO, 0.3, 0.2),
        (0.1, 0.3, 0.2),
        (0.1, 0.6, NO),
    ],
)
def test_behind_declared_defences_the_bound_decides_whatever_the_control_is(
    control: float, bound: float, expected: float
) -> None:
    judged = judge_value(0.2, control, part=0.9, at_most=0.5, chance=0.0, bound=bound)
    assert judged.value == pytest.approx(expected, nan_ok=True)
    assert not judged.by_aggregation
    assert judge_value(0.6, control, at_most=0.5, chance=0.0, bound=bound).value == 0.6


@given(value=SHARES, control=SHARES, part=SHARES, at_most=st.floats(0, 0.99))
@example(value=0.0, control=0.25, part=0.5, at_most=0.25)
def test_a_look_passes_where_the_control_rings_and_the_value_is_a_small_share_of_it(
    value: float, control: float, part: float, at_most: float
) -> None:
    """The same rule as a product, in two lines."""
    result = judge_value(value, control, part=part, at_most=at_most, chance=0.0)
    rings = control > at_most
    is_low = value <= at_most * control if rings else part > max(at_most, 0.5)
    passes = value <= at_most and is_low
    near = math.isclose(value, at_most * control, rel_tol=1e-12, abs_tol=1e-300)
    assert near or (result.value <= at_most) == passes


@given(value=SHARES, control=SHARES, at_most=st.floats(0.5, 0.99))
def test_an_area_counts_from_one_half_on(value: float, control: float, at_most: float) -> None:
    area = judge_value(0.5 + value / 2, 0.5 + control / 2, at_most=at_most, chance=0.5)
    limit = 2 * at_most - 1
    share = judge_value(value, control, at_most=limit, chance=0.0)
    near = min(abs(value - limit), abs(control - limit), abs(control - 1)) < 1e-9
    assert near or 2 * area.value - 1 == pytest.approx(share.value, abs=1e-6, nan_ok=True)


def test_half_of_the_way_from_chance_is_the_limit_where_no_gate_names_one() -> None:
    assert [default_limit(chance) for chance in (0.0, 0.5)] == [0.5, 0.75]


def test_a_limit_of_one_allows_everything() -> None:
    assert judge_value(0.2, 0.1, at_most=1.0, chance=0.0).value == 0.2


def test_a_bound_that_is_no_proof_makes_numbers_unknown_and_none_known() -> None:
    """It is of words counted by type, or of one text among others."""
    judge = functools.partial(judge_value, 0.1, at_most=0.5, chance=0.0)
    assert judge(0.2, bound=0.3).value == 0.1
    assert math.isnan(judge(0.2, bound=0.3, is_proof=False).value)
    assert math.isnan(judge(0.9, bound=0.6, is_proof=False).value)
    assert judge(1.0, bound=0.3, is_proof=False).value == 0.1
