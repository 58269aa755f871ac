"""How far a low number counts: the rule of gates and of reports, by the control of a look."""

from __future__ import annotations

import math
from dataclasses import dataclass

HIGH = 0.5
"""Share of the way from chance to certainty above which a number is high.

A report marks what is above it, and the README's gate allows so much: it is the limit where no gate
names one. Lower: more numbers are called high, and lower controls suffice. Not tuned.
"""


WEAK = "weak_reference"
"""Value of a line, 1 where the reference that a score is compared with is weak, and 0 where not."""
STRENGTH = "reference_strength"
"""Value of a line, the share of the model's gain on other texts that the reference has."""
WEAK_REFERENCE = "weak reference: it shows less than there is, and a low number is unknown"


def default_limit(chance: float) -> float:
    """Return what counts as low where no gate says it.

    Args:
        chance: the value of an attack that knows nothing.
    """
    return chance + HIGH * (1 - chance)


@dataclass(frozen=True)
class Judgement:
    """What a number is worth beside its control.

    Attributes:
        value: as it counts at the limit; NaN is unknown.
        why: both numbers in a sentence, where the control changes what the value counts for; else
            empty.
        by_aggregation: it is low because the batch holds more than the attack can distinguish.
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
    failure: str = "",
    unexplained: float = math.nan,
) -> Judgement:
    """Return what a value counts for at a limit.

    A value above the limit counts as it is. One below it is low only as far as the control is high:
    where the control is above the limit, the value counts by what could be read here. Where it is
    not, the value counts if a part of the batch is read, since the batch holds more than the attack
    can distinguish; else it is unknown.

    Args:
        value: The value of a metric; NaN is unknown.
        control: what the attack reads in the same step where the truth is known; NaN where that
            could not be read, None where it is given no control.
        at_most: the limit; 1 allows everything.
        chance: the metric's value of an attack that knows nothing.
        part: the control of a part of the batch; NaN where none was tried.
        known: what is known in the control, a plural.
        failure: why the control could not be read.
        unexplained: share of the step's gradient that its own backward did not leave.
    """
    if at_most >= 1 or control is None or math.isnan(value) or value > at_most or control >= 1:
        return Judgement(value)
    read = f"it reads {value:.2f}, and {control:.2f} of known {known} in the same step"
    if control > at_most:
        share = (value - chance) / (control - chance)
        counted = chance + share * (1 - chance)
        return Judgement(counted, f"{read}, so that it counts as {counted:.2f}")
    if part > max(at_most, default_limit(chance)):
        why = (
            f"low by aggregation: {read}, but {part:.2f} of those of a part of the batch, which "
            "holds more than this attack can distinguish"
        )
        return Judgement(value, why, by_aggregation=True)
    if math.isnan(control):
        why = f"it reads {value:.2f}, and its control could not be read"
        return Judgement(math.nan, f"{why}: {failure}" if failure else why)
    why = f"{read}: this attack cannot show more than {control:.2f} here"
    if unexplained > 0:
        why += (
            f". Of the gradient {unexplained:.2g} is not its batch's: a penalty on the weights, or "
            "a change between backward and optimizer.step()"
        )
    return Judgement(math.nan, why)
