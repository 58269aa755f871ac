"""The overhead of a step without a look under FSDP2 and ZeRO, against unwatched steps.

python -m benchmarks.cost.sharded --engines fsdp2
.venv-deepspeed/bin/python -m benchmarks.cost.sharded --engines fsdp2 zero1 zero3

Two processes on gloo train one model in a custom loop. Watched and plain blocks of steps alternate.
The first steps of a block are not timed; in a watched block the first of them is a look.
"""

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

from benchmarks.shared import llama, parser_of, print_place, print_row, table
from lightning_fedleak import SubspaceWords
from lightning_fedleak.trainers import Watch

SMOKE = ("--engines fsdp2 --blocks 2 --steps 2 --width 32 --layers 1",)
UNTIMED = 3  # steps at the start of a block: the look, then steps until the allocator is warm
NO_SECOND_LOOK = 10**9  # every_n_steps, more than a block has
VOCABULARY = 2000  # token ids of the model


def prepare(engine: str, options: argparse.Namespace) -> tuple[Any, Any, Callable[[Any], None]]:
    """Return the sharded model and the optimizer for `Watch`, and a function that takes a step."""
    torch.manual_seed(0)
    width = options.width
    model = llama(VOCABULARY, width, options.layers, intermediate_size=3 * width).train()
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

    deepspeed.ops.__compatible_ops__.clear()  # so that DeepSpeed compiles no kernels
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    stage = {"stage": int(engine[-1]), "overlap_comm": False}
    config = {"zero_allow_untested_optimizer": True, "zero_optimization": stage}
    config["train_micro_batch_size_per_gpu"] = options.batch
    sharded, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step_of_engine(batch: Any) -> None:
        sharded.backward(sharded(**batch).loss)
        sharded.step()

    return sharded, wrapped, step_of_engine


def measure(engine: str, options: argparse.Namespace) -> list[str]:
    """Return a row of the table.

    It holds the engine, the medians of plain and watched steps in ms of CPU time, their ratio, and
    the quartiles of plain steps, divided by their median.
    """
    model, optimizer, step = prepare(engine, options)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for block in range(options.blocks):
        is_watched = bool(block % 2)
        with tempfile.TemporaryDirectory() as folder:
            attack = SubspaceWords(capacity_seconds=0)
            arguments = {"folder": folder, "every_n_steps": NO_SECOND_LOOK}
            watch = Watch(model, optimizer, [attack], **arguments) if is_watched else nullcontext()
            with watch as active_watch:
                for i in range(UNTIMED + options.steps):
                    shape = (options.batch, options.length)
                    ids = torch.randint(VOCABULARY, shape, generator=generator)
                    batch = {"input_ids": ids, "labels": ids}
                    torch.distributed.barrier()
                    start = time.process_time()
                    with active_watch.step(batch) if is_watched else nullcontext():
                        step(batch)
                    if i >= UNTIMED:
                        seconds[is_watched].append(time.process_time() - start)
    plain, watched = statistics.median(seconds[False]), statistics.median(seconds[True])
    lower, _, upper = (q / plain for q in statistics.quantiles(seconds[False], n=4))
    medians = [f"{1e3 * plain:.1f}", f"{1e3 * watched:.1f}"]
    return [engine, *medians, f"{watched / plain:.3f}", f"{lower:.3f} to {upper:.3f}"]


def print_rows(options: argparse.Namespace, environment: dict[str, str]) -> None:
    """Measure all engines as one of the two processes, and print a row for each on rank 0."""
    os.environ |= environment
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for engine in options.engines:
        row = measure(engine, options)
        if torch.distributed.get_rank() == 0:
            print_row(*row)


def main() -> None:
    blocks, steps = (12, "blocks of steps; half of them are watched"), (20, "timed, of a block")
    sizes = {"width": 256, "layers": 4, "batch": 4, "length": 64}
    parser = parser_of(__doc__, engines=["fsdp2"], blocks=blocks, steps=steps, **sizes)
    options = parser.parse_args()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    print_place()
    head = "engine", "plain step, ms", "watched", "ratio", "quartiles of plain steps"
    print(table(head, []), flush=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    context = multiprocessing.get_context("fork")  # so that the processes import nothing again
    ranks = [environment | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    processes = [context.Process(target=print_rows, args=(options, rank)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
