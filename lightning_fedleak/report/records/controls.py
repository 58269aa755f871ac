"""Judges a low value by the positive control of the same look, for gates and for reports.

A *look* is a measurement of leakage at one step, and a *gate* acts if a value exceeds its limit. A
positive control is the attack on data whose content is known. If it also recovers little there, a
low value is no evidence that nothing leaks, and :func:`judge_value` returns NaN (unknown).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HIGH = 0.5
"""Share of the distance from chance to certainty above which a value is high.

A report marks values above it, and it is the default limit if no gate sets one. Lower: more values
are called high, and lower controls suffice. Not tuned.
"""

WEAK = "weak_reference"
"""Name of a metric: 1 if the reference model that a score is compared with is weak, else 0."""
STRENGTH = "reference_strength"
"""Name of a metric: the reference's gain on held-out texts as a share of the trained model's."""
WEAK_REFERENCE = "weak reference: it shows less than there is, and a low number is unknown"


def default_limit(chance: float) -> float:
    """Return the limit up to which a value is low if no gate sets one.

    Args:
        chance: the value that guessing reaches.
    """
    return chance + HIGH * (1 - chance)


@dataclass(frozen=True)
class Judgement:
    """A value judged by its positive control.

    Attributes:
        value: the value to compare with the limit; NaN is unknown.
        why: the value and its control in a sentence, if the control changes the value or it is low
            by aggregation; else empty.
        by_aggregation: whether it is low because the batch holds more than the attack can
            distinguish.
    """

    value: float
    why: str = ""
    by_aggregation: bool = False


def judge_value(
    value: float,
    control: float | None,
    *,
    at_most: float,
    chance: float,
    part: float = math.nan,
    known: str = "words",
    cause: str = "",
    bound: float = math.nan,
) -> Judgement:
    """Return a value as it counts at a limit, judged by the control.

    A value above the limit is not changed. Neither is any value without a control. A lower value is
    judged as follows:

    - Behind declared defences it is unknown, unless a bound on every reader is at most the limit.
    - If the control is above the limit, the value is scaled up as if the control were 1.
    - Otherwise, if the control on a part of the batch is high, the value is not changed: the whole
      batch holds more than the attack can distinguish.
    - Otherwise it is unknown.

    Args:
        value: The value of a metric; NaN is unknown.
        control: The metric on the positive control in the same step; NaN if it could not be
            measured, None if the attack has no control.
        at_most: The limit; 1 allows everything.
        chance: The value that guessing reaches.
        part: The control on a part of the batch; NaN if none was measured.
        known: The content of the control for the sentence, a plural such as "words".
        cause: The reason why the control could not be measured, or may be low.
        bound: The value that a reader who knows all else can have behind declared defences; 1 if
            nothing bounds it, NaN without such defences.
    """
    if at_most >= 1 or control is None or math.isnan(value) or value > at_most:
        return Judgement(value)
    if bound > at_most:
        most = "nothing bounds what a reader who knows all else recovers"
        if bound < 1:
            most = f"a reader who knows all else may reach {bound:.2f}"
        return Judgement(math.nan, f"it reads {value:.2f}, but behind the declared defences {most}")
    if control >= 1:
        return Judgement(value)
    measured = f"it reads {value:.2f}, and {control:.2f} of known {known} in the same step"
    if math.isnan(control):
        measured = f"it reads {value:.2f}, and its control could not be read"
        measured += f" ({cause})" if cause else ""
    if control > at_most:
        share = (value - chance) / (control - chance)
        counted = chance + share * (1 - chance)
        return Judgement(counted, f"{measured}, so that it counts as {counted:.2f}")
    if bound <= at_most:
        return Judgement(value, f"{measured}; no reader can have more than {bound:.2f}")
    if part > max(at_most, default_limit(chance)):
        why = (
            f"low by aggregation: {measured}, but {part:.2f} of known {known} of a part of the "
            "batch, which holds more than this attack can distinguish"
        )
        return Judgement(value, why, by_aggregation=True)
    if math.isnan(control):
        return Judgement(math.nan, measured)
    why = f"{measured}: this attack cannot show more than {control:.2f} here"
    why += f". {cause}" if cause else ""
    return Judgement(math.nan, why)
