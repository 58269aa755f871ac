"""Cells: parts of the papers' tables that are measured by themselves, once, and kept in a log.

A cell is plain data: its kind, which names the function that measures it, and its settings, all
that the outcome depends on. Several tables may show one cell. The log is a file of JSON lines, one
for each cell that was measured or that failed; what was measured is not measured again.
"""

import json
import math
import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Measure = Callable[..., list[Row]]
"""Called with a cell's settings and, as ``models``, the folders of models by name; gives rows of
plain values."""


@dataclass(frozen=True)
class Cell:
    """One part of a table.

    Attributes:
        kind: of :data:`Measure` of its paper.
        settings: plain values.
        seconds: of a processor that it is expected to take.
        together: cells of one such word share what is slow to prepare, so that one process
            measures them.
    """

    kind: str
    settings: Mapping[str, Any]
    seconds: float = 1.0
    together: str = ""

    @property
    def key(self) -> str:
        return json.dumps([self.kind, dict(self.settings)], sort_keys=True)

    def __str__(self) -> str:
        told = ", ".join(f"{k} {_short(v)}" for k, v in self.settings.items())
        return f"{self.kind}: {told}"


def chosen(size: Any, *names: str, **settings: Any) -> dict[str, Any]:
    """Return settings of a cell: those of a size by name, and more."""
    return {name: getattr(size, name) for name in names} | settings


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass
class Log:
    """What was measured, in a file of JSON lines; of several lines of one cell the last counts.

    Attributes:
        path: of the file, which need not exist.
        lines: by the cells' keys.
        unreadable: lines that are none, as one that was cut off is.
    """

    path: Path
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    unreadable: int = 0

    @classmethod
    def read(cls, path: Path) -> "Log":
        log = cls(path)
        for text in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
                log.lines[Cell(line["kind"], line["settings"]).key] = line
            except (ValueError, KeyError, TypeError):
                log.unreadable += 1
        return log

    def rows(self, cell: Cell) -> list[Row] | None:
        """Of a cell that was measured; each with the cell's settings."""
        line = self.lines.get(cell.key)
        if line is None or "rows" not in line:
            return None
        return [{**cell.settings, **row} for row in line["rows"]]

    def failure(self, cell: Cell) -> str | None:
        line = self.lines.get(cell.key)
        return None if line is None else line.get("failed")

    def seconds(self, cell: Cell) -> float | None:
        line = self.lines.get(cell.key)
        return None if line is None or "rows" not in line else line["seconds"]

    def models(self, kinds: Iterable[str]) -> list[str]:
        """Names of models in cells of these kinds, in the order of the log."""
        wanted = set(kinds)
        names = (line["settings"].get("model") for line in self.lines.values()
                 if line["kind"] in wanted)  # fmt: skip
        return list(dict.fromkeys(name for name in names if name))

    def add(self, cell: Cell, **told: Any) -> None:
        line = {"kind": cell.kind, "settings": dict(cell.settings), **told, **_about()}
        text = json.dumps(line, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut_off + text + "\n")
        self.lines[cell.key] = json.loads(text)


def _about() -> dict[str, str]:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    return {"date": date.today().isoformat(), "machine": machine}


def plain(value: Any) -> Any:
    """For strict JSON: numbers that are not finite become None, also in lists and dicts."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Outcome:
    """Of one cell: its rows, or why there are none; and seconds of a processor."""

    rows: list[Row] | None
    seconds: float
    failed: str = ""


def measured(cell: Cell, measures: Mapping[str, Measure], models: Mapping[str, str]) -> Outcome:
    """Measures one cell in this process; what it raises is told."""
    start = time.process_time()
    try:
        rows = plain(measures[cell.kind](**cell.settings, models=models))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
        return Outcome(None, time.process_time() - start, told)
    return Outcome(rows, time.process_time() - start)


def run(
    cells: Sequence[Cell],
    measures: Mapping[str, Measure],
    models: Mapping[str, str],
    log: Log,
    *,
    jobs: int,
    told: Callable[[str], None] = print,
) -> list[tuple[Cell, str]]:
    """Measures what the log lacks, the quickest first.

    Args:
        cells: a cell that occurs twice is measured once.
        measures: by kind, importable by name where ``jobs`` is above 0.
        models: folders by name.
        log: gets a line for each cell: with ``jobs`` 0 as soon as it is known, else once the cells
            that share its process are.
        jobs: processes at a time; where one dies, the cells that are not known yet fail. 0 measures
            in this process.
        told: gets a line for each cell.

    Returns:
        The cells that failed, and why.
    """
    todo = {cell.key: cell for cell in cells if log.rows(cell) is None}
    groups: dict[str, list[Cell]] = {}
    for cell in todo.values():
        groups.setdefault(cell.together, []).append(cell)
    order = sorted(groups.values(), key=lambda group: sum(c.seconds for c in group))
    failures: list[tuple[Cell, str]] = []
    finished = 0

    def known(cell: Cell, outcome: Outcome) -> None:
        nonlocal finished
        finished += 1
        if outcome.rows is None:
            failures.append((cell, outcome.failed))
            log.add(cell, failed=outcome.failed)
        else:
            log.add(cell, rows=outcome.rows, seconds=round(outcome.seconds, 2))
        state = f"FAILED ({outcome.failed})" if outcome.rows is None else "done"
        told(f"[{finished}/{len(todo)}] {outcome.seconds:.1f} s, {state}: {cell}")

    if jobs == 0:
        for cell in (cell for group in order for cell in group):
            known(cell, measured(cell, measures, models))
        return failures
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])  # once, not in each process
    with ProcessPoolExecutor(jobs, context) as pool:
        parts = {pool.submit(_group, group, measures, models): group for group in order}
        for part in as_completed(parts):
            try:
                outcomes = part.result()
            except BrokenProcessPool:
                outcomes = [Outcome(None, 0.0, "a process ended")] * len(parts[part])
            for cell, outcome in zip(parts[part], outcomes, strict=False):
                known(cell, outcome)
    return failures


def _group(
    cells: list[Cell], measures: Mapping[str, Measure], models: Mapping[str, str]
) -> list[Outcome]:
    """Measure cells one after another."""
    import torch

    torch.set_num_threads(1)
    return [measured(cell, measures, models) for cell in cells]
