"""``fedleak demo``: a fine-tuning run that is watched, one that a gate stops, and a summary."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
import shlex
import signal
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.text import Text

from lightning_fedleak.attacks import AlignedFlatChat, Attack, FlatChat, PublicText
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.cli import printing
from lightning_fedleak.cli.finetuning import TRAINING, CausalLMFineTuning, quiet_logs
from lightning_fedleak.cli.studies.sweep import data_of
from lightning_fedleak.engine import WatchSettings, gates
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import ReportError, write

_NOTICES = (".*does not have many workers", ".*treespec")
_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer
_METRICS = ("recall", "precision", "f1")
_CAVEAT = (
    "'Words' are the model's tokens. The server (its staff, its storage, whoever listens) learns "
    "which occur, but not their order, nor in which text.\nA low number would not mean 'safe': "
    "other attacks may read more, and another model, text or batch size gives other numbers."
)
_PATIENCE = 1  # looks above the threshold that the gate lets pass: one is no evidence
_TWO_LINES = (
    "In your own training it is one line, for Lightning or for transformers' Trainer:\n"
    "  trainer = L.Trainer(callbacks=[lightning_fedleak.LeakageMonitor()])\n"
    "  from lightning_fedleak import LeakageCallback\n"
    "  trainer.add_callback(LeakageCallback(trainer))"
)
_PIECE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")  # a token in a reveal file


@dataclass(frozen=True)
class _RunResult:
    steps: int
    interrupted: bool
    gate: RiskGate
    revealed_file: Path
    message: list[str]


def run(options: Namespace, console: Console | None = None) -> int:
    """Run both trainings, and print what they show.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0, or 130 after an interrupt.

    Raises:
        SourceError: model or text cannot be used, or ``out`` cannot be written to.
        AnatomyError: the model's output head was not found.
        ThreatModelError: the attacks cannot run on this model.
    """
    console = console or Console(highlight=False)
    folder = options.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with _quiet():
        data_of(options).setup()
        printing.make_folder(folder, options.out)
        console.print(
            f"A client fine-tunes {printing.model_name(options.model)} on "
            f"{printing.text_name(options.text)} and shares the gradient of each step "
            f"({options.batch_size} texts of at most {options.length} tokens) with a server. The "
            "server is honest but curious: it knows the model, has text that the model itself "
            "wrote, and reads one update at a time."
        )
        anatomy = find_anatomy(CausalLMFineTuning(options.model))
        with console.status("The server lets the model write text to calibrate its attacks on ..."):
            public = PublicText.sampled_from(
                anatomy, n=_PUBLIC_TEXTS, length=options.length, seed=options.seed
            )
        watched = last = _fit(options, console, public, folder / "watched", gated=False)
        if not watched.interrupted:
            last = _fit(options, console, public, folder / "gated", gated=True)
            _print_gate(console, last)
    if last.interrupted:
        console.print("\nInterrupted. This is what was measured until then.", style="bold")
    console.rule("what one shared update leaked")
    try:
        console.print(printing.explain_run(folder / "watched"), markup=False)
        if options.text is None and watched.revealed_file.exists():  # the messages are invented
            _print_message(console, watched)
        console.print(_CAVEAT)
        page = os.path.relpath(write([folder])[0])
        console.print(f"\nThe report, one page for people who decide: {page}", soft_wrap=True)
    except ReportError as error:  # interrupted before the first look
        console.print(f"Nothing was measured, which is 'unknown', not 'safe': {error}")
    if options.reveal and watched.revealed_file.exists():
        console.print(
            f"\nThe recovered words are in {watched.revealed_file}. Only you can read this "
            "file; delete it when you no longer need it.",
            soft_wrap=True,
        )
    console.print(
        f"\nLoss and leakage of {'the run' if last is watched else 'both runs'} on one page:\n"
        f"  {shlex.join(['tensorboard', '--logdir', str(folder)])}\n"
        "then open http://localhost:6006; the group 1_leakage comes first.",
        soft_wrap=True,
    )
    console.print(f"\n{_TWO_LINES}", soft_wrap=True, markup=False)
    return printing.INTERRUPTED if last.interrupted else 0


def _fit(
    options: Namespace, console: Console, public: PublicText, folder: Path, *, gated: bool
) -> _RunResult:
    L.seed_everything(options.seed, verbose=False)
    module = CausalLMFineTuning(options.model, lr=options.lr)
    data = data_of(options)
    attacks: list[Attack] = [FlatChat(public), AlignedFlatChat(public)]
    reveals = (options.reveal or options.text is None) and not gated
    monitor = LeakageMonitor(
        attacks,
        every_n_steps=options.every_n_steps,
        settings=WatchSettings(reveal=reveals, tokenizer=data.tokenizer),
    )
    console.print(f"Run 2: gate at F1 {options.at_most:g}" if gated else "Run 1: watched")
    table = _LooksTable(console, monitor)
    gate = RiskGate(
        f"leakage/{attacks[-1].name}/f1", at_most=options.at_most, action="stop", patience=_PATIENCE
    )
    validations = max(n for n in range(1, 6) if options.steps % n == 0)  # more take longer
    trainer = L.Trainer(
        max_steps=options.steps,
        check_val_every_n_epoch=None,
        val_check_interval=options.steps // validations,  # the last one is at the end
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
    return _RunResult(
        steps=trainer.global_step,
        interrupted=interrupted,
        gate=gate,
        revealed_file=folder / "revealed_words.rank0.txt",
        message=[str(data.tokenizer.decode([token])) for token in table.message],
    )


def _print_message(console: Console, watched: _RunResult) -> None:
    """Print a message of the newest batch, and which of its tokens the last attack named."""
    lines = watched.revealed_file.read_text(encoding="utf-8").splitlines()
    recovered = next(line for line in reversed(lines) if line.startswith("recovered"))
    named = {ast.literal_eval(piece) for piece in _PIECE.findall(recovered)}
    message = Text.assemble(
        *((p, "bold red") if p in named else ("_" * len(p), "dim") for p in watched.message)
    )
    console.print("\nAn invented message of the newest batch that was looked at:")
    console.print(Text("  ").append("".join(watched.message).strip()), soft_wrap=True)
    console.print("The same, as far as the server read its words off the gradient:")
    console.print(Text("  ").append_text(message), soft_wrap=True)


def _print_gate(console: Console, result: _RunResult) -> None:
    if result.gate.fired is not None:
        console.rule("what you see when the gate closes", style="red")
        console.print(
            f"RiskGate '{result.gate.name}' stopped training {result.gate.fired}", soft_wrap=True
        )
    elif not result.interrupted:
        console.print(
            f"The gate let all {result.steps} steps pass: at no {_PATIENCE + 1} looks in a row was "
            "leakage above the threshold. Lower --at-most, or take more --steps, to see it act."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what libraries print beside the demo's own lines."""
    levels = TRAINING | {gates.log.name: logging.ERROR}  # _print_gate prints what the gate logs
    with quiet_logs(levels), warnings.catch_warnings():
        for notice in _NOTICES:
            warnings.filterwarnings("ignore", message=notice)
        yield


