"""What commands share: tables, numbers, folders of results, names of models and texts."""

import json
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lightning_fedleak.cli.finetuning import refuse_errors
from lightning_fedleak.report.records import as_json
from lightning_fedleak.report.wording import share as share

INTERRUPTED = 130  # exit status after SIGINT, as shells have it

_ANY_WIDTH = 100_000  # characters, more than any table has


def model_name(model: str | None) -> str:
    """Return the name of a model in a sentence."""
    return "the embedded model" if model is None else model


def text_name(text: str | None) -> str:
    """Return the name of a text in a sentence."""
    return "the embedded messages of a bank's customers" if text is None else text


def format_share(value: float, digits: int = 3) -> str:
    """Return a share with decimals, unless it is exactly 0 or 1: 0.0004 is ``0.000``."""
    return f"{value:.0f}" if value in (0, 1) else f"{value:.{digits}f}"


def make_folder(folder: Path, out: Path) -> None:
    """Make a folder of results below ``--out``.

    Raises:
        SourceError: The folder cannot be made.
    """
    hint = "Name another folder with --out"
    with refuse_errors(f"'{out}' cannot be written to", OSError, hint=hint):
        folder.mkdir(parents=True, exist_ok=True)


def write_json(console: Console, path: Path | None, content: object) -> None:
    """Write the results of a command as JSON, and print the file's path; None writes no file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(content), indent=1, allow_nan=False) + "\n")
    console.print(str(path))


def print_table(console: Console, table: Table) -> None:
    """Print a table with unbroken cells, beyond the console's width if they do not fit.

    Cells wrap only in columns with ``overflow="fold"``.
    """
    options = console.options.update(max_width=_ANY_WIDTH)
    for column in (column for column in table.columns if column.overflow != "fold"):
        cells = [column.header, *column.cells]
        column.no_wrap = True
        column.min_width = max(Measurement.get(console, options, cell).maximum for cell in cells)
    needed = Measurement.get(console, options, table).minimum
    table.width = needed if needed > console.width else None
    console.print(table, soft_wrap=True)
