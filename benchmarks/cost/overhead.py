"""What `LeakageMonitor()` costs as it is by default: set-up, looks with their controls, whole fits.

    python -m benchmarks.cost.overhead                       # Llama 6 x 384, V = 50,257, 8 x 64
    python -m benchmarks.cost.overhead --model DIR --lora 8 --text imdb
    python -m benchmarks.cost.overhead --size 2 32 --vocabulary 512 --fits 200 2000

Five kinds of steps take turns: ``off`` (the monitor's hooks return at once), ``idle`` (the
monitor is there, the step is not looked at), ``look`` (every attack runs, without a control),
``control`` (a look at which a control is due, and read by the attacks that need it) and ``all``
(the controls of all attacks are read, as at the first look of a run). Medians, and ratios to
``off``, with a bootstrap 95% interval, of elapsed and of processor time; the latter is the one to
read where others use the machine too. The processor time in the monitor's own hooks is printed as
well: its share of a step is known far more closely than a difference of two steps. On a GPU it is
counted how often the host waits for it. Whole fits (``--fits``) are made without and with the
monitor and its default cadence.
"""

import argparse
import statistics
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks import shared
from benchmarks.shared import FineTuning, fit
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.engine import Look, scheduler
from lightning_fedleak.engine.channels.control import Controls

SMOKE = (
    "--model {model} --lora 2 --steps 1 --shape 2x8 --device cpu --out {out}",
    "--size 1 32 --vocabulary 128 --steps 0 --shape 2x8 --fits 3 --device cpu --out {out}",
)

ARMS = ("off", "idle", "look", "control", "all")


class TimedLook(Look):
    """A look that adds up its processor time."""

    @contextmanager
    def clock(self, device, *, is_control=False):
        started = time.process_time()
        with super().clock(device, is_control=is_control):
            yield
        if not is_control:  # which is a part of a look
            InTurn.processor_seconds += time.process_time() - started


scheduler.Look = TimedLook  # the looks of steps begin there
IS_DUE = Controls._is_due  # as it is in a run


