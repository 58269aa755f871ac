"""``fedleak demo``: a fine-tuning run that is watched, one that a gate stops, and what it means."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import lightning.pytorch as L
import transformers
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from lightning_fedleak.anatomy import AnatomyError, find_anatomy
from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.callbacks.gate import GateEvent
from lightning_fedleak.commands.demo.live import LiveTable
from lightning_fedleak.commands.demo.summary import Reading, read_back, summary
from lightning_fedleak.commands.options import DemoOptions
from lightning_fedleak.finetuning.assets import SourceError
from lightning_fedleak.finetuning.lightning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.looks import gates
from lightning_fedleak.report import write
from lightning_fedleak.threats import ThreatModelError

UserError = (SourceError, AnatomyError, ThreatModelError)
INTERRUPTED = 130  # exit status after SIGINT, as shells have it

_CHATTY = (
    *("lightning.pytorch", "lightning.fabric", "transformers"),
    gates.log.name,  # what the gate says is shown in a frame
)
_NOTICES = (
    ".*does not have many workers",
    ".*treespec",
)
_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer
_PATIENCE = 1  # looks above the threshold after which the gate acts; the demo is short


@dataclass(frozen=True)
class _Finished:
    readings: Sequence[Reading]
    steps: int
    interrupted: bool
    gate_name: str = ""
    event: GateEvent | None = None
    revealed: Path | None = None


@dataclass(frozen=True)
class Demo(DemoOptions):
    """The command ``fedleak demo``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Run both parts and print what they mean.

        Args:
            console: where to print; stdout by default.

        Returns:
            0, or 130 after an interrupt.

        Raises:
            SourceError: model or text cannot be used, or ``out`` cannot be written to.
            AnatomyError: the model's output head was not found.
            ThreatModelError: the attacks cannot run on this model.
        """
        console = console or Console()
        folder = self.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        with _quiet():
            data = self._data()
            data.setup()
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise SourceError(
                    f"'{self.out}' cannot be written to ({error.strerror}): name another folder "
                    "for the logs with --out."
                ) from error
            self._introduce(console, data)
            public = self._public_text(console)
            watched = self._fit(console, public, folder / "watched", gated=False)
            second = None
            if not watched.interrupted:
                second = self._fit(console, public, folder / "gated", gated=True)
                _print_gate(console, second)
        interrupted = (second or watched).interrupted
        if interrupted:
            console.print("\nInterrupted. This is what was measured until then.", style="bold")
        console.rule("what one shared update gave away")
        console.print(summary(watched.readings, self.batch_size), highlight=False)
        if watched.revealed is not None:
            console.print(
                f"\nThe recovered words are in {watched.revealed} (readable by you alone; delete "
                "it when you have seen enough).",
                highlight=False,
                soft_wrap=True,
            )
        console.print(
            f"\nLoss and leakage of {'the run' if second is None else 'both runs'} on one page:\n"
            f"  {_tensorboard_command(folder)}\n"
            "then open http://localhost:6006, tab 'Custom Scalars'.",
            highlight=False,
            soft_wrap=True,
        )
        if watched.readings:
            page = os.path.relpath(write([folder])[0])
            console.print(
                f"\nThe report, one page for people who decide: {page}",
                highlight=False,
                soft_wrap=True,
            )
        return INTERRUPTED if interrupted else 0

    def _data(self) -> TextDataModule:
        return TextDataModule(
            text=self.text,
            column=self.column,
            tokenizer=self.model,
            batch_size=self.batch_size,
            length=self.length,
            seed=self.seed,
        )

    def _introduce(self, console: Console, data: TextDataModule) -> None:
        model = "the embedded model" if self.model is None else self.model
        text = "the embedded messages of a bank's customers" if self.text is None else self.text
        console.print(
            f"A client fine-tunes {model} on {text} and shares the gradient of each step "
            f"({self.batch_size} texts of at most {self.length} tokens) with a server. The server "
            "is honest but curious: it knows the model, has text that the model itself wrote, and "
            "reads one update at a time.",
            highlight=False,
        )

    def _public_text(self, console: Console) -> PublicText:
        anatomy = find_anatomy(CausalLMFineTuning(self.model))
        with console.status("The server lets the model write text to calibrate its attacks on ..."):
            return PublicText.sampled_from(
                anatomy, n=_PUBLIC_TEXTS, length=self.length, seed=self.seed
            )

    def _fit(self, console: Console, public: PublicText, folder: Path, *, gated: bool) -> _Finished:
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
        return _Finished(
            readings=read_back(folder / "leakage.jsonl"),
            steps=table.steps,
            interrupted=interrupted,
            gate_name=gate.name,
            event=gate.fired,
            revealed=revealed if revealed.exists() else None,
        )


def _print_gate(console: Console, run: _Finished) -> None:
    if run.event is not None:
        text = f"RiskGate '{run.gate_name}' stopped training {run.event}"
        console.rule("what you see when the gate closes", style="red")
        console.print(text, highlight=False, soft_wrap=True)
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
    """Keep the libraries' own notices out of the demo's few lines."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    with warnings.catch_warnings():
        for notice in _NOTICES:
            warnings.filterwarnings("ignore", message=notice)
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
