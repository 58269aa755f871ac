"""Reads what runs have left: ``leakage.jsonl``, ``run.jsonl``, and the results of commands.

A line that cannot be read is counted and named, and costs nothing but itself. Results of the first
versions, which had no ``run.jsonl`` and no ids, are read as one fit.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fedleak.report.shapes import RECORD, RESULTS, parsed, wrong_in

Line = Mapping[str, Any]

SCHEMA = {RESULTS: 1, RECORD: 1}
"""The newest schema of each file that is understood."""


class ReportError(ValueError):
    """A report cannot be made; says what to change."""


class NothingToReport(ReportError):
    """No file of a run, or of a command's results, is where it was looked for."""


@dataclass(frozen=True)
class FitLines:
    """What one fit has left.

    Attributes:
        folder: of its files.
        run: its id; empty for the first versions'.
        begin: what it knew of itself before its first step; None where that was not recorded.
        looks: one for each look, with utility and what was spent.
        results: one for each look, stage and attack.
        decisions: of gates.
        end: how it ended; None where it was cut off, or that was not recorded.
        monitors: how many have left these lines.
    """

    folder: Path
    run: str
    begin: Line | None = None
    looks: Sequence[Line] = ()
    results: Sequence[Line] = ()
    decisions: Sequence[Line] = ()
    end: Line | None = None
    monitors: int = 1


@dataclass(frozen=True)
class Reading:
    """What was found.

    Attributes:
        fits: in the order in which they began.
        results: of ``fedleak game``, ``invert`` and ``sweep``, by the file's name.
        problems: what could not be read, each in a sentence.
    """

    fits: tuple[FitLines, ...]
    results: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read(places: Sequence[Path], *, run: str | None = None) -> Reading:
    """Reads folders, with all below them, and files.

    Args:
        places: log folders of runs, or files of results. Of a log file its folder is read, without
            what lies below.
        run: id of the fit that is read alone; default all.

    Raises:
        NothingToReport: a place does not exist, or nothing is in any of them.
    """
    problems: list[str] = []
    fits: list[FitLines] = []
    results: dict[str, Any] = {}
    for place in places:
        if not place.exists():
            raise NothingToReport(f"'{place}' does not exist: name the folder of a run's logs")
        if place.is_file() and place.suffix == ".json":
            _add_result(place, results, problems)
            continue
        folders = [place.parent] if place.is_file() else _folders(place)
        for folder in folders:
            fits += _fits(folder, problems)
        for path in sorted(place.rglob("*.json")) if place.is_dir() else ():
            _add_result(path, results, problems, asked=False)
    if not fits and not results:
        listed = ", ".join(f"'{place}'" for place in places)
        raise NothingToReport(
            f"no {RESULTS}, and no results of fedleak game, invert or sweep, in {listed}. A "
            "LeakageMonitor writes its file to the logger's folder (lightning_logs/version_0, say)"
        )
    different = {(fit.folder.resolve(), fit.run): fit for fit in fits}
    fits = [fit for fit in different.values() if run is None or fit.run == run]
    fits = _without_copies(fits, problems)
    fits.sort(key=lambda fit: str((fit.begin or {}).get("time", "")))
    return Reading(tuple(fits), results, tuple(problems))


def _folders(place: Path) -> list[Path]:
    found = {path.parent for name in SCHEMA for path in place.rglob(name)}
    return sorted(found)


def _fits(folder: Path, problems: list[str]) -> list[FitLines]:
    by_run: dict[str, dict[str, list[Line]]] = {}
    for name in (RECORD, RESULTS):
        for line in _lines(folder / name, problems):
            of = by_run.setdefault(str(line.get("run", "")), {})
            of.setdefault(name if name == RESULTS else line["kind"], []).append(line)
    return [
        FitLines(
            folder,
            run,
            begin=_begin(of),
            looks=of.get("look", ()),
            results=of.get(RESULTS, ()),
            decisions=of.get("gate", ()),
            end=next(iter(of.get("end", ())), None),
        )
        for run, of in by_run.items()
    ]


