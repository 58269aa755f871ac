"""Every command's table in a terminal of any width: all of each number is on one line."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.table import Table

from lightning_fedleak.cli.commands import game
from lightning_fedleak.cli.commands import invert as invert
from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.cli.studies.invert import ActivationCell, GradientCell, Utility
from lightning_fedleak.evaluation.games import GameResult
from lightning_fedleak.evaluation.metrics.rates import Rate

RATES = {
    name: Rate(0.9987, 0.9512, 0.9999) for name in ("token_accuracy", "exact_sentences", "rouge_l")
}


def of_hidden_states() -> Table:
    useful = Utility(0.4567, 12345.6)
    return invert.cells_table(
        [
            ActivationCell(
                attack=name, layer=11, blocks=12, length=1024, sigma=0.00123, relative=True,
                texts=64, utility=useful, rates=RATES, seconds=26543.2, budget_seconds=60.0,
                finished=False,
            )
            for name in ("prefix", "descent", "relaxation")
        ]
    )  # fmt: skip


def of_gradients() -> Table:
    return invert.cells_table(
        [
            GradientCell(
                attack=name, batch=128, length=1024, sigma=0.00123, relative=True, batches=16,
                texts=2048, rates=RATES, certified=16, seconds=26543.2, budget_seconds=600.0,
                finished=False,
            )
            for name in ("subspace", "matching", "beam")
        ]
    )  # fmt: skip


def of_games() -> Table:
    n = 400
    members = torch.arange(n) % 2 == 0
    nowhere, zeros = members & (torch.arange(n) % 7 == 0), torch.zeros(n, dtype=torch.long)
    scores = torch.linspace(-1, 1, n).double() + members
    return game.game_table(
        [
            GameResult(
                f"{name}@{layer}", layer, "token", members, scores > 0.3, scores, nowhere, zeros,
                zeros, "game", "float32",
            )
            for name, layer in (("attention-full", 11), ("trained", 4))
        ]
    )  # fmt: skip


@pytest.mark.parametrize("table", [of_hidden_states, of_gradients, of_games])
@pytest.mark.parametrize("width", [40, 80, 400])
def test_no_number_is_cut(table, width: int) -> None:
    display = table()
    lines = printed(display, width)
    assert "…" not in "".join(lines)
    for column in display.columns:
        for word in column.header.split():
            assert any(word in line for line in lines)
        for cell in () if column.overflow == "fold" else column.cells:
            assert any(cell in line for line in lines)


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_name_that_is_too_long_is_folded_and_no_number_is() -> None:
    table = Table()
    table.add_column("defence", overflow="fold")
    table.add_column("loss")
    table.add_row("x" * 100, "[.123, .456]")
    lines = printed(table, 40)
    assert sum(line.count("x") for line in lines) == 100
    assert any("[.123, .456]" in line for line in lines)
