"""``fedleak demo``: a fine-tuning run that is watched, one that a gate stops, and a summary."""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lightning_fedleak.attacks import AlignedFlatChat, Attack, FlatChat, PublicText
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.cli.commands import printing
from lightning_fedleak.cli.commands.options import DemoOptions
from lightning_fedleak.cli.finetuning import (
    TRAINING,
    CausalLMFineTuning,
    TextDataModule,
    quiet_logs,
)
from lightning_fedleak.engine import gates
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import write
from lightning_fedleak.report.records import read_results

_NOTICES = (".*does not have many workers", ".*treespec")
_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer
_ROWS = 12  # looks that the live table shows, so that it fits a terminal of 24 lines
_BAR_WIDTH = 10  # characters of the bar for an F1 of 1
_WIDTH_FOR_BARS = 104  # characters in a line of a terminal where the bars of two attacks fit
_METRICS = ("recall", "precision", "f1")
_PATIENCE = 1  # looks above the threshold after which the gate acts; the demo is short


@dataclass(frozen=True)
class Reading:
    """The result of one attack at one look, read back from ``leakage.jsonl``.

    Attributes:
        attack: the attack's name in the logs.
        step: optimizer step.
        n: number of word types in the batch.
        recall, precision: shares, 0 to 1; None where the result is unknown.
        exposed: whether the surface that the attack reads was shared at all.
    """

    attack: str
    step: int
    n: int
    recall: float | None
    precision: float | None
    exposed: bool

    @property
    def f1(self) -> float:
        """Return the harmonic mean of recall and precision; 0 where either is unknown."""
        if not self.recall or not self.precision:
            return 0.0
        return 2 * self.recall * self.precision / (self.recall + self.precision)


@dataclass(frozen=True)
class _RunResult:
    readings: Sequence[Reading]
    steps: int
    interrupted: bool
    gate_name: str = ""
    gate_event: str | None = None
    revealed_file: Path | None = None


