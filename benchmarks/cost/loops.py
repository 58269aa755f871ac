"""What a step without a look costs in other loops, above a callback that does nothing.

    python -m benchmarks.cost.loops                      # 400 steps, five times each, in turn
    python -m benchmarks.cost.loops --model DIR          # any causal LM

Runs with and without the watch take turns. A step is the processor time from one batch to the next;
its median over a run is compared with that of the run beside it. The processor time in the watch's
own functions is printed as well: it is known more closely than a difference of two steps. One look
is made, at step 0, and is not counted.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.trainers import LeakageCallback, Watch

SMOKE = ("--steps 4 --runs 1",)

NEVER = 10**9  # steps between looks: none after the first
SKIPPED = 2  # steps of each run that are not counted: the look, and the one after it


class Clock(TrainerCallback):
    """Notes the processor time at the begin of each step; does nothing else."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.own: Own | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time())
        if self.own is not None:
            self.own.step_begins()

    @property
    def medians(self) -> tuple[float, float]:
        """The median of a step, and of the watch's own part of it, in ms."""
        return median_step(self.times), 0.0 if self.own is None else self.own.median


class Own:
    """Adds up the time of this thread in functions of a watch, step by step."""

    def __init__(self, watch: Watch, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        self.sums: list[float] = []
        for name in names:
            setattr(watch, name, self.timed(getattr(watch, name)))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments, **settings)
            finally:
                self.seconds += time.thread_time() - started

        return call

    def step_begins(self) -> None:
        self.sums.append(self.seconds)

    @property
    def median(self) -> float:
        return median_step(self.sums)


def median_step(times: list[float]) -> float:
    """Return the median of the steps in ms."""
    steps = [later - earlier for earlier, later in pairwise(times)]
    return 1e3 * statistics.median(steps[min(SKIPPED, len(steps) - 1) :])


def model_of(path: str | None) -> Any:
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2))


def trained(path: str | None, steps: int, watched: bool, folder: Path) -> tuple[float, float]:
    """Return the medians of transformers' Trainer."""
    clock = Clock()
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, 500, (2 * steps, 16))]
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, report_to=[],
        save_strategy="no", logging_steps=NEVER, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model_of(path), arguments, train_dataset=rows, callbacks=[clock])
    callback = LeakageCallback(trainer, [FlatChat(n_types=20)], every_n_steps=NEVER)
    trainer.add_callback(callback if watched else TrainerCallback())
    if watched:
        names = ("batch_begins", "_backward_begins", "before_step", "batch_ends")
        clock.own = Own(callback.watch, names)
    trainer.train()
    return clock.medians


def looped(path: str | None, steps: int, watched: bool, folder: Path) -> tuple[float, float]:
    """Return the medians of a plain loop."""
    model, clock = model_of(path).train(), Clock()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    watch = Watch(model, optimizer, [FlatChat(n_types=20)], folder=folder, every_n_steps=NEVER)

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = torch.randint(0, 500, (steps, 2, 16))
    if not watched:
        for ids in rows:
            clock.on_step_begin()
            step(ids)
        return clock.medians
    names = ("batch_begins", "_backward_begins", "optimizer_steps", "batch_ends")
    clock.own = Own(watch, names)
    with watch:
        for ids in rows:
            clock.on_step_begin()
            with watch.step({"input_ids": ids, "labels": ids}):
                step(ids)
    return clock.medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal LM; default a GPT-2 of two blocks")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, one thread, torch {torch.__version__}, {options.steps} steps")
    for name, run in (("LeakageCallback", trained), ("Watch", looped)):
        pairs = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                off, on = (
                    run(options.model, options.steps, watched, Path(folder))
                    for watched in (False, True)
                )
            pairs.append((off[0], on[0] - off[0], on[1]))
        plain, more, own = (sorted(values) for values in zip(*pairs, strict=True))
        above = f"{statistics.median(more):+.3f} ms ({more[0]:+.3f} to {more[-1]:+.3f})"
        print(
            f"{name}: a step without takes {statistics.median(plain):.3f} ms; with it {above}; in "
            f"its own functions {statistics.median(own):.3f} ms ({own[0]:.3f} to {own[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
