"""Progress, loss and leakage of a run as it goes on: a live table, or plain lines in a pipe."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightning_fedleak.callbacks import LeakageMonitor

_ROWS = 12  # looks in the live table, so that it fits a terminal of 24 lines
_BAR_WIDTH = 10  # characters of an F1 of 1
_WIDTH_FOR_BARS = 104  # characters of a terminal in which bars fit beside two attacks
_METRICS = ("recall", "precision", "f1")


class LiveTable(L.Callback):
    """Shows each look of a monitor as it comes.

    Args:
        console: where to print; a live table if it is a terminal, otherwise one line a look.
        monitor: whose results are shown.
        title: above the table.

    Attributes:
        steps: optimizer steps of the run so far.
    """

    def __init__(self, console: Console, monitor: LeakageMonitor, title: str) -> None:
        self.console = console
        self.monitor = monitor
        self.title = title
        self.steps = 0
        self._attacks = [attack.name for attack in monitor.attacks]
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._live: Live | None = None
        self._status = console.status("The attacks calibrate on text that the model wrote ...")
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("training", total=None)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Subscribe to each look of the monitor."""
        self.monitor.subscribe(self._on_look)
        self._status.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the table."""
        self._status.stop()
        self._progress.update(self._task, total=trainer.max_steps)
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=8)
            self._live.start()
        else:
            self._print(self.title)
            self._print(_aligned(["", "", *(c for a in self._attacks for c in (a, "", ""))]))
            self._print(_aligned(["step", "loss", *_METRICS * len(self._attacks)]))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Advance the progress bar."""
        self.steps = trainer.global_step
        self._progress.update(self._task, completed=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the table."""
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the table, so that what is printed next stands below it."""
        self._close()

    def _close(self) -> None:
        self._status.stop()
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None

    def _on_look(self, trainer: L.Trainer) -> None:
        latest = self.monitor.latest
        loss = float(trainer.callback_metrics.get("train_loss", math.nan))
        row = [str(self.monitor.last_step), _number(loss)]
        for name in self._attacks:
            row += [
                _number(latest.get(f"leakage/{name}/{metric}", math.nan)) for metric in _METRICS
            ]
        if self._live is None:
            self._print(_aligned(row))
            return
        self._rows.append(row)
        self._live.update(self._render())

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table(
            title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("step", justify="right")
        table.add_column("loss", justify="right")
        for name in self._attacks:
            table.add_column(f"{name}\nrecall", justify="right")
            table.add_column("\nprecision", justify="right")
            table.add_column("\nf1", no_wrap=True)
        with_bars = self.console.width >= _WIDTH_FOR_BARS
        f1_columns = range(4, 2 + 3 * len(self._attacks), 3) if with_bars else ()
        for row in self._rows:
            table.add_row(*(_bar(c) if i in f1_columns else c for i, c in enumerate(row)))
        return Group(table, self._progress)


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def _aligned(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{7 if i < 2 else 11}}" for i, cell in enumerate(cells)).rstrip()


def _bar(cell: str) -> Text:
    if cell == "unknown":
        return Text(cell)
    filled = round(float(cell) * _BAR_WIDTH)
    return Text.assemble(
        f"{cell} ", ("█" * filled, "red"), ("░" * (_BAR_WIDTH - filled), "bright_black")
    )
