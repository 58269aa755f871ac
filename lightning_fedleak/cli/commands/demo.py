"""``fedleak demo``: what fine-tuning leaks without a defence, under DP-SGD, and with a gate.

It trains three times on the same texts: without a defence ("watched"), under DP-SGD ("defended"),
and with a gate that stops the training when word leakage exceeds a limit ("gated"). Attacks measure
each run at a few steps, called looks. Then it prints a table, the path of the report, and an
invented message with the words that the server recovered.
"""

import ast
import logging
import math
import os
import re
import shlex
import signal
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.text import Text
from torch import Tensor

from lightning_fedleak import attacks
from lightning_fedleak.callbacks import Games, LeakageMonitor, RiskGate
from lightning_fedleak.cli import finetuning, printing
from lightning_fedleak.cli.studies import demo_settings
from lightning_fedleak.defenses import DPSGD, Defense, DefenseError
from lightning_fedleak.engine import Memorization, WatchSettings, gates
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import ReportError, findings, read, write
from lightning_fedleak.report.attacks import AttackSummary
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.series import is_leak, utility
from lightning_fedleak.report.wording import brief, brief_interval, share
from lightning_fedleak.strategies import DefendedStrategy

_CAVEAT = (
    "A number holds for this model, text and batch size; other attacks may recover more. If an\n"
    "interval contains guessing (0.50 of members, weights), a leak is neither shown nor excluded.\n"
    "DP-SGD does not protect hidden states that cross a split: ActivationNoise does."
)
_OWN_TRAINING = (
    "In your own training: L.Trainer(callbacks=[lightning_fedleak.LeakageMonitor()])\n"
    "or with transformers: trainer.add_callback(lightning_fedleak.LeakageCallback(trainer))"
)
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")  # a token in a reveal file
_WATCHED, _DEFENDED, _GATED = "watched", "defended", "gated"  # folders of the runs
_LINE = "{:<38}{:<20}{:<20}{}"  # a line of the final table; the widths are in characters


# The name of an attack, what it recovers, its title in the tables, and the command that shows a
# leak if the demo's few texts do not.
_ATTACKS = (
    ("flatchat", "words", "FlatChat (FLATCHAT)", "demo --batch-size 4"),
    ("aligned_flatchat", "words", "AlignedFlatChat (best)", "demo --batch-size 4"),
    ("gradient_membership", "members", "GradientMembership (passive)", "demo --every-n-steps 4"),
    ("fc_membership", "members", "FCMembership (A_FC)", "demo --every-n-steps 4"),
    ("attention_membership", "members", "AttentionMembership (A_Attn)", "demo --every-n-steps 4"),
    ("prefix_inversion", "texts", "PrefixInversion (split)", "invert"),
    ("combined", "weights", "Combined (trained)", "demo --steps 100"),
)


_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer


