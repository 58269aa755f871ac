"""What commands share: tables, errors, folders of results, and names of what is embedded."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lightning_fedleak.attacks import ThreatModelError
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.extras import install
from lightning_fedleak.model.anatomy import AnatomyError
from lightning_fedleak.model.taps import UpdateError

USER_ERRORS = (
    *(SourceError, AnatomyError, ThreatModelError),
    *(DefenseError, UpdateError, GameError),
)
"""Errors whose message says what to change: a command prints it alone."""
INTERRUPTED = 130  # exit status after SIGINT, as shells have it

_ANY_WIDTH = 100_000  # characters, more than any table has


def model_name(model: str | None) -> str:
    """Return how a sentence names a model."""
    return "the embedded model" if model is None else model


def text_name(text: str | None) -> str:
    """Return how a sentence names a text."""
    return "the embedded messages of a bank's customers" if text is None else text


def three_digits(value: float) -> str:
    """Return a number in a table; NaN is unknown."""
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def make_folder(folder: Path, out: Path) -> None:
    """Make a folder of results, which is below ``--out``.

    Raises:
        SourceError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error, "folder with --out") from error


def unwritable(path: Path, error: OSError, alternative: str) -> SourceError:
    """Return the error of a place that cannot be written to; it says what to name instead."""
    return SourceError(
        f"'{path}' cannot be written to ({error.strerror}): name another {alternative}."
    )


def without_matplotlib() -> str:
    """Return how matplotlib is installed, as Rich prints it; nothing where it is there."""
    return "" if importlib.util.find_spec("matplotlib") else escape(install("plots"))


def print_table(console: Console, table: Table, keys: int = 1) -> None:
    """Print a table of short texts in as few blocks as fit the console's width, one below another.

    Headers wrap between words. Cells do not, except in a column with ``overflow="fold"``, which
    takes at most a third of the width.

    Args:
        console: where to print.
        table: its cells are strings. Box, padding, edge and title are kept.
        keys: how many columns from the left name a line; they are repeated in every block.
    """
    block = list(range(keys))
    title = table.title
    for column in range(keys, len(table.columns)):
        if len(block) > keys and _width(console, _part(console, table, [*block, column])) > (
            console.width
        ):
            console.print(_laid_out(console, table, block, title))
            console.print()
            block, title = list(range(keys)), None
        block.append(column)
    console.print(_laid_out(console, table, block, title))


def _laid_out(console: Console, table: Table, columns: Sequence[int], title: object) -> Table:
    """Return the columns with their headers on one line each where that fits, else wrapped."""
    block = _part(console, table, columns, whole_headers=True)
    if _width(console, block) > console.width:
        block = _part(console, table, columns)
    block.title = title  # type: ignore[assignment]
    return block


def _part(
    console: Console, table: Table, columns: Sequence[int], *, whole_headers: bool = False
) -> Table:
    part = Table(box=table.box, padding=table.padding, show_edge=table.show_edge)
    chosen = [table.columns[i] for i in columns]
    for column in chosen:
        header = str(column.header)
        words = header.splitlines() if whole_headers else header.split()
        texts = [console.render_str(str(cell)) for cell in column.cells]
        lines = [line.cell_len for text in texts for line in text.split("\n")]
        width = max([*map(len, words), *lines], default=1)
        folds = column.overflow == "fold"
        part.add_column(
            header,
            justify=column.justify,
            overflow="fold",
            width=min(width, console.width // 3) if folds else width,
        )
    for row in zip(*(column.cells for column in chosen), strict=True):
        part.add_row(*row)
    return part


def _width(console: Console, table: Table) -> int:
    options = console.options.update(max_width=_ANY_WIDTH)
    return Measurement.get(console, options, table).minimum
