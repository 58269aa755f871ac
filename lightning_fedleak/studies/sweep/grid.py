"""The cells of a grid, run one after another; each result is kept, and a run continues later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_fedleak.studies.sweep.cell import CellResult, GridCell

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

    def __init__(self, cells: Iterable[GridCell], folder: Path) -> None:
        self.cells = list({cell.key: cell for cell in cells}.values())
        self.folder = folder

    def path(self, cell: GridCell) -> Path:
        """Return the path of a cell's result."""
        return self.folder / "cells" / f"{cell.key}.json"

    def result(self, cell: GridCell) -> CellResult | None:
        """Return the result of a cell, None before it was run."""
        path = self.path(cell)
        if not path.exists():
            return None
        return CellResult.from_dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def todo(self) -> list[GridCell]:
        """Return the cells that were not run, or failed."""
        return [c for c in self.cells if (r := self.result(c)) is None or r.error is not None]

    def run(
        self,
        run: Callable[[GridCell, Path], CellResult],
        on_start: Callable[[GridCell], None] = lambda cell: None,
        on_result: Callable[[GridCell, CellResult], None] = lambda cell, result: None,
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
            logs = self.folder / "runs" / cell.key
            try:
                result = run(cell, logs)
            except Exception as error:  # one failed cell must not lose the rest
                result = CellResult(error=f"{type(error).__name__}: {error}")
            self._keep(cell, result)
            on_result(cell, result)

    def results(self) -> list[tuple[GridCell, CellResult]]:
        """Return every cell that has a result, in the order of the grid."""
        pairs = ((cell, self.result(cell)) for cell in self.cells)
        return [(cell, result) for cell, result in pairs if result is not None]

    def write(self, path: Path) -> None:
        """Write all results to one file of JSON."""
        rows = [{**cell.to_dict(), "result": r.to_dict()} for cell, r in self.results()]
        _replace_file(path, json.dumps({"schema": SCHEMA, "cells": rows}, indent=1) + "\n")

    def _keep(self, cell: GridCell, result: CellResult) -> None:
        content = {"schema": SCHEMA, **cell.to_dict(), "result": result.to_dict()}
        _replace_file(self.path(cell), json.dumps(content, indent=1) + "\n")


def _replace_file(path: Path, text: str) -> None:
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