@dataclass(frozen=True)
class Demo(DemoOptions):
    """The command ``fedleak demo``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Run both trainings, and print what they show.

        Args:
            console: where to print; stdout by default.

        Returns:
            0, or 130 after an interrupt.

        Raises:
            SourceError: model or text cannot be used, or ``out`` cannot be written to.
            AnatomyError: the model's output head was not found.
            ThreatModelError: the attacks cannot run on this model.
        """
        console = console or Console(highlight=False)
        folder = self.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        with _quiet():
            data = self._data()
            data.setup()
            printing.make_folder(folder, self.out)
            self._introduce(console)
            public = self._public_text(console)
            watched = self._fit(console, public, folder / "watched", gated=False)
            gated = None
            if not watched.interrupted:
                gated = self._fit(console, public, folder / "gated", gated=True)
                _print_gate(console, gated)
        interrupted = (gated or watched).interrupted
        if interrupted:
            console.print("\nInterrupted. This is what was measured until then.", style="bold")
        console.rule("what one shared update gave away")
        console.print(explain_readings(watched.readings, self.batch_size))
        if watched.revealed_file is not None:
            console.print(
                f"\nThe recovered words are in {watched.revealed_file}. Only you can read this "
                "file; delete it when you no longer need it.",
                soft_wrap=True,
            )
        console.print(
            f"\nLoss and leakage of {'the run' if gated is None else 'both runs'} on one page:\n"
            f"  {_tensorboard_command(folder)}\n"
            "then open http://localhost:6006, tab 'Custom Scalars'.",
            soft_wrap=True,
        )
        if watched.readings:
            page = os.path.relpath(write([folder])[0])
            console.print(f"\nThe report, one page for people who decide: {page}", soft_wrap=True)
        return printing.INTERRUPTED if interrupted else 0

    def _data(self) -> TextDataModule:
        return TextDataModule(
            text=self.text,
            column=self.column,
            tokenizer=self.model,
            batch_size=self.batch_size,
            length=self.length,
            seed=self.seed,
        )

    def _introduce(self, console: Console) -> None:
        console.print(
            f"A client fine-tunes {printing.model_name(self.model)} on "
            f"{printing.text_name(self.text)} and shares the gradient of each step "
            f"({self.batch_size} texts of at most {self.length} tokens) with a server. The server "
            "is honest but curious: it knows the model, has text that the model itself wrote, and "
            "reads one update at a time."
        )

    def _public_text(self, console: Console) -> PublicText:
        anatomy = find_anatomy(CausalLMFineTuning(self.model))
        with console.status("The server lets the model write text to calibrate its attacks on ..."):
            return PublicText.sampled_from(
                anatomy, n=_PUBLIC_TEXTS, length=self.length, seed=self.seed
            )

    def _fit(
        self, console: Console, public: PublicText, folder: Path, *, gated: bool
    ) -> _RunResult:
        L.seed_everything(self.seed, verbose=False)
        module = CausalLMFineTuning(self.model, lr=self.lr)
        data = self._data()
        attacks: list[Attack] = [FlatChat(public), AlignedFlatChat(public)]
        monitor = LeakageMonitor(
            attacks,
            every_n_steps=self.every_n_steps,
            reveal=self.reveal and not gated,
            tokenizer=data.tokenizer,
        )
        title = f"Run 2: gate at F1 {self.at_most:g}" if gated else "Run 1: watched"
        table = LiveTable(console, monitor, title)
        gate = RiskGate(
            f"leakage/{attacks[-1].name}/f1",
            at_most=self.at_most,
            action="stop",
            patience=_PATIENCE,
        )
        trainer = L.Trainer(
            max_steps=self.steps,
            devices=1,
            logger=TensorBoardLogger(folder.parent, name=folder.name, version=""),
            callbacks=[monitor, table, *([gate] if gated else [])],
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        interrupted = False
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(module, datamodule=data)
        except (KeyboardInterrupt, SystemExit):  # Lightning tidies up, then calls sys.exit
            interrupted = True
            signal.signal(signal.SIGINT, handler)
        revealed = folder / "revealed_words.rank0.txt"
        return _RunResult(
            readings=read_readings(folder / "leakage.jsonl"),
            steps=table.steps,
            interrupted=interrupted,
            gate_name=gate.name,
            gate_event=None if gate.fired is None else str(gate.fired),
            revealed_file=revealed if revealed.exists() else None,
        )


def _print_gate(console: Console, run: _RunResult) -> None:
    if run.gate_event is not None:
        text = f"RiskGate '{run.gate_name}' stopped training {run.gate_event}"
        console.rule("what you see when the gate closes", style="red")
        console.print(text, soft_wrap=True)
    elif not run.interrupted:
        console.print(
            f"The gate let all {run.steps} steps pass: leakage stayed at or below the threshold. "
            "Lower --at-most to see it stop the run."
        )


def _tensorboard_command(folder: Path) -> str:
    script = Path(sys.executable).with_name("tensorboard")
    program = os.path.relpath(script) if script.exists() else "tensorboard"
    return shlex.join([program, "--logdir", str(folder)])


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what libraries print beside the demo's own lines."""
    levels = TRAINING | {gates.log.name: logging.ERROR}  # _print_gate prints what the gate logs
    with quiet_logs(levels), warnings.catch_warnings():
        for notice in _NOTICES:
            warnings.filterwarnings("ignore", message=notice)
        yield


# ---- the live table -----------------------------------------------------------------------------


class LiveTable(L.Callback):
    """Prints the results of each look during training.

    Args:
        console: where to print: a live table on a terminal, otherwise one line for each look.
        monitor: the monitor that looks.
        title: title above the table.

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

    def on_exception(self, *_: Any) -> None:
        """Close the table, so that the next output stands below it."""
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
        row = [str(self.monitor.last_step), printing.three_digits(loss)]
        for name in self._attacks:
            row += [
                printing.three_digits(latest.get(f"leakage/{name}/{metric}", math.nan))
                for metric in _METRICS
            ]
        if self._live is None:
            self._print(_aligned(row))
            return
        self._rows.append(row)
        self._live.update(self._render())

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

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


def _aligned(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{7 if i < 2 else 11}}" for i, cell in enumerate(cells)).rstrip()


def _bar(cell: str) -> Text:
    if cell == "unknown":
        return Text(cell)
    filled = round(float(cell) * _BAR_WIDTH)
    return Text.assemble(
        f"{cell} ", ("█" * filled, "red"), ("░" * (_BAR_WIDTH - filled), "bright_black")
    )


# ---- the summary --------------------------------------------------------------------------------


def read_readings(path: Path) -> list[Reading]:
    """Return the results of the stage "shared" in a ``leakage.jsonl``; empty without a file."""
    return [
        Reading(
            attack=line.attack,
            step=line.step,
            n=line.n or 0,
            recall=line.value("recall"),
            precision=line.value("precision"),
            exposed=line.was_shared,
        )
        for line in read_results(path)
        if line.stage == "shared"
    ]


def explain_readings(readings: Sequence[Reading], batch_size: int) -> str:
    """Return a text that says for each attack which share of the words one update gave away.

    Args:
        readings: the results of one run, for all attacks and steps.
        batch_size: number of texts in the batch of one update.
    """
    results = [r for r in readings if r.exposed and r.recall is not None]
    if not results:
        return "Nothing was measured: no attack gave a result. That is 'unknown', not 'safe'" + (
            "; the attacks of this demo read the gradient of the output head, and this run "
            "does not share it."
            if any(not r.exposed for r in readings)
            else "."
        )
    best = max(
        {r.attack for r in results}, key=lambda a: _mean([r.f1 for r in results if r.attack == a])
    )
    recall = _mean([r.recall for r in results if r.attack == best and r.recall is not None])
    lines = [
        f"From one shared update the server could have read {_percent(recall)} of the private "
        f"words ({best}).",
        "",
        f"Mean, lowest and highest of {len({r.step for r in results})} updates, each of "
        f"{batch_size} texts that held {_mean([r.n for r in results]):.0f} different words:",
    ]
    for attack in dict.fromkeys(r.attack for r in readings):
        lines.append(f"  {attack}: {_describe_rates([r for r in readings if r.attack == attack])}")
    lines += [
        "",
        "'Words' are the model's tokens: words and pieces of words. The server (its staff, its "
        "storage, whoever listens) learns which occur, but not their order, nor in which text.",
        "A low number would not mean 'safe': these attacks read one gradient of one step. Others "
        "may read more, and another model, text or batch size gives other numbers.",
    ]
    return "\n".join(lines)


def _describe_rates(readings: Sequence[Reading]) -> str:
    if not any(r.exposed for r in readings):
        return "nothing, because it reads a gradient that this run does not share"
    results = [r for r in readings if r.recall is not None and r.precision is not None]
    if not results:
        return "unknown, it gave no result"
    unknown = len(readings) - len(results)
    return (
        f"recall {_spread([r.recall for r in results])}, "
        f"precision {_spread([r.precision for r in results])}"
        + (f"; no result at {unknown} looks" if unknown else "")
    )


def _spread(shares: Sequence[float | None]) -> str:
    present = [s for s in shares if s is not None]
    mean, low, high = map(_percent, (_mean(present), min(present), max(present)))
    return f"{mean} ({low} to {high})"


def _percent(share: float) -> str:
    """Return a share in percent; only 0 and 1 themselves are written as 0% and 100%."""
    for digits in (0, 1, 2):
        text = f"{share:.{digits}%}"
        if share in (0, 1) or float(text[:-1]) not in (0, 100):
            return text
    return "nearly all" if share > 0.5 else "nearly none"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
