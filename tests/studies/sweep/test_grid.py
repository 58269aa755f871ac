from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.sweep.grid import (
    CellResult,
    Grid,
    GridCell,
    Leakage,
    Setting,
)

SPECS = parse_defenses("gradient_noise:clip=1,sigma=0/1/2")
CELLS = [GridCell(Setting(), spec) for spec in SPECS]


def result(loss: float) -> CellResult:
    leakage = Leakage("f1", 0.5, 0.4, 0.6, looks=3, unknown=1, exposed=True, why="no time")
    return CellResult(loss, {"epsilon": 1.0}, {"flatchat": leakage}, seconds=2.0)


class Runner:
    def __init__(self, *, fails: int | None = None, stops: int | None = None) -> None:
        self.fails, self.stops, self.ran = fails, stops, []  # type: ignore[var-annotated]

    def __call__(self, cell: GridCell, folder: Path) -> CellResult:
        number = CELLS.index(cell)
        self.ran.append(number)
        if number == self.fails:
            raise RuntimeError("out of luck")
        if number == self.stops:
            raise KeyboardInterrupt
        return result(float(number))


def test_a_failed_cell_loses_nothing_and_is_tried_again(tmp_path: Path) -> None:
    grid, runner = Grid(CELLS, tmp_path), Runner(fails=1)
    grid.run(runner)
    assert runner.ran == [0, 1, 2]
    failed = grid.result(CELLS[1])
    assert failed is not None
    assert failed.error == "RuntimeError: out of luck"
    again = Runner()
    Grid(CELLS, tmp_path).run(again)
    assert again.ran == [1]
    assert [r for _, r in Grid(CELLS, tmp_path).results()] == [result(i) for i in (0.0, 1.0, 2.0)]


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Grid(CELLS, tmp_path).run(Runner(stops=1))
    assert [CELLS.index(c) for c, _ in Grid(CELLS, tmp_path).results()] == [0]
    rest = Runner()
    Grid(CELLS, tmp_path).run(rest)
    assert rest.ran == [1, 2]


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    Grid(CELLS, tmp_path).run(Runner())
    other = GridCell(Setting(steps=61), SPECS[0])
    assert Grid([other], tmp_path).todo() == [other]
    assert len({c.key for c in [*CELLS, other]}) == 4
    assert len(Grid([*CELLS, *CELLS], tmp_path).cells) == 3


def test_all_results_in_one_file(tmp_path: Path) -> None:
    grid = Grid(CELLS, tmp_path)
    grid.run(Runner(fails=2))
    grid.write(tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [row["defense"]["settings"]["sigma"] for row in rows] == [0, 1, 2]
    assert [row["result"]["val_loss"] for row in rows] == [0.0, 1.0, None]
    assert not list(tmp_path.rglob("*.part"))
