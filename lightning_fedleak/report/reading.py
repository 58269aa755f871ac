"""Reads what runs have left: ``leakage.jsonl``, ``run.jsonl``, and the results of commands.

A line that cannot be read is counted and named, and costs nothing but itself. Results of the first
versions, which had no ``run.jsonl`` and no ids, are read as one fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

Line = Mapping[str, Any]

RESULTS, RECORD = "leakage.jsonl", "run.jsonl"
SCHEMA = {RESULTS: 1, RECORD: 1}
"""The newest schema of each file that is understood."""

_Shape = Any
"""Of a value: a type, a choice of shapes in a tuple, a list of one shape, a function that says
whether it is one, or a dict: a name that ends in ? may be missing, and ``...`` is every other."""
_MOST = 2**53
"""Steps and counts that are higher are no run's."""


def _amount(value: object) -> bool:
    """Zero or above, infinite, or unknown."""
    return value is None or value == "infinite" or (_is_number(value) and value >= 0)


def _chance(value: object) -> bool:
    """From 0 to 1, or unknown."""
    return value is None or (_is_number(value) and 0 <= value <= 1)


def _release(value: object) -> bool:
    """Noise multiplier, sample rate, and how many."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_number(one) and one >= 0 for one in value)
        and isinstance(value[2], int)
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


_NUMBER = (int, float, "infinite", None)
_SPENT = {
    "defense": str, "epsilon?": _amount, "delta?": _chance, "noise_multiplier?": _amount,
    "sample_rate?": _chance, "releases?": (int, None), "history?": (None, [_release]),
}  # fmt: skip
_OF_ANY_KIND = {"run": str, "kind": str, "schema?": int}
_SHAPES: Mapping[str, Mapping[str, _Shape]] = {
    RESULTS: {
        "run?": str, "schema?": int, "step": int, "attack": str, "stage": str, "client?": (str, int, None),
        "round?": (int, None), "config?": (None, {}), "n?": (int, None), "exposed?": (bool, None),
        "metrics": {...: (None, {...: _NUMBER})}, "unknown?": (str, None),
    },
    "begin": {
        "fit?": (str, None), "time?": str, "resumed?": (None, {
            "run?": str, "privacy?": [{"defense": str, "history": [_release]}]}),
        "versions?": (None, {...: str}), "machine?": (None, {}), "training?": (None, {}),
        "model?": (None, {"class": str, "peft?": [str], "trained?": [str],
                          "trained_parameters?": (int, None), "parameters?": (int, None)}),
        "monitor?": {"clients?": int, "local_steps?": (int, None), "adversary?": [str]},
        "attacks?": [{"name": str, "family": str, "needs?": [str], "reads?": [str],
                      "adversary?": str, "config?": (None, {})}],
        "not_played?": [{"name": str, "why": str}], "unread?": [str],
        "defenses?": [{"name": str, "class?": str, "guarantee?": str, "settings?": (None, {})}],
        "gates?": [{"name": str, "metric": str, "at_most?": _NUMBER, "action?": str,
                    "bound?": str, "alpha?": _NUMBER}],
        "settings_hash?": str,
    },
    "look": {"step": int, "client?": (str, int, None), "utility?": (None, {...: _NUMBER}),
             "privacy?": (None, [_SPENT])},
    "gate": {"gate": str, "did": str, "step": int, "client?": (str, int, None), "metric?": str,
             "of?": (str, None), "measured?": _NUMBER, "at_most?": _NUMBER, "why?": (str, None),
             "hardened?": (None, [str])},
    "end": {"step": int, "how": str, "privacy?": (None, [_SPENT])},
}  # fmt: skip
"""What a line must look like to be read, by its file or, of ``run.jsonl``, by its kind."""


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
            begin=next(iter(of.get("begin", ())), None),
            looks=of.get("look", ()),
            results=of.get(RESULTS, ()),
            decisions=of.get("gate", ()),
            end=next(iter(of.get("end", ())), None),
        )
        for run, of in by_run.items()
    ]


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
                line = json.loads(text)
            except (ValueError, RecursionError):
                broken.append(number)
                continue
            if not isinstance(line, dict):
                broken.append(number)
            elif _newer(line.get("schema", 1), SCHEMA[path.name]):
                newer.append(number)
            elif wrong := _wrong_in(line, path.name):
                odd.append((number, wrong))
            else:
                yield line
    for numbers, why in ((broken, "cannot be read"), (newer, "are of a newer version")):
        if numbers:
            problems.append(f"{len(numbers)} of the lines of {path} {why}: {spans(numbers)}")
    if odd:
        said = [f"{number} ({wrong})" for number, wrong in odd]
        problems.append(f"{len(odd)} of the lines of {path} are not as a run writes them: "
                        f"{spans(said)}")  # fmt: skip


def _newer(schema: object, newest: int) -> bool:
    return isinstance(schema, int) and schema > newest


def _wrong_in(line: Line, name: str) -> str:
    """What is odd in a line of one of the files; empty where nothing is."""
    if name == RESULTS:
        return _wrong(line, _SHAPES[RESULTS])
    return _wrong(line, _OF_ANY_KIND) or _wrong(line, _SHAPES.get(line["kind"], {}))


def _wrong(value: Any, shape: _Shape, where: str = "") -> str:
    """The first place in a value that is not of its shape; empty where all are."""
    if isinstance(shape, tuple):
        told = [_wrong(value, one, where) for one in shape]
        return "" if "" in told else max(told, key=len)
    if isinstance(shape, Mapping) and isinstance(value, Mapping):
        of = {name.removesuffix("?"): one for name, one in shape.items() if name != ...}
        told = [f"without {name}" for name in shape if name != ... and not name.endswith("?")
                and name not in value]  # fmt: skip
        told += [
            _wrong(found, of.get(name, shape.get(...)), f"{where}/{name[:40]}".lstrip("/"))
            for name, found in value.items()
            if name in of or ... in shape
        ]
        return next(filter(None, told), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (_wrong(one, shape[0], where) for one in value)), "")
    if isinstance(shape, type):
        fits = isinstance(value, shape) and isinstance(value, bool) == (shape is bool)
        fits = fits and not (_is_number(value) and shape is int and abs(value) > _MOST)
        fits = fits and not (shape is float and math.isinf(value))
    elif callable(shape):
        fits = shape(value)
    else:
        fits = not isinstance(shape, Mapping | list) and value == shape
    return "" if fits else where or "an empty name"


def spans(numbers: Sequence[object]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def _add_result(
    path: Path, results: dict[str, Any], problems: list[str], *, asked: bool = True
) -> None:
    """Takes a command's file of results; files of others are passed over unless asked for."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        if asked:
            problems.append(f"{path} cannot be read as JSON")
        return
    ours = isinstance(content, dict) and "schema" in content
    if ours and any(isinstance(content.get(name), list) for name in ("results", "cells")):
        results[str(path)] = content
    elif asked:
        problems.append(f"{path} holds no results of fedleak game, invert or sweep")


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