class InTurn(LeakageMonitor):
    """A monitor whose steps are off, idle and looked at in turn."""

    processor_seconds = 0.0

    def __init__(self, arms: tuple[str, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arms = arms
        self.hooks = 0.0
        self.has_control = False

    def is_due(self, look: Look, plan: Any, controls: Controls) -> bool:
        """Return whether an attack reads the control of a look."""
        due = self.now == "all" or (self.now == "control" and IS_DUE(controls, look, plan))
        self.has_control |= due
        return due

    def arm(self, trainer: L.Trainer) -> str:
        return self.arms[trainer.global_step % len(self.arms)]

    @contextmanager
    def owned(self):
        """Adds the processor time of a hook to what the monitor uses beside its looks."""
        started = time.process_time() - self.processor_seconds
        yield
        self.hooks += time.process_time() - self.processor_seconds - started

    @property
    def own(self) -> float:
        """Processor seconds that the monitor itself has used."""
        return self.hooks + self.processor_seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now, self.has_control = self.arm(trainer), False
        self.engine.options.cadence.next_step = trainer.global_step + (self.now in ("off", "idle"))
        if self.now != "off":
            with self.owned():
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer, *args):
        if self.now != "off":
            with self.owned():
                super().on_train_batch_end(trainer, *args)


class Clock(L.Callback):
    """Times whole steps by arm; stands first, so that it sees the monitor's hooks too."""

    def __init__(self, monitor: InTurn, device: torch.device, warmup: int) -> None:
        self.monitor, self.device, self.warmup = monitor, device, warmup
        self.times: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in monitor.arms}
        self.started: tuple[str, float, float, float] | None = None

    def on_train_batch_start(self, trainer, *args):
        self.lap(trainer)

    def on_train_end(self, trainer, *args):
        self.lap(trainer)

    def lap(self, trainer: L.Trainer) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = (time.perf_counter(), time.process_time(), self.monitor.own)
        if self.started is not None and trainer.global_step > self.warmup:
            arm, *later = self.started
            if arm == "control" and not self.monitor.has_control:  # none was due
                arm = "look"
            self.times[arm].append(tuple(a - b for a, b in zip(now, later, strict=True)))
        self.started = (self.monitor.arm(trainer), *now)


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    if arguments.model:
        model = shared.float_model(arguments.model)
    else:
        layers, width = arguments.size
        model = shared.llama(arguments.vocabulary, width, layers, heads=max(1, width // 64))
    lora = arguments.lora
    return shared.with_lora(model, lora, ["q_proj", "v_proj"]) if lora else model


def model_name(arguments: argparse.Namespace) -> str:
    random = "Llama {} x {}, V = {:,}".format(*arguments.size, arguments.vocabulary)
    lora = f", LoRA r {arguments.lora}" if arguments.lora else ""
    return f"{arguments.model or random}{lora}"


def token_rows(arguments: argparse.Namespace, n: int, length: int, vocab: int) -> torch.Tensor:
    """Return (n, length) tokens of texts that are long enough, or random ones without --text."""
    if not arguments.text:
        generator = torch.Generator().manual_seed(2)
        return torch.randint(0, vocab, (n, length), generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = shared.read_texts(arguments.text)
    texts = shared.tokens_of(texts, tokenizer, tokenizer.bos_token_id, 2, 10 * n)
    return torch.stack([ids[:length] for ids in texts.sentences if len(ids) >= length][:n])


def run(arguments: argparse.Namespace, callbacks: list[L.Callback], steps: int) -> L.Trainer:
    model = build(arguments)
    b, length = (int(x) for x in arguments.shape.split("x"))
    ids = token_rows(arguments, b * 8, length, model.config.vocab_size)
    rows = [{"input_ids": x, "labels": x} for x in ids]
    return fit(
        FineTuning(model), DataLoader(rows, batch_size=b), accelerator=arguments.device,
        max_steps=steps, callbacks=callbacks, precision=arguments.precision,
        default_root_dir=arguments.out,
    )  # fmt: skip


def interval(looked: list[float], plain: list[float]) -> tuple[float, float]:
    """Bootstrap 95% interval of the ratio of medians."""
    draw = np.random.default_rng(3).choice
    a, b = (np.median(draw(x, (2000, len(x))), 1) for x in (looked, plain))
    low, high = np.quantile(a / b, [0.025, 0.975])
    return low, high


@contextmanager
def in_turn(monitor: InTurn):
    """A context in which the kind of a step decides which controls are due."""
    with patch.object(
        Controls, "_is_due", lambda controls, look, plan: monitor.is_due(look, plan, controls)
    ):
        yield


def count_waits(arguments: argparse.Namespace, rounds: int = 4) -> None:
    """Print how often the host waits for the GPU in a step of each kind, as CUDA reports it."""
    monitor, waits = InTurn(ARMS), Counter()

    def count(message, *_):
        if "synchronizing CUDA operation" in str(message):
            waits[getattr(monitor, "now", "set-up")] += 1

    with warnings.catch_warnings(), in_turn(monitor):
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        run(arguments, [monitor], rounds * len(ARMS))
        torch.cuda.set_sync_debug_mode("default")
    for arm in ARMS:
        print(f"a step of kind {arm} waits {waits[arm] / rounds:.1f} times for the GPU")


def timed(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    """Elapsed seconds, processor seconds and the monitor's own of every step, by arm."""
    monitor = InTurn(ARMS)
    clock = Clock(monitor, torch.device(arguments.device), warmup=2 * len(ARMS))
    with in_turn(monitor):
        run(arguments, [clock, monitor], len(ARMS) * (arguments.steps + 2) + 1)
    return clock.times


def time_steps(arguments: argparse.Namespace) -> None:
    results = {arm: rows for arm, rows in timed(arguments).items() if rows}
    head = "time", "step", "n", "median (s)", "ratio to off", "95% interval"
    print(shared.table(head, []))
    # On a GPU the processor's time counts threads that spin while they wait.
    clocks = ("elapsed",) if arguments.device == "cuda" else ("elapsed", "processor")
    for column, name in enumerate(clocks):
        times = {arm: [row[column] for row in rows] for arm, rows in results.items()}
        medians = {arm: statistics.median(seconds) for arm, seconds in times.items()}
        plain = medians["off"]
        for arm, seconds in times.items():
            low, high = interval(seconds, times["off"])
            ratio = f"{medians[arm] / plain:.4f} | {low:.4f} to {high:.4f}"
            shared.print_row(name, arm, str(len(seconds)), f"{medians[arm]:.4f}", ratio)
        average = (medians["look"] + 49 * medians["idle"]) / 50 / plain
        print(f"| {name} | one look in 50 steps | | | {average:.4f} | |")
        for arm in ("control", "all"):
            if arm in medians:
                more = (medians[arm] - medians["look"]) / plain
                print(f"| {name} | {arm}, in plain steps more than a look | | | {more:.4f} | |")
    if "processor" not in clocks:
        return
    print("\nProcessor time in the monitor's own hooks (median), and the plain step with it:")
    for arm in [arm for arm in ("idle", "all", "control", "look") if arm in results]:
        own = statistics.median(row[2] for row in results[arm])
        print(f"{arm} {own * 1e3:.2f} ms, {1 + own / plain:.4f}")
    print(f"one look in 50 steps {1 + own / 50 / plain:.4f}")


class SetUp(L.Callback):
    """Notes the processor time of the first batch; stands first among the callbacks."""

    seconds: float | None = None

    def on_train_batch_start(self, trainer, *args):
        self.seconds = self.seconds or time.process_time()


def time_fit(arguments: argparse.Namespace, monitors: list[L.Callback], steps: int):
    """Processor seconds until the first batch, and of a whole fit."""
    begun, set_up = time.process_time(), SetUp()
    run(arguments, [set_up, *monitors], steps)
    return set_up.seconds - begun, time.process_time() - begun


def time_fits(arguments: argparse.Namespace) -> None:
    """Print set-up, looks and processor time of fits without and with the monitor."""
    head = "steps", "plain fit (s)", "with the monitor (s)", "ratio", "set-up (s)", "looks"
    print(shared.table(head, []))
    for steps in arguments.fits:
        plain_set_up, plain = time_fit(arguments, [], steps)
        monitor = LeakageMonitor()
        set_up, watched = time_fit(arguments, [monitor], steps)
        cells = f"{watched / plain:.2f}", f"{set_up - plain_set_up:.1f}", f"{monitor.looks}"
        shared.print_row(f"{steps:,}", f"{plain:.1f}", f"{watched:.1f}", *cells)


def parser() -> argparse.ArgumentParser:
    return shared.parser_of(
        __doc__, model=(str, "folder or hub id of a causal LM"), shape="8x64", precision="32-true",
        size=([6, 384], "blocks and width of a random Llama"),
        vocabulary=(50_257, "of the random Llama"), steps=(40, "steps of each kind; 0: none"),
        lora=(0, "rank of a LoRA on q and v"), fits=([int], "steps of whole fits"),
        text=(str, "texts for --model, named or a file; random tokens without it"),
        device="cuda" if torch.cuda.is_available() else "cpu", out="fedleak_runs/overhead",
    )  # fmt: skip


def main() -> None:
    arguments = parser().parse_args()
    shared.quieten()
    about = model_name(arguments), f"batch {arguments.shape}", arguments.precision
    shared.print_place(f"torch {torch.__version__}", *about)
    if arguments.steps:
        time_steps(arguments)
        if arguments.device == "cuda":
            count_waits(arguments)
    if arguments.fits:
        time_fits(arguments)


if __name__ == "__main__":
    main()
