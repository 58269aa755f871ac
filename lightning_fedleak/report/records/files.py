"""The two files of a run, as lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedleak.report.records.fields import SCHEMA, JsonObject
from lightning_fedleak.report.records.lines import ResultLine, RunLine

RESULTS, RECORD = "leakage.jsonl", "run.jsonl"

MAX_DIGITS = 20
"""Longer integers of JSON are unknown: to parse one takes time that grows with its square."""


@dataclass(frozen=True)
class _FileLines:
    """The lines of a file.

    Attributes:
        lines: those that are as a run writes them.
        problems: what is wrong with the others, each in a sentence.
    """

    lines: Sequence[ResultLine | RunLine] = ()
    problems: Sequence[str] = ()


def read_lines(path: Path) -> _FileLines:
    """Return the lines of a ``leakage.jsonl`` or ``run.jsonl``; none where there is no file.

    A line that cannot be read is named in a problem and costs nothing but itself.
    """
    if not path.is_file():
        return _FileLines()
    lines: list[ResultLine | RunLine] = []
    unreadable, other, odd = [], [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                content = parse_json(text)
            except (ValueError, RecursionError):
                content = None
            if not isinstance(content, dict):
                unreadable.append(number)
                continue
            if content.get("schema") != SCHEMA:
                other.append(number)
                continue
            try:
                lines.append(_read_line(content, path.name))
            except ValueError as error:
                odd.append(f"{number} ({error})")
    problems = [
        f"{len(numbers)} of the lines of {short(path)} {reason}: {first_of(numbers)}"
        for numbers, reason in (
            (unreadable, "cannot be read"),
            (other, "are of another version"),
            (odd, "are not as a run writes them"),
        )
        if numbers
    ]
    return _FileLines(lines, problems)


def _read_line(content: JsonObject, name: str) -> ResultLine | RunLine:
    if name == RESULTS:
        return ResultLine.from_json(content)
    line = RunLine.from_json(content)
    kinds = {vars(kind).get("kind"): kind for kind in RunLine.__subclasses__()}
    return kinds.get(line.kind, RunLine).from_json(content)


def parse_json(text: str) -> Any:
    """Return the value of a text of JSON; NaN, infinity and numbers without end are None.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested without end.
    """

    def integer(digits: str) -> int | None:
        return int(digits) if len(digits) <= MAX_DIGITS else None

    def real(digits: str) -> float | None:
        value = float(digits)
        return value if math.isfinite(value) else None

    return json.loads(text, parse_constant=lambda _: None, parse_int=integer, parse_float=real)


def short(path: Path) -> str:
    """Return where a file is in its folder: reports are passed on, and name no other folders."""
    return f"{path.parent.name}/{path.name}"


def first_of(values: Sequence[object], most: int = 8) -> str:
    """Return the first values, and how many more there are."""
    first = ", ".join(map(str, values[:most]))
    return f"{first} and {len(values) - most} more" if len(values) > most else first


def by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the names that have the same reason, joined by commas, by the reason."""
    names: dict[str, str] = {}
    for name, why in reasons.items():
        names[why] = f"{names[why]}, {name}" if why in names else name
    return names
