"""What a step without a look costs more under FSDP2 and ZeRO: watched and plain steps in turns.

python -m benchmarks.cost.sharded --engines fsdp2
.venv-deepspeed/bin/python -m benchmarks.cost.sharded --engines fsdp2 zero1 zero3

Two processes on gloo train one model by a loop of their own. Blocks of steps are watched and plain
in turns; the first steps of a block, of which a watched one looks at one, do not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared import print_place
from lightning_fedleak import SubspaceWords
from lightning_fedleak.trainers import Watch

SMOKE = ("--engines fsdp2 --blocks 2 --steps 2 --width 32 --layers 1",)
UNTIMED = 3  # steps of a block: a look, and what the allocator learns behind it
NEVER = 10**9  # steps between two looks


def model_of(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 3 * options.width}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000, num_hidden_layers=options.layers, num_attention_heads=4, **sizes
        )
    ).train()


def trained(engine: str, options: argparse.Namespace) -> tuple[Any, Any, Callable[[Any], None]]:
    """Return what a watch is given, and a function that takes a step."""
    model = model_of(options)
    if engine == "fsdp2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step(batch: Any) -> None:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(engine[-1]), "overlap_comm": False},
    }
    sharded, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step_of_engine(batch: Any) -> None:
        sharded.backward(sharded(**batch).loss)
        sharded.step()

    return sharded, wrapped, step_of_engine


def measure(engine: str, options: argparse.Namespace) -> list[str]:
    """Return medians of a plain and a watched step, and their ratio."""
    model, optimizer, step = trained(engine, options)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.blocks):
        is_watched = bool(number % 2)
        with tempfile.TemporaryDirectory() as folder:
            attack = SubspaceWords(capacity_seconds=0)
            arguments = {"folder": folder, "every_n_steps": NEVER}
            watch = Watch(model, optimizer, [attack], **arguments) if is_watched else nullcontext()
            with watch as watching:
                for count in range(UNTIMED + options.steps):
                    shape = (options.batch, options.length)
                    ids = torch.randint(2000, shape, generator=generator)
                    batch = {"input_ids": ids, "labels": ids}
                    torch.distributed.barrier()
                    start = time.process_time()
                    with watching.step(batch) if is_watched else nullcontext():
                        step(batch)
                    if count >= UNTIMED:
                        seconds[is_watched].append(time.process_time() - start)
    plain, watched = (statistics.median(seconds[one]) for one in (False, True))
    ends = [f"{1e3 * one:.1f}" for one in (plain, watched)]
    spread = statistics.quantiles(seconds[False], n=4)
    spread_in_words = f"{spread[0] / plain:.3f} to {spread[2] / plain:.3f}"
    return [engine, *ends, f"{watched / plain:.3f}", spread_in_words]


def print_rows(options: argparse.Namespace, place: dict[str, str]) -> None:
    """Measure as one of both processes; the first prints."""
    os.environ |= place
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for engine in options.engines:
        row = measure(engine, options)
        if torch.distributed.get_rank() == 0:
            print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["fsdp2"])
    parser.add_argument("--blocks", type=int, default=12, help="of steps, half of them watched")
    parser.add_argument("--steps", type=int, default=20, help="of a block, that count")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    print_place()
    print("| engine | plain step, ms | watched | ratio | quartiles of plain steps |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    place |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    context = multiprocessing.get_context("fork")  # what is imported is so already
    ranks = [
        context.Process(target=print_rows, args=(options, place | {"RANK": r, "LOCAL_RANK": r}))
        for r in "01"
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
