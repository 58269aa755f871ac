"""How values are written in every form of the report."""

from __future__ import annotations

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
"""Who must be trusted for an epsilon to hold, in every place that says so."""
UNIT_IN_WORDS = {
    "example": "one example",
    "client": "one client with all of its data",
    "row": "one text (a row of a batch) of one client",
    "user": "one user with all of their rows",
    NOT_RECORDED: f"one unit ({NOT_RECORDED} which)",
}
"""Whose data one unit of privacy is."""
FOR_UNIT = {
    "client": ", for a whole client",
    "row": ", for a text",
    "user": ", for a user with all of their rows",
    NOT_RECORDED: ", for a unit that is not recorded",
}
"""After an epsilon; nothing for one of examples."""

T = TypeVar("T")


def in_words(value: object) -> str:
    """Return a value in words; what nobody recorded says so, and a setting that is None is none."""
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
    """Return a number with four digits, and anything else as it is."""
    if value is None:
        return NOT_RECORDED
    if value == math.inf:
        return "infinite"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def share(value: float | None) -> str:
    """Return a rate with three digits, or that it is unknown."""
    if value is None or math.isnan(value):
        return "unknown"
    return f"{value:.3f}"


def interval(rate: MetricValue | None) -> str:
    """Return a rate and its 95% interval; one that has no upper end is at least so much."""
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
    """Return a rate with two digits: 0.58, 1.00, and >0.99 where it is not quite 1."""
    if value is None:
        return "unknown"
    text = f"{value:.2f}"
    return ">0.99" if value < 1 and text == "1.00" else text


def brief_interval(rate: MetricValue) -> str:
    """Return the ends of a 95% interval; empty where none was recorded."""
    if rate.low is None:
        return ""
    if rate.high is None:  # capped by the number of held-out canaries
        return f"{brief(rate.low)} or more"
    low, high = brief(rate.low).replace(">", ""), brief(rate.high).replace(">0.99", "1.00")
    return f"{low}–{high}"


def measure(metric: str) -> str:
    """Return a metric as people call it."""
    return {"f1": "F1", "auc": "AUC"}.get(metric, metric.replace("_", " "))


def capitalized(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def rounded_up(bound: float) -> float:
    """Return an upper bound with three digits, so that every place and format shows the same."""
    if not math.isfinite(bound) or bound <= 0:
        return bound
    unit = 10.0 ** (math.floor(math.log10(bound)) - 2)
    return float(f"{math.ceil(bound / unit - 1e-9) * unit:.3g}")


def visible(value: T) -> T:
    """Return a value with every character written out that a reader cannot see.

    Marks that turn the direction of writing would let a name change the text next to it; escape
    sequences act on terminals, and a lone surrogate is in no file of UTF-8.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_written_out, value))  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {visible(name): visible(part) for name, part in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {x.name: visible(getattr(value, x.name)) for x in fields(value) if x.init}
        return replace(value, **parts)
    if isinstance(value, list):
        return [visible(part) for part in value]  # type: ignore[return-value]
    if isinstance(value, tuple):
        parts_of_tuple = [visible(part) for part in value]
        return type(value)(*parts_of_tuple) if hasattr(value, "_fields") else tuple(parts_of_tuple)  # type: ignore
    return value


def _written_out(character: str) -> str:
    if character.isprintable() or character in "\n\t" or category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
