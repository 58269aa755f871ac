"""The cells of a grid, run one after another; each result is kept, and a run continues later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_fedleak.studies.sweep.cell import Cell, CellResult

SCHEMA = 1  # version of the files of results


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
        """Return the path of a cell's result."""
        return self.folder / "cells" / f"{key_of(cell)}.json"

    def result(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell, None before it was run."""
        path = self.path(cell)
        if not path.exists():
            return None
        return CellResult.from_dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def todo(self) -> list[Cell]:
        """Return the cells that were not run, or failed."""
        return [c for c in self.cells if (r := self.result(c)) is None or r.error is not None]

    def run(
        self,
        run: Callable[[Cell, Path], CellResult],
        on_start: Callable[[Cell], None] = lambda cell: None,
        on_result: Callable[[Cell, CellResult], None] = lambda cell, result: None,
    ) -> None:
        """Run the cells that are left.

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
        """Return every cell that has a result, in the order of the grid."""
        pairs = ((cell, self.result(cell)) for cell in self.cells)
        return [(cell, result) for cell, result in pairs if result is not None]

    def write(self, path: Path) -> None:
        """Write all results to one file of JSON."""
        rows = [{**cell.to_dict(), "result": r.to_dict()} for cell, r in self.results()]
        _write(path, json.dumps({"schema": SCHEMA, "cells": rows}, indent=1) + "\n")

    def _keep(self, cell: Cell, result: CellResult) -> None:
        content = {"schema": SCHEMA, **cell.to_dict(), "result": result.to_dict()}
        _write(self.path(cell), json.dumps(content, indent=1) + "\n")


def key_of(cell: Cell) -> str:
    """Return the name of a cell: a hash of all its settings."""
    text = json.dumps(cell.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other is below in both coordinates, by the first one.

    A point stays where another is equal to it.
    """
    front = [
        i
        for i, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(front, key=lambda i: points[i])
