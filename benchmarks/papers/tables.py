"""How the papers' tables are laid out: published numbers next to measured ones, with intervals."""

import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.papers.cells import Cell, Row
from benchmarks.shared import mean_and_half

NOT_RUN = "not run"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mean:
    """A mean with its 95% interval.

    Attributes:
        value: NaN where nothing was measured.
        low, high: ends.
    """

    value: float
    low: float
    high: float

    @property
    def point(self) -> str:
        """The value alone."""
        return NOT_RUN if math.isnan(self.value) else number(self.value)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return NOT_RUN
        return f"{self.point} ({number(self.low, 2)}–{number(self.high, 2)})"


UNKNOWN = Mean(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Grid:
    """One table in Markdown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __str__(self) -> str:
        lines = [f"{self.caption}\n"] if self.caption else []
        lines += ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True)
class Shown:
    """What a table shows: its grids, and its result in a few sentences."""

    grids: Sequence[Grid]
    finding: str


class Results:
    """Rows of the cells that were measured; each holds its cell's settings."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def where(self, **settings: Any) -> list[Row]:
        """In the order of the log."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in settings.items())]

    def values(self, name: str) -> list[Any]:
        """That occur under a name, each once."""
        return list(dict.fromkeys(r[name] for r in self.rows if name in r))


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        name: ``table2``, ``fig1``.
        title: what it shows.
        cells: those that it shows, for a size and the names of models.
        show: what is printed, of the measured rows.
    """

    name: str
    title: str
    cells: Callable[[Any, Sequence[str]], list[Cell]]
    show: Callable[[Results, Any], Shown]


@dataclass(frozen=True)
class Paper:
    """A paper, its tables, and how their cells are measured.

    Attributes:
        name: on the command line.
        title: of the paper.
        tables: in its order.
        sizes: by name; frozen dataclasses of plain values.
        measures: by the kind of a cell.
    """

    name: str
    title: str
    tables: Sequence[Table]
    sizes: Mapping[str, Any]
    measures: Mapping[str, Callable[..., list[Row]]]


def number(value: float, digits: int = 3) -> str:
    """Return a value as the docs print rates, with the zero before the point."""
    return f"{value:.{digits}f}"


def rate_of(row: Row, name: str) -> Mean:
    """A rate of a row, ``{"value", "low", "high"}``."""
    rate = row[name]
    if rate is None or rate["value"] is None:
        return UNKNOWN
    low, high = (rate[e] if rate[e] is not None else rate["value"] for e in ("low", "high"))
    return Mean(rate["value"], low, high)


def mean_of(groups: Sequence[Sequence[Mean]]) -> Mean:
    """The mean over all.

    The rates of a group are of the same games, so that their errors may be alike: the distances to
    the ends are averaged, which is conservative. Groups are independent: the
    distances of their means are joined by their squares (Zou & Donner 2008).

    Args:
        groups: unknown rates in them are ignored.
    """
    known = [[m for m in group if not math.isnan(m.value)] for group in groups]
    count = sum(map(len, known))
    known = [group for group in known if group]
    if not known:
        return UNKNOWN
    value = statistics.fmean(m.value for group in known for m in group)
    weights = [len(group) / count for group in known]
    down = [statistics.fmean(m.value - m.low for m in group) for group in known]
    up = [statistics.fmean(m.high - m.value for m in group) for group in known]
    low = value - math.hypot(*(w * d for w, d in zip(weights, down, strict=True)))
    high = value + math.hypot(*(w * d for w, d in zip(weights, up, strict=True)))
    return Mean(value, max(0.0, low), min(1.0, high))


def student(values: Sequence[float]) -> Mean:
    """The mean over batches with Student's t interval; of one batch without one."""
    mean, half = mean_and_half(values)
    return Mean(mean, mean - half, mean + half)


def pm(values: Sequence[float], digits: int = 3, none: str = NOT_RUN) -> str:
    """Mean and half width of :func:`student`; ``none`` where there are no values."""
    if not values:
        return none
    mean = student(values)
    half = "" if math.isnan(mean.low) else f" ± {number(mean.value - mean.low, digits)}"
    return number(mean.value, digits) + half


@cache
def read_toml(name: str) -> dict[str, Any]:
    """What a file of this folder holds."""
    return tomllib.loads((HERE / f"{name}.toml").read_text("utf-8"))


def published() -> dict[str, Any]:
    """The papers' own numbers: by paper and table."""
    return read_toml("published")


def sizes_of(kind: Callable[..., Any], paper: str) -> dict[str, Any]:
    """Return the sizes of a paper by name: the defaults of a dataclass, and those of the file."""
    sizes = {"default": kind()}
    for name, settings in read_toml("sizes")[paper].items():
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        sizes[name] = kind(**values)
    return sizes


def finding(sentences: Iterable[str]) -> str:
    """Sentences, each without its full stop, or that nothing was run."""
    return " ".join(f"{s[0].upper()}{s[1:]}." for s in sentences) or "Not run."


def dots(values: Iterable[object]) -> str:
    """Several of the paper's columns in one."""
    return ", ".join(str(value) for value in values)


def span(values: Iterable[str]) -> str:
    """Return the lowest and the highest of several printed numbers, or why there is none."""
    given = [value for value in values if value]
    if NOT_RUN in given:
        return NOT_RUN
    ends = sorted(given, key=float)
    return "–".join(dict.fromkeys((ends[0], ends[-1]))) if ends else ""


def of_one_model(grid: Grid) -> Grid:
    """Return a grid without its first column, of models, where all rows are of one."""
    if len({row[0] for row in grid.rows}) > 1:
        return grid
    return replace(grid, head=grid.head[1:], rows=[row[1:] for row in grid.rows])
