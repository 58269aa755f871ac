"""Runs the cells of a grid one after another, keeps each result at once, and goes on later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_fedleak.studies.sweep.cell import Cell, CellResult

SCHEMA = 1


class Grid:
    """Cells in a folder, one file each; a cell that is done is not run again.

    A file is named by what its cell's settings are, so that a grid with other settings in the same
    folder never takes a result that is not its own. A failed cell is written down with its error,
    tried again the next time, and loses nothing of the others.

    Args:
        cells: to run, in this order; alike ones once.
        folder: of the results; is made.
    """

    def __init__(self, cells: Iterable[Cell], folder: Path) -> None:
        self.cells = list({key_of(cell): cell for cell in cells}.values())
        self.folder = folder

    def path(self, cell: Cell) -> Path:
        """Where a cell's result is kept."""
        return self.folder / "cells" / f"{key_of(cell)}.json"

    def result(self, cell: Cell) -> CellResult | None:
        """What is known of a cell, None before it was run."""
        path = self.path(cell)
        if not path.exists():
            return None
        return CellResult.from_dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def todo(self) -> list[Cell]:
        """Cells that were not run, or failed."""
        return [c for c in self.cells if (r := self.result(c)) is None or r.error is not None]

    def run(
        self,
        run: Callable[[Cell, Path], CellResult],
        on_start: Callable[[Cell], None] = lambda cell: None,
        on_result: Callable[[Cell, CellResult], None] = lambda cell, result: None,
    ) -> None:
        """Runs what is left to do.

        An interrupt ends it; what is done by then is kept.

        Args:
            run: of one cell, given a folder for its logs.
            on_start: called before each.
            on_result: called after each.
        """
        for cell in self.todo():
            on_start(cell)
            logs = self.folder / "runs" / key_of(cell)
            try:
                result = run(cell, logs)
            except Exception as error:  # one failed cell must not lose the rest
                result = CellResult(error=f"{type(error).__name__}: {error}")
            self._keep(cell, result)
            on_result(cell, result)

    def results(self) -> list[tuple[Cell, CellResult]]:
        """Every cell that has one, in the grid's order."""
        found = ((cell, self.result(cell)) for cell in self.cells)
        return [(cell, result) for cell, result in found if result is not None]

    def write(self, path: Path) -> None:
        """All results in one file of JSON."""
        rows = [{**cell.to_dict(), "result": r.to_dict()} for cell, r in self.results()]
        _write(path, json.dumps({"schema": SCHEMA, "cells": rows}, indent=1) + "\n")

    def _keep(self, cell: Cell, result: CellResult) -> None:
        content = {"schema": SCHEMA, **cell.to_dict(), "result": result.to_dict()}
        _write(self.path(cell), json.dumps(content, indent=1) + "\n")


def key_of(cell: Cell) -> str:
    """Name of a cell: a hash of all its settings."""
    text = json.dumps(cell.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    """A file is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other is below in both coordinates, by the first coordinate.

    A point stays where another is equal to it.
    """
    kept = [
        i
        for i, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(kept, key=lambda i: points[i])


__all__ = ["SCHEMA", "Grid", "key_of", "pareto"]
