"""The format of values, and the sentences on trust and units, in all forms of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar
from unicodedata import category

from lightning_fedleak.report.records import MetricValue

NOT_RECORDED = "not recorded"

TRUST = {
    "server": "The server is trusted: it sees each client's update as it is. Epsilon holds "
    "against whoever sees the models of all rounds.",
    "sum": "Epsilon holds only if nobody sees more than the sum over clients alone: one client's "
    "update is not covered.",
    "client": "Only the client is trusted: epsilon holds against the server too.",
    NOT_RECORDED: f"Who is trusted is {NOT_RECORDED}.",
}
"""Sentences on the party that must be trusted for an epsilon to hold, by the party's name."""
UNIT_IN_WORDS = {
    "example": "one example",
    "client": "one client with all of its data",
    "row": "one text (a row of a batch) of one client",
    "user": "one user with all of their rows",
    NOT_RECORDED: f"one unit ({NOT_RECORDED} which)",
}
"""Units of privacy, in words."""
FOR_UNIT = {
    "client": ", for a whole client",
    "row": ", for a text",
    "user": ", for a user with all of their rows",
    NOT_RECORDED: ", for a unit that is not recorded",
}
"""Units of privacy as a phrase after an epsilon; none for ``"example"``, the usual unit."""

T = TypeVar("T")


def in_words(value: object) -> str:
    """Return a value in words: None is ``NOT_RECORDED``, but "none" as a value of a mapping."""
    if value is None or value == "":
        return NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, MetricValue):
        return interval(value)
    if isinstance(value, Mapping):
        parts = (f"{n} {'none' if part is None else in_words(part)}" for n, part in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(in_words, value)) or "none"
    return str(value)


def digits(value: object) -> str:
    """Return a number with four significant digits, and any other value as its ``str``."""
    if value is None:
        return NOT_RECORDED
    if value == math.inf:
        return "infinite"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def share(value: float | None) -> str:
    """Return a rate with three decimals, or "unknown"."""
    if value is None or math.isnan(value):
        return "unknown"
    return f"{value:.3f}"


def interval(rate: MetricValue | None) -> str:
    """Return a rate and its 95% interval; without an upper end, "at least" and the rate."""
    if rate is None or rate.value is None:
        return "unknown"
    if rate.low is not None and rate.high is None:  # capped by the number of held-out canaries
        return f"at least {share(rate.value)} ({share(rate.low)} or more)"
    if rate.low is None or rate.high is None:
        return share(rate.value)
    return f"{share(rate.value)} ({share(rate.low)} to {share(rate.high)})"


def percent(value: float | None) -> str:
    """Return a share as a percentage, rounded down: 99.6% is over 99%, and only 1 is all."""
    if value is None:
        return "an unknown share"
    if value >= 1:
        return "all"
    return "over 99%" if value > 0.99 else f"{math.floor(100 * value + 1e-9)}%"


def brief(value: float | None) -> str:
    """Return a rate with two decimals, such as 0.58; one that only rounds to 1.00 is >0.99."""
    if value is None:
        return "unknown"
    text = f"{value:.2f}"
    return ">0.99" if value < 1 and text == "1.00" else text


def brief_interval(rate: MetricValue) -> str:
    """Return the ends of a 95% interval with two decimals; empty if none was recorded."""
    if rate.low is None:
        return ""
    if rate.high is None:  # capped by the number of held-out canaries
        return f"{brief(rate.low)} or more"
    low, high = brief(rate.low).replace(">", ""), brief(rate.high).replace(">0.99", "1.00")
    return f"{low}–{high}"


MEASURES = {
    "F1": "1 is every distinct token of a batch named, and none besides.",
    "AUC": "how often a text that was used ranks above one that was not; 0.5 is guessing.",
    "token accuracy": "the share of tokens that were written down in the right place.",
}
"""What the common measures are, in a line, by their names."""


def measure(metric: str) -> str:
    """Return the common name of a metric, such as "AUC"."""
    return {"f1": "F1", "auc": "AUC"}.get(metric, metric.replace("_", " "))


def capitalized(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def rounded_up(bound: float) -> float:
    """Return an upper bound rounded up to three significant digits, for all forms of a report."""
    if not math.isfinite(bound) or bound <= 0:
        return bound
    unit = 10.0 ** (math.floor(math.log10(bound)) - 2)
    return float(f"{math.ceil(bound / unit - 1e-9) * unit:.3g}")


def visible(value: T) -> T:
    """Return a value with invisible characters written as escapes, also in nested values.

    Marks of writing direction would let a name change the text next to it. Escape sequences act on
    terminals. A lone surrogate cannot be encoded in UTF-8.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_escaped, value))  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {visible(name): visible(part) for name, part in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {x.name: visible(getattr(value, x.name)) for x in fields(value) if x.init}
        return replace(value, **parts)
    if isinstance(value, list | tuple):
        items = [visible(part) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _escaped(character: str) -> str:
    """Return a character, or its escape sequence if it is invisible."""
    if character.isprintable() or character in "\n\t" or category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
