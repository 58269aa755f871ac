"""The results of the rounds of a federation, read from its files, as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_fedleak.federation import SUM
from lightning_fedleak.records import RECORD, RESULTS, GateLine, read_lines, read_results

HEADLINES = {"f1": "words, F1", "auc": "membership, AUC"}
"""Of the families that read updates: the metric that stands for one, and how a table names it."""

_MOST_COLUMNS = 8  # clients with a column each; a table of more shows lowest, median and highest


@dataclass(frozen=True)
class Round:
    """A round as its files describe it; round 0 is the model that the first one begins with.

    Attributes:
        number: of the round.
        loss: validation loss of the model after it.
        leakage: by metric and client (``"sum"`` of all together) the highest value that any attack
            had in this round; NaN where all are unknown.
        withheld: clients whose update a gate or an error held back.
        absent: why clients sent nothing that counts, by client.
        epsilon: what was spent so far; None without differential privacy.
        noise: its norm over the largest norm that the mean of clipped updates can have; None
            without differential privacy.
    """

    number: int
    loss: float
    leakage: Mapping[str, Mapping[str | int, float]]
    withheld: frozenset[str | int]
    absent: Mapping[int, str]
    epsilon: float | None
    noise: float | None = None


def read_back(
    folder: Path,
    number: int,
    loss: float,
    absent: Mapping[int, str],
    epsilon: float | None,
    noise: float | None = None,
) -> Round:
    """Return a round from all files below ``folder``; arguments are fields of :class:`Round`."""
    leakage: dict[str, dict[str | int, float]] = {name: {} for name in HEADLINES}
    for path in sorted(folder.rglob(RESULTS)):
        for line in read_results(path):
            if line.round != number or line.client is None or line.client == "all":
                continue
            headline = "auc" if "auc" in line.metrics else "f1"  # a game has an F1 too
            value = line.value_of_this_look(headline)
            highest = leakage[headline].get(line.client, math.nan)
            if value is None or highest > value:
                value = highest
            leakage[headline][line.client] = value
    withheld: set[str | int] = set()
    for path in sorted(folder.rglob(RECORD)):
        for decision in read_lines(path).lines:
            if (
                isinstance(decision, GateLine)
                and decision.step == number
                and decision.did in ("withheld", "raise")
                and decision.client is not None
            ):
                withheld.add(decision.client)
    measured = {name: by_client for name, by_client in leakage.items() if by_client}
    return Round(number, loss, measured, frozenset(withheld), absent, epsilon, noise)


class RoundsTable:
    """Shows each round as it closes: a live table on a terminal, lines elsewhere.

    Args:
        console: where to print.
        clients: of the federation.
        private: there is an epsilon to show.
    """

    def __init__(self, console: Console, clients: int, *, private: bool) -> None:
        self._console = console
        self._clients = clients
        self._private = private
        self._rows: list[list[str]] = []
        self._live: Live | None = None

    def __enter__(self) -> RoundsTable:
        """Open the table."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the table, so that what is printed next stands below it."""
        if self._live is not None:
            self._live.stop()

    def add(self, round_: Round) -> None:
        """Add a round, with a line for each family of attacks."""
        if self._live is None and not self._rows:
            self._line(self._headers())
        first = [str(round_.number), _number(round_.loss)]
        times = "-" if round_.noise is None else f"{round_.noise:.3g}x"
        epsilon = [times, _epsilon(round_.epsilon)] if self._private else []
        families = [(HEADLINES[n], self._values(f, round_)) for n, f in round_.leakage.items()]
        if not families:
            families = [("", ["-"] * len(self._columns()))]
        for family, values in families:
            row = [*first, family, *values, *epsilon]
            self._rows.append(row)
            if self._live is None:
                self._line(row)
            first, epsilon = ["", ""], [""] * len(epsilon)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _columns(self) -> list[str]:
        if self._clients > _MOST_COLUMNS:
            return ["lowest", "median", "highest", "sum"]
        return [*(f"client {c}" for c in range(self._clients)), "sum"]

    def _values(self, by_client: Mapping[str | int, float], round_: Round) -> list[str]:
        total = _number(by_client[SUM]) if SUM in by_client else "-"
        if self._clients <= _MOST_COLUMNS:
            return [*(_cell(c, by_client, round_) for c in range(self._clients)), total]
        values = [v for c, v in by_client.items() if c != SUM and not math.isnan(v)]
        if not values:
            return ["unknown"] * 3 + [total]
        return [*map(_number, (min(values), statistics.median(values), max(values))), total]

    def _headers(self) -> list[str]:
        return ["round", "loss", "leaks", *self._columns(), *["noise", "epsilon"] * self._private]

    def _line(self, cells: Sequence[str]) -> None:
        widths = [6, 8, 17, *[10] * (len(cells) - 3)]
        line = "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        self._console.print(line.rstrip(), highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in self._headers():
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


def _cell(client: int, by_client: Mapping[str | int, float], round_: Round) -> str:
    """Return a client's value; in brackets where its update did not leave."""
    if client in round_.withheld:
        return f"({_number(by_client.get(client, math.nan))})"
    return _number(by_client[client]) if client in by_client else "-"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def _epsilon(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
