"""What commands share: tables, errors, folders of results, and names of what is embedded."""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.extras import install

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


def short(value: float, digits: int = 3) -> str:
    """Return a share without the leading zero; an exact 0 or 1 as such, unlike .0004 or .9996."""
    return f"{value:.0f}" if value in (0, 1) else f"{value:.{digits}f}".replace("0.", ".", 1)


def make_folder(folder: Path, out: Path) -> None:
    """Make a folder of results, which is below ``--out``.

    Raises:
        SourceError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(
            f"'{out}' cannot be written to ({error.strerror}): name another folder with --out."
        ) from error


def make_file(path: Path, option: str) -> None:
    """Make a file of results, empty where it is new, before anything is computed.

    Raises:
        SourceError: it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise SourceError(
            f"'{path}' cannot be written to ({error.strerror}): name another file with {option}."
        ) from error


def without_matplotlib() -> str:
    """Return how matplotlib is installed, as Rich prints it; nothing where it is there."""
    return "" if importlib.util.find_spec("matplotlib") else escape(install("plots"))


class LiveTable:
    """Shows rows as they come: a live table on a terminal, lines elsewhere.

    Args:
        console: where to print.
        headers: of the columns; a header may have several lines.
        widths: of the columns where rows are printed as lines.
        title: above the table.
        footer: shown below a live table.
        max_rows: rows of a live table, at most; the last ones stay.
    """

    def __init__(
        self,
        console: Console,
        headers: Sequence[str],
        widths: Sequence[int],
        *,
        title: str = "",
        footer: RenderableType = "",
        max_rows: int | None = None,
    ) -> None:
        self._console, self._headers, self._widths = console, headers, widths
        self._title, self._footer = title, footer
        self._rows: deque[Sequence[str]] = deque(maxlen=max_rows)
        self._live: Live | None = None

    def __enter__(self) -> LiveTable:
        """Open the table."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=8)
            self._live.start()
            return self
        if self._title:
            self._console.print(self._title, soft_wrap=True)
        lines = [header.split("\n") for header in self._headers]
        height = max(map(len, lines))
        for number in range(height):
            self._print([([""] * (height - len(line)) + line)[number] for line in lines])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close the table, so that what is printed next is below it."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def add(self, cells: Sequence[str]) -> None:
        """Add a row."""
        self._rows.append(cells)
        if self._live is None:
            self._print(cells)
        else:
            self._live.update(self._table(), refresh=True)

    def _print(self, cells: Sequence[str]) -> None:
        line = "".join(f"{c:>{w}}" for c, w in zip(cells, self._widths, strict=True))
        self._console.print(line.rstrip(), soft_wrap=True)

    def _table(self) -> RenderableType:
        table = Table(
            title=self._title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for header in self._headers:
            table.add_column(header, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, self._footer)


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
