"""A step of DPSGD under transformers' Trainer against the plain Trainer's and Opacus' hooks.

    python -m benchmarks.cost.dp_trainer --model DIR          # stories15M, LoRA r 8, 8 x 64 tokens

All three train in one process, each step in turn: both Trainers from ``on_step_begin`` to
``on_step_end``, Opacus in a bare loop. Processor time of a step, one thread, SGD. DPSGD draws 8
rows in the mean; ratios are of the sums over all steps per expected row, and medians over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import statistics
import tempfile
import threading
import time
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.trainers import defended

SMOKE = "--model {model} --rounds 2 --batch 2 8"


class Turn(TrainerCallback):
    """Times the steps of one arm, while the others wait."""

    def __init__(self, name: str, locks: dict[str, threading.Semaphore]) -> None:
        self._mine, names = locks[name], list(locks)
        self._next = locks[names[(names.index(name) + 1) % len(names)]]
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._mine.acquire()
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.process_time() - self._start)
        self._next.release()


def adapted(path: str) -> nn.Module:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()


def by_trainer(kind: Any, model: nn.Module, rows: Any, size: int, turn: Turn, **more: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"optim": "sgd", "report_to": [], "save_strategy": "no"}
        settings |= {"use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=size, num_train_epochs=1, **settings
        )
        kind(model, arguments, train_dataset=rows, callbacks=[turn], **more).train()


def by_opacus(model: nn.Module, rows: Any, size: int, turn: Turn) -> None:
    from opacus import PrivacyEngine

    trained = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=1e-3),
        data_loader=DataLoader(rows, batch_size=size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for batch in DataLoader(rows, batch_size=size):
        positions = torch.arange(batch["input_ids"].shape[1]).repeat(size, 1)
        turn.on_step_begin()
        private(**batch, position_ids=positions).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        turn.on_step_end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, nargs=2, default=(8, 64), metavar=("B", "T"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    size, length = options.batch
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (options.rounds * size, length), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    locks = {name: threading.Semaphore(0) for name in ("plain", "ours", "hooks")}
    turns = {name: Turn(name, locks) for name in locks}
    dp = {"defenses": [DPSGD(1.0, 1.0)]}
    models = [adapted(options.model) for _ in locks]  # transformers loads in one thread alone
    common = rows, size
    threads = [
        threading.Thread(target=by_trainer, args=(Trainer, models[0], *common, turns["plain"])),
        threading.Thread(
            target=by_trainer,
            args=(defended(Trainer), models[1], *common, turns["ours"]),
            kwargs=dp,
        ),
        threading.Thread(target=by_opacus, args=(models[2], *common, turns["hooks"])),
    ]
    for thread in threads:
        thread.start()
    locks["plain"].release()
    for thread in threads:
        thread.join()
    times = {name: turn.times[1:] for name, turn in turns.items()}  # the first holds the checks
    print(f"2 shared CPU cores, one thread, {datetime.date.today()}; B x T {size} x {length}")
    for name, own in times.items():
        pairs = [a / b for a, b in zip(times["ours"], own, strict=True)]
        total = sum(times["ours"]) / sum(own)
        print(
            f"{name:>6} {statistics.median(own):.3f} s ({min(own):.3f} to {max(own):.3f}), ours "
            f"over it {total:.3f} in the mean, {statistics.median(pairs):.3f} in the median"
        )


if __name__ == "__main__":
    main()