def _without_copies(fits: Sequence[FitLines], problems: list[str]) -> list[FitLines]:
    """Leaves out fits all of whose lines are also in another folder, under the same id."""
    runs = Counter(fit.run for fit in fits if fit.run)  # the first versions had no ids
    known: list[tuple[FitLines, set[str]]] = []
    copies: list[FitLines] = []
    again = [(fit, _told(fit)) for fit in fits if runs[fit.run] > 1]
    for fit, told in sorted(again, key=lambda one: -len(one[1])):
        whole = next((f for f, lines in known if f.run == fit.run and told <= lines), None)
        if whole is None:
            known.append((fit, told))
        else:
            copies.append(fit)
            problems.append(
                f"run {fit.run} lies in {_short(whole.folder)} and in {_short(fit.folder)}: it is "
                "counted once, by the first"
            )
    return [fit for fit in fits if all(fit is not copy for copy in copies)]


def _told(fit: FitLines) -> set[str]:
    """All lines of a fit."""
    lines = (*fit.looks, *fit.results, *fit.decisions, fit.begin, fit.end)
    return {json.dumps(line, sort_keys=True) for line in lines if line is not None}


def _begin(of: Mapping[str, Sequence[Line]]) -> Line | None:
    """The first line, with the defences that came later."""
    if not of.get("begin"):
        return None
    begin = of["begin"][0]
    return {**begin, "defenses": [*begin.get("defenses", ()), *of.get("defense", ())]}


def _lines(path: Path, problems: list[str]) -> Iterator[Line]:
    """The lines that are what they should be; the others are named once, by their numbers."""
    if not path.is_file():
        return
    broken, newer, odd = [], [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = parsed(text)
            except (ValueError, RecursionError):
                broken.append(number)
                continue
            if not isinstance(line, dict):
                broken.append(number)
            elif _newer(line.get("schema", 1), SCHEMA[path.name]):
                newer.append(number)
            elif wrong := wrong_in(line, path.name):
                odd.append((number, wrong))
            else:
                yield line
    for numbers, why in ((broken, "cannot be read"), (newer, "are of a newer version")):
        if numbers:
            problems.append(
                f"{len(numbers)} of the lines of {_short(path)} {why}: {spans(numbers)}"
            )
    if odd:
        said = [f"{number} ({wrong})" for number, wrong in odd]
        problems.append(f"{len(odd)} of the lines of {_short(path)} are not as a run writes them: "
                        f"{spans(said)}")  # fmt: skip


def _short(path: Path) -> str:
    """Where it lies in its folder: the report goes to others, and names no places of a machine."""
    return f"{path.parent.name}/{path.name}"


def _newer(schema: object, newest: int) -> bool:
    return isinstance(schema, int) and schema > newest


def spans(numbers: Sequence[object]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def _add_result(
    path: Path, results: dict[str, Any], problems: list[str], *, asked: bool = True
) -> None:
    """Takes a command's file of results; files of others are passed over unless asked for."""
    try:
        text = path.read_text(encoding="utf-8")
        content = parsed(text)
    except (ValueError, OSError, RecursionError):
        if asked:
            problems.append(f"{_short(path)} cannot be read as JSON")
        return
    ours = isinstance(content, dict) and "schema" in content
    if ours and any(isinstance(content.get(name), list) for name in ("results", "cells")):
        results[str(path)] = content
    elif asked:
        problems.append(f"{_short(path)} holds no results of fedleak game, invert or sweep")


def number(value: object) -> float:
    """A measured number as it was written; NaN for unknown."""
    if value == "infinite":
        return math.inf
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known else math.nan  # type: ignore[arg-type]


__all__ = [
    "RECORD",
    "RESULTS",
    "FitLines",
    "NothingToReport",
    "Reading",
    "ReportError",
    "number",
    "read",
    "spans",
]