class _LooksTable(L.Callback):
    """Prints the results of each look during training.

    Args:
        console: The console to print to.
        monitor: The monitor of the run.

    Attributes:
        message: (L,) token ids of the first text in the batch of the newest look.
    """

    def __init__(self, console: Console, monitor: LeakageMonitor) -> None:
        self._monitor = monitor
        self._batch = self.message = torch.empty(0, dtype=torch.long)
        self._attacks = [attack.name for attack in monitor.attacks]
        headers = [f"{a}\n{m}" if m == "recall" else m for a in self._attacks for m in _METRICS]
        widths = [7, 7, *[11] * len(headers)]
        self._table = printing.LinesTable(console, ["step", "loss", *headers], widths)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._monitor.subscribe(self._on_look)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._table.print_headers()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch["input_ids"][0][batch["attention_mask"][0] > 0]

    def _on_look(self, trainer: L.Trainer) -> None:
        latest, self.message = self._monitor.latest, self._batch
        names = [f"leakage/{attack}/{metric}" for attack in self._attacks for metric in _METRICS]
        values = [float(trainer.callback_metrics.get("train_loss", math.nan))]
        values += [latest.get(name, math.nan) for name in names]
        self._table.add([str(self._monitor.last_step), *map(printing.three_digits, values)])
