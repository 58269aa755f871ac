"""Reads the two log files of a run, ``leakage.jsonl`` and ``run.jsonl``, as checked lines.

A line that cannot be read does not affect the other lines: it is listed as a problem.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedleak.private_files import read_regular
from lightning_fedleak.report.records.fields import SCHEMA, JsonObject, split_lines
from lightning_fedleak.report.records.lines import ResultLine, RunLine

# Names of the files with the results of attacks, and with the record of the run.
RESULTS, RECORD = "leakage.jsonl", "run.jsonl"

MAX_DIGITS = 20
"""Integers with more digits are read as None: the time to parse one grows with its square."""


@dataclass(frozen=True)
class _FileLines:
    """The lines of a file.

    Attributes:
        lines: the valid lines.
        problems: a sentence for each kind of invalid lines, with their numbers.
    """

    lines: Sequence[ResultLine | RunLine] = ()
    problems: Sequence[str] = ()


def read_lines(path: Path) -> _FileLines:
    """Return the lines of a ``leakage.jsonl`` or ``run.jsonl``; none if the file is missing."""
    if not path.is_file():
        return _FileLines()
    lines: list[ResultLine | RunLine] = []
    unreadable, foreign, invalid = [], [], []
    try:
        content = read_regular(path)
    except OSError as error:
        return _FileLines(problems=[f"{short(path)} cannot be read: {error.strerror}"])
    for number, line in enumerate(split_lines(content), 1):
        text = line.decode("utf-8", "replace")
        if not text.strip():
            continue
        try:
            fields = parse_json(text)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            unreadable.append(number)
            continue
        if fields.get("schema") != SCHEMA:
            foreign.append(number)
            continue
        try:
            lines.append(_read_line(fields, path.name))
        except ValueError as error:
            invalid.append(f"{number} ({error})")
    problems = [
        f"{len(numbers)} of the lines of {short(path)} {reason}: {first_of(numbers)}"
        for numbers, reason in (
            (unreadable, "cannot be read"),
            (foreign, "are of another version"),
            (invalid, "are not as a run writes them"),
        )
        if numbers
    ]
    return _FileLines(lines, problems)


def _read_line(content: JsonObject, name: str) -> ResultLine | RunLine:
    """Return the record of a line; in ``run.jsonl`` its ``kind`` chooses the class.

    Raises:
        ValueError: a field is missing or invalid.
    """
    if name == RESULTS:
        return ResultLine.from_json(content)
    line = RunLine.from_json(content)
    kinds = {vars(kind).get("kind"): kind for kind in RunLine.__subclasses__()}
    return kinds.get(line.kind, RunLine).from_json(content)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, in which NaN, infinity and too long integers are None.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """

    def integer(digits: str) -> int | None:
        return int(digits) if len(digits) <= MAX_DIGITS else None

    def real(digits: str) -> float | None:
        value = float(digits)
        return value if math.isfinite(value) else None

    return json.loads(text, parse_constant=lambda _: None, parse_int=integer, parse_float=real)


def short(path: Path) -> str:
    """Return a file's name after that of its folder; reports are passed on without full paths."""
    return f"{path.parent.resolve().name}/{path.name}"


def first_of(values: Sequence[object], most: int = 8) -> str:
    """Return the first ``most`` values in words, and the number of the remaining ones."""
    listed = ", ".join(map(str, values[:most]))
    return f"{listed} and {len(values) - most} more" if len(values) > most else listed


def by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Group names by their reasons, and return the names of each reason joined by commas."""
    names: dict[str, str] = {}
    for name, reason in reasons.items():
        names[reason] = f"{names[reason]}, {name}" if reason in names else name
    return names
