"""What a look at the trained weights costs: time of a text over that of training on it, and memory.

    python -m benchmarks.cost.memorization --model DIR             # forwards, memory
    python -m benchmarks.cost.memorization --model DIR --fit 0.5   # an epoch with and without looks
    python -m benchmarks.cost.memorization --read 20000            # the data, read at the start

Training steps and looks at as many rows take turns. The ratio of their processor time is
``FORWARD_SHARE`` of ``lightning_fedleak/looks/pool.py``, which says how many texts a budget pays
for. Memory is the highest resident memory within an evaluation step of the same batch (the loss
of the model itself), and within a look at all rows, over what was resident before; Linux only. A
block is the logits of one forward of a look.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks.cost.overhead import FineTuning
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.batches import read_batch
from lightning_fedleak.callbacks import MonitorSettings
from lightning_fedleak.looks import Memorization
from lightning_fedleak.looks.pool import FORWARD_SHARE, LEAST_POOL, collect
from lightning_fedleak.progress import resident_bytes
from lightning_fedleak.studies import cost
from lightning_fedleak.taps.tokens import LOGITS_OF_FORWARD, TOKENS_AT_ONCE, Text, ask_tokens

SMOKE = (
    "--model {model} --shape 2x12 --looks 2 --rounds 1",
    "--model {model} --shape 8x12 --fit 1 --out {out}",
    "--read 400",
)

Rows = list[dict[str, torch.Tensor]]


def random_rows(n: int, length: int, vocabulary: int) -> Rows:
    """Return rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (n, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def growth(function: Callable[[], object]) -> float:
    """Return the bytes by which resident memory grows at most within a call; NaN but on Linux."""
    cost.trim()
    before = resident_bytes()
    return cost.clock(function)[1] - before


def clock(function: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def time_forwards(options: argparse.Namespace) -> None:
    """Print the time of looks over that of training steps, and the memory of both."""
    batch_size, length = options.shape
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    n = batch_size * options.looks
    ids = torch.stack([row["input_ids"] for row in random_rows(n, length, vocabulary)])
    anatomy, texts = find_anatomy(model), [Text(row, row) for row in ids]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def train() -> None:
        for batch in ids.split(batch_size):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        model(input_ids=ids[:batch_size], labels=ids[:batch_size]).loss.item()
        model.train()

    look = partial(ask_tokens, anatomy, texts)
    model.train()
    pairs = [(clock(train), clock(look)) for _ in range(options.rounds + 1)][1:]
    ratios = sorted(asked / trained for trained, asked in pairs)
    optimizer.zero_grad()
    rises = {"evaluation step": growth(evaluate), "look": growth(look)}
    at_once = min(TOKENS_AT_ONCE, LOGITS_OF_FORWARD // vocabulary)
    block = max(1, at_once // length) * length * vocabulary * 4
    print(
        f"{Path(options.model).name}, rows {batch_size} x {length}: a text costs "
        f"{statistics.median(ratios):.3f} of training on it ({ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"{len(ratios)} rounds; {FORWARD_SHARE} is taken)"
    )
    rise = rises["look"] - rises["evaluation step"]
    sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in rises.items())
    print(
        f"memory above the model: {sizes}; a look takes {rise / 2**20:+.0f} MiB more, "
        f"{rise / block:+.2f} of a block of {block / 2**20:.0f} MiB"
    )


def time_epoch(options: argparse.Namespace) -> None:
    """Print what share of an epoch's time its looks take, beside the budget for them."""
    batch_size, length = options.shape
    budget = options.fit
    n = -int(-LEAST_POOL * FORWARD_SHARE * 3 / budget // batch_size) * batch_size

    def fit(*callbacks: L.Callback) -> float:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        rows = random_rows(n, length, model.config.vocab_size)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=list(callbacks), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
        return clock(lambda: trainer.fit(FineTuning(model), loader))

    settings = MonitorSettings(memorization=Memorization(max_overhead=budget))
    monitor = LeakageMonitor([Combined(), Extraction()], log_dir=options.out, settings=settings)
    watched, alone = fit(monitor), fit()
    print(
        f"{Path(options.model).name}, {n} rows of {length} tokens, one epoch: {alone:.1f} s, with "
        f"{monitor.looks} looks {watched:.1f} s: {watched / alone - 1:.3f} of it, where "
        f"max_overhead is {budget:g}"
    )


def time_reading(options: argparse.Namespace) -> None:
    """Print how long the data are read at the start."""
    rows = random_rows(options.read, 128, 30_000)
    loader = DataLoader(rows, batch_size=8, shuffle=True)
    settings = Memorization(max_overhead=0.1 if options.read >= 2000 else 1.0)
    read = partial(read_batch, kind="causal")
    seconds = clock(lambda: collect(loader, settings, read))
    print(f"{options.read} rows of 128 tokens: {seconds:.1f} s of a core before the first step")


def main() -> None:
    """Read the options, and print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument(
        "--shape",
        type=lambda text: tuple(map(int, text.split("x"))),
        default=(8, 64),
        help="rows of a batch x tokens",
    )
    parser.add_argument("--looks", type=int, default=4, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fit", type=float, help="max_overhead of an epoch with looks")
    parser.add_argument("--read", type=int, help="rows that are read")
    parser.add_argument("--out", default="fedleak_runs/memorization")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"# {platform.machine()}, one thread, {date.today()}")
    if options.read:
        time_reading(options)
    elif options.fit:
        time_epoch(options)
    else:
        time_forwards(options)


if __name__ == "__main__":
    main()