class _Rows(finetuning.TextDataModule):
    """The texts of a command; some are trained on, and as many are held out.

    Attributes:
        n: The number of training texts.
        others: The held-out texts.
        is_enough: Whether both sides have enough long texts to test the trained weights.
    """

    def setup(self, stage: str | None = None) -> None:
        """Read the texts, and draw the held-out ones, once."""
        if self._train is None:
            super().setup(stage)
            rows: list[Tensor] = (self._train or [])[: 2 * demo_settings.ROWS]
            n = max(1, min(len(rows) // 2, len(rows) - self.batch_size))
            members, others = leave_out(rows, n, self.seed)
            self.n, self.others = len(members), attacks.PublicText([others[i] for i in range(n)])
            sides = ([members[i] for i in range(self.n)], self.others.sentences)
            # Rows of 9 tokens or more have the 8 label tokens that a test of the weights needs.
            long = [{tuple(row.tolist()) for row in side if len(row) > 8} for side in sides]
            self.is_enough = min(map(len, long)) >= demo_settings.LONG_ROWS
            self._train = members  # type: ignore[assignment]  # a loader takes it like a list


class _Demo:
    """The runs of the demo, which share their texts and calibrations.

    Args:
        options: The options of the command.
        console: The console to print on.
        folder: The folder that holds the folders of the runs.

    Attributes:
        data: The texts.
        interrupted: Whether the newest run was interrupted.
        message: The tokens of a training message at the last look of the run without a defence.
    """

    def __init__(self, options: Namespace, console: Console, folder: Path) -> None:
        self.options, self.console, self.folder = options, console, folder
        self.data = _Rows(
            text=options.text,
            column=options.column,
            tokenizer=options.model,
            batch_size=options.batch_size,
            length=options.length,
            seed=options.seed,
        )
        self._calibrations: Mapping[str, object] = {}
        self.interrupted = False
        self.message: list[str] = []

    @cached_property
    def public(self) -> attacks.PublicText:
        """Return the text, sampled from the model before training, that attacks calibrate on."""
        options, anatomy = self.options, find_anatomy(finetuning.load_model(self.options.model))
        return attacks.PublicText.sampled_from(
            anatomy, n=_PUBLIC_TEXTS, length=options.length, seed=options.seed
        )

    def fit(self, name: str, defenses: Sequence[Defense] = ()) -> None:
        """Train and attack, and print each look and what the gate did."""
        options, sizes = self.options, demo_settings
        L.seed_everything(options.seed, verbose=False)
        module = finetuning.CausalLMFineTuning(options.model, lr=options.lr, loss="sample_mean")
        layer = max(1, len(find_anatomy(module).blocks) // 2)
        public = self.public
        plan: list[attacks.Attack] = [
            attacks.FlatChat(public),
            attacks.AlignedFlatChat(public, calibration_tokens=sizes.CALIBRATION_TOKENS),
            attacks.GradientMembership(public, tokens=options.length),
            attacks.FCMembership(layer),
            attacks.AttentionMembership(layer, public, batch=options.batch_size),
            attacks.PrefixInversion(layer, None, sizes.INVERSION_SECONDS),
        ] + [attacks.Combined()] * self.data.is_enough
        # "local" is the gradient before the defence, "shared" what leaves the client.
        stages = ("local", "shared") if defenses else ("shared",)
        reveals = (options.reveal or options.text is None) and name == _WATCHED
        memory = Memorization(max_overhead=sizes.WEIGHTS_OVERHEAD, looks=())
        settings = WatchSettings(
            stages, reveals, self.data.tokenizer, texts=sizes.TEXTS, memorization=memory
        )
        games = Games(sizes.GAMES, self.data.others)
        monitor = LeakageMonitor(plan, options.every_n_steps, games=games, settings=settings)
        monitor.engine.reuse(self._calibrations)
        table = _LooksTable(self.console, monitor)
        if name == _WATCHED:
            table.print_headers()
        gate = RiskGate("leakage/aligned_flatchat/f1", at_most=options.at_most, action="stop")
        callbacks = [monitor, table, *([gate] if name == _GATED else [])]
        logger = TensorBoardLogger(self.folder, name=name, version="")
        strategy = DefendedStrategy("auto", defenses)
        trainer = L.Trainer(
            strategy=strategy,
            max_steps=options.steps,
            devices=1,
            logger=logger,
            callbacks=callbacks,
            check_val_every_n_epoch=None,
            val_check_interval=options.steps,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(module, datamodule=self.data)
        except (KeyboardInterrupt, SystemExit):  # Lightning tidies up, then calls sys.exit
            self.interrupted = True
            signal.signal(signal.SIGINT, handler)
        self._calibrations = self._calibrations or table.calibrations
        decode = self.data.tokenizer.decode
        self.message = self.message or [str(decode([token])) for token in table.message]
        if name == _GATED and gate.fired is not None:
            event = f"{gate.fired}".partition("\n  what now")[0]
            self.console.print(f"RiskGate '{gate.name}' stopped training {event}", soft_wrap=True)
        elif name == _GATED and not self.interrupted:
            self.console.print(f"The gate let all {options.steps} steps pass: lower --at-most.")

    def defend(self) -> None:
        """Train under DP-SGD, or print why the defence refuses this model."""
        # The delta is a tenth of 1 / n: a mechanism that publishes one of n texts has delta 1 / n.
        epsilon, delta = demo_settings.EPSILON, 0.1 / self.data.n
        title = f"Run 2: DP-SGD, epsilon {epsilon:g} at delta {delta:.1g} for each text"
        self.console.print(title, style="bold")
        try:
            # None: the noise multiplier follows from epsilon.
            defense = DPSGD(demo_settings.MAX_GRAD_NORM, None, epsilon, delta, "rdp")
            self.fit(_DEFENDED, [defense])
        except DefenseError as error:
            self.console.print(f"DP-SGD refuses this run: {error}", markup=False)


def run(options: Namespace, console: Console | None = None) -> int:
    """Run the three trainings, and print what leaked.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0, or 130 after an interrupt.

    Raises:
        SourceError: The model or the text cannot be used, or ``out`` cannot be written to.
        AnatomyError: The model's output head was not found.
        ValueError: The attacks cannot run on this model.
    """
    console = console or Console(highlight=False)
    folder = options.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    demo = _Demo(options, console, folder)
    with _quiet() as messages:
        demo.data.setup()
        printing.make_folder(folder, options.out)
        console.print(
            f"A client fine-tunes {printing.model_name(options.model)} on {demo.data.n} of "
            f"{printing.text_name(options.text)}, {options.batch_size} a step; as many are held "
            "out, to compare with. A server that knows the model attacks each update; it adds "
            "layers to test membership (A_FC, A_Attn), or sees hidden states (split).",
            highlight=False,
        )
        console.print("Run 1: no defence", style="bold")
        demo.fit(_WATCHED)
        if not demo.interrupted:
            demo.defend()
        if not demo.interrupted:
            console.print(f"Run 3: a gate on words, F1 at most {options.at_most:g}", style="bold")
            demo.fit(_GATED)
    if demo.interrupted:
        console.print("\nInterrupted. This is what was measured until then.", style="bold")
    for message in dict.fromkeys(messages):
        console.print(message, markup=False, soft_wrap=True)
    console.rule("what leaked")
    revealed = folder / _WATCHED / "revealed_words.rank0.txt"
    try:
        _print_leaks(console, {fit.name: fit for fit in findings(read([folder])).runs})
        if options.text is None and revealed.exists():  # the messages are invented
            _print_message(console, demo.message, revealed)
        console.print(_CAVEAT, soft_wrap=True)
        console.print(f"The report: {os.path.relpath(write([folder])[0])}", soft_wrap=True)
    except ReportError as error:  # interrupted before the first look
        console.print(f"Nothing was measured, which is 'unknown', not 'safe': {error}")
    if options.reveal and revealed.exists():
        words = f"The recovered words are in {revealed}. Only you can read it; delete it when done."
        console.print(words, soft_wrap=True)
    command = shlex.join(["tensorboard", "--logdir", str(folder)])
    console.print(f"The curves: {command}, then http://localhost:6006", soft_wrap=True)
    console.print(_OWN_TRAINING, soft_wrap=True, markup=False)
    return printing.INTERRUPTED if demo.interrupted else 0


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Silence logs and warnings in the block; fill the yielded list with this package's warnings.

    The list is filled when the block ends.
    """
    messages: list[str] = []
    with (
        finetuning.quiet_logs(finetuning.TRAINING | {gates.log.name: logging.ERROR}),
        warnings.catch_warnings(record=True) as records,
    ):
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            # Warnings about attacks that gave no result are not passed on.
            texts = (str(w.message) for w in records if "lightning_fedleak" in w.filename)
            messages += [text for text in texts if "gave no result" not in text]


def _summary(fit: FitSummary, attack: str, is_local: bool) -> AttackSummary | None:
    """Return the results of an attack on updates before the defence, or after; None without any."""
    summaries = (a for a in fit.attacks if a.name == attack)
    return next((a for a in summaries if (a.stage == "local") == is_local), None)


def _print_leaks(console: Console, fits: Mapping[str, FitSummary]) -> None:
    """Print each attack's results without DP-SGD, before and after it, and the cost of DP-SGD."""
    titles = _LINE.format("", "no defence", "before DP-SGD", "after DP-SGD")
    console.print(titles, style="bold", soft_wrap=True)
    columns = ((_WATCHED, False), (_DEFENDED, True), (_DEFENDED, False))
    for name, leak, title, command in _ATTACKS:
        results = [_summary(fits[run], name, local) for run, local in columns if run in fits]
        looks = [result.quoted if result else None for result in results]
        cells = [f"{brief(q.rate.value)} ({brief_interval(q.rate)})" if q else "" for q in looks]
        line = _LINE.format(f"{leak}: {title}", *cells, "", "").rstrip()
        if results[0] and not (looks[0] and is_leak(looks[0].rate, results[0].chance)):
            line += f"\n  Not conclusive without a defence. This shows it: fedleak {command}"
        if not results[0]:
            line += f"\n  Not tested: it needs {2 * demo_settings.LONG_ROWS} texts of 9 tokens."
        console.print(line, markup=False, soft_wrap=True)
    losses = [utility(fits[run]).get("val_loss") for run in (_WATCHED, _DEFENDED) if run in fits]
    cells = [f"{points[-1][1]:.3f}" if points else "" for points in losses]
    line = _LINE.format("cost: val_loss at the end", *cells[:1], "", *cells[1:], "", "").rstrip()
    console.print(line, soft_wrap=True)


def _print_message(console: Console, message: Sequence[str], revealed: Path) -> None:
    """Print a message (its tokens), and below it only the tokens that the last attack recovered.

    The recovered tokens are read from the newest line of the reveal file ``revealed``.
    """
    lines = revealed.read_text(encoding="utf-8").splitlines()
    newest = next(line for line in reversed(lines) if line.startswith("recovered"))
    recovered = {ast.literal_eval(token) for token in _TOKEN.findall(newest)}
    spans = ((t, "bold red") if t in recovered else ("_" * len(t), "dim") for t in message)
    console.print("An invented message, and the words that the server recovered from the gradient:")
    console.print(Text("  ").append("".join(message).strip()), soft_wrap=True)
    console.print(Text("  ").append_text(Text.assemble(*spans)), soft_wrap=True)


class _LooksTable(L.Callback):
    """Prints the results of each look during training.

    Args:
        console: The console to print to.
        monitor: The monitor of the run.

    Attributes:
        message: (L,) token ids of the first text in the batch of the newest look.
        calibrations: The results of the attacks' calibration before the first step.
    """

    def __init__(self, console: Console, monitor: LeakageMonitor) -> None:
        self._console, self._monitor = console, monitor
        self._batch = self.message = torch.empty(0, dtype=torch.long)
        self.calibrations: Mapping[str, object] = {}
        self._values: list[str] = []  # cells of the newest look at an update

    def print_headers(self) -> None:
        """Print what each attack recovers, and its title in short."""
        self._print_row(["", "", *(leak for _, leak, *_ in _ATTACKS)])
        titles = [title.partition("(")[2][:-1] for _, _, title, _ in _ATTACKS]
        self._print_row(["step", "loss", *titles])

    def _print_row(self, cells: Sequence[str]) -> None:
        """Print the cells of step, loss and the attacks as a line, at once."""
        line = "".join(f"{c:>{w}}" for c, w in zip(cells, (6, 7, *[11] * 7), strict=True))
        self._console.print(line.rstrip(), soft_wrap=True, highlight=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Have the monitor call this table after each look."""
        self._monitor.subscribe(self._on_look)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the calibrations, which the later runs use again."""
        self.calibrations = self._monitor.engine.calibrations()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """Keep the first text of the batch, without padding."""
        self._batch = batch["input_ids"][:1][batch["attention_mask"][:1] > 0]

    def _on_look(self, trainer: L.Trainer) -> None:
        """Print the values of a look: of the update if they are new, and of the weights."""
        latest, values = self._monitor.latest, []
        for attack, *_ in _ATTACKS:
            names = [f"leakage/{attack}/{name}" for name in ("auc", "token_accuracy", "f1")]
            values.append(next((share(latest[name]) for name in names if name in latest), ""))
        step, update = self._monitor.last_step, values[:-1]
        is_new, self._values = update != self._values, update
        if is_new:
            self.message = self._batch
        else:  # only the weights were queried
            update = [""] * len(update)
        if is_new or step == trainer.max_steps:
            loss = float(trainer.callback_metrics.get("train_loss", math.nan))
            self._print_row([str(step), share(loss), *update, values[-1]])
