"""What it costs to watch a federation: time and memory of a client, and time by the clients.

``share``: rounds of one client, in a plain loop, that a mod without a gate watches at most so often
as ``max_overhead`` lets it: processor time of training, of looks, and of what a round costs that is
not looked at. Calibration is told apart::

    OMP_NUM_THREADS=1 python -m benchmarks.federation.federation_cost share --model DIR --text FILE

``clients``: processor and elapsed time and peak memory of ``fedleak federate`` by the number of
clients, each in a process of its own; its least-squares line, and how far the times are from it::

    OMP_NUM_THREADS=1 python -m benchmarks.federation.federation_cost clients --counts 4 16 64
"""

from __future__ import annotations

import argparse
import copy
import datetime
import io
import itertools
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.federation.rounds import OPTIMIZERS, batches, model_of, optimizer_of, train
from lightning_fedleak.attacks import GradientMembership, PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.cli import main as main_of_fedleak
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.data import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation import (
    OutgoingUpdates,
    RoundObserver,
    RoundSettings,
    trained_state,
)

SMOKE = (
    "share --rounds 2 --steps 1 --rank 4 --rows 2 --length 12 --texts 24 --targets 2 "
    "--attacks membership",
)


class Client:
    """One client of a federation, and who watches it."""

    def __init__(self, args: argparse.Namespace, folder: Path, share: float | None) -> None:
        tokenizer = load_tokenizer(args.model)
        texts = read_texts(args.text or str(EMBEDDED_MESSAGES))[: args.texts]
        rows = [r for t in texts if len(r := tokenizer(t)["input_ids"]) >= 4]
        half = len(rows) // 2
        aside = [torch.tensor(r[: args.length]) for r in rows[half:]]
        outside, reference = aside[: len(aside) // 2], aside[len(aside) // 2 :]
        self.optimizer = optimizer_of(args.optimizer, args.rank)
        self.steps = args.steps
        self.model = model_of(args.model, args.rank).float()
        public: dict[str, Any] = {"public_text": PublicText(reference), "tokenizer": tokenizer}
        chosen: dict[str, Any] = {}
        if args.attacks == "membership":
            public, chosen = {}, {"attacks": [GradientMembership(PublicText(reference))]}
        self.observer = RoundObserver(
            copy.deepcopy(self.model),
            self.optimizer,
            args.steps,
            folder=folder,
            games=Games(targets=args.targets, held_out=PublicText(outside)),
            max_overhead=share,
            settings=RoundSettings(look_seconds=600.0, tensorboard=False, **public),
            **chosen,
        )
        self.out = OutgoingUpdates(self.observer)
        pad = tokenizer.pad_token_id or 0
        generator = torch.Generator().manual_seed(0)
        self.source = batches(rows[:half], args.rows, args.length, pad, generator)

    def round(self) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return what was sent, what is to be returned, and what it was trained on."""
        sent = trained_state(self.model)
        data = list(itertools.islice(self.source, self.steps))
        train(self.model, data, self.optimizer)
        return sent, trained_state(self.model), data


# ---- the share of a round -----------------------------------------------------------------------


def measure_share(args: argparse.Namespace) -> None:
    """Print a line for each look, and what all rounds have cost."""
    with tempfile.TemporaryDirectory() as folder:
        client = Client(args, Path(folder), args.share)
        start = time.process_time()
        client.observer.begin(0, trained_state(client.model))
        print(f"calibration {time.process_time() - start:8.1f} s", flush=True)
        training_seconds, look_seconds, other_seconds = [], [], []
        for round_ in range(args.rounds):
            start, elapsed_start = time.process_time(), time.perf_counter()
            sent, returned, data = client.round()
            end, elapsed = time.process_time(), time.perf_counter() - elapsed_start
            leaving = client.out.leaves(round_, sent, returned, data, seconds=elapsed)
            seconds = time.process_time() - end
            training_seconds.append(end - start)
            (other_seconds if leaving.look is None else look_seconds).append(seconds)
            if leaving.look is not None:
                print(
                    f"round {round_:3d}: training {training_seconds[-1]:7.1f} s, look "
                    f"{seconds:7.1f} s; next look in round {client.observer.next_look[0]}",
                    flush=True,
                )
        due = client.observer.next_look[0]
    training = sum(training_seconds)
    watching = sum(look_seconds) + sum(other_seconds)
    mean_round, mean_look = training / args.rounds, statistics.fmean(look_seconds)
    mean_other = statistics.fmean(other_seconds or [0.0])
    print(
        f"{args.rounds} rounds (the next look is due in round {due}): training {mean_round:.2f} s "
        f"a round, {len(look_seconds)} looks of {mean_look:.2f} s, {mean_other:.3f} s where there "
        f"is none; observer and mod over training {watching / training:.2%}"
    )
    pause = math.ceil(mean_look / max(args.share * mean_round - mean_other, 1e-9))
    share = (mean_look + (pause - 1) * mean_other) / (pause * mean_round)
    print(f"at that cost a look in {pause} rounds is {share:.2%} of training")


# ---- by the number of clients -------------------------------------------------------------------


def _in_a_process(*options: str) -> dict[str, Any]:
    """Return the JSON that this command prints with further options."""
    command = [sys.executable, "-m", "benchmarks.federation.federation_cost", *sys.argv[1:]]
    run = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def measure_clients(args: argparse.Namespace) -> None:
    """Print a line for each number of clients, and the line that fits them best."""
    times = []
    for count in args.counts:
        cost = _in_a_process("--one", str(count))
        times.append((count, cost["processor"]))
        print(
            f"{count:4d} clients: processor {cost['processor']:7.1f} s, elapsed "
            f"{cost['elapsed']:6.0f} s, peak of a process {cost['mebibytes']:6.0f} MiB",
            flush=True,
        )
    if len(times) > 1:
        x = torch.tensor([[1.0, n] for n, _ in times], dtype=torch.float64)
        y = torch.tensor([t for _, t in times], dtype=torch.float64)
        line = torch.linalg.lstsq(x, y).solution
        deviation = float(((x @ line - y) / y).abs().max())
        print(
            f"{float(line[0]):.1f} s + {float(line[1]):.2f} s a client; off by at most "
            f"{deviation:.0%}"
        )


def one_federation(args: argparse.Namespace) -> None:
    """Run one federation, and print what it has cost as JSON."""
    processor, start = processor_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        words = {
            "clients": args.one,
            "rounds": 1,
            "local-steps": args.steps,
            "batch-size": args.rows,
            "length": args.length,
            "members": args.targets,
            "optimizer": args.optimizer,
            "peft": "lora",
            "model": args.model,
            "text": args.text,
            "out": folder,
        }
        main_of_fedleak(["federate", *(f"--{k}={v}" for k, v in words.items() if v is not None)])
    result = {
        "processor": processor_seconds() - processor,
        "elapsed": time.perf_counter() - start,
        "mebibytes": max(usage.ru_maxrss for usage in usages()) / 1024,
    }
    print(json.dumps(result))


def usages() -> list[resource.struct_rusage]:
    """Return what this process has used, and those of its children that have ended."""
    return [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in usages())


def main() -> None:
    """Measure one of the modes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_subparsers(dest="which", required=True)
    share = choice.add_parser("share")
    share.add_argument("--rounds", type=int, default=40)
    share.add_argument("--share", type=float, default=0.05, help="max_overhead")
    clients = choice.add_parser("clients")
    clients.add_argument("--counts", type=int, nargs="+", default=[4, 16, 64])
    clients.add_argument("--one", type=int, help=argparse.SUPPRESS)
    small = {"steps": 2, "rows": 2, "length": 12, "targets": 2, "optimizer": "sgd"}
    usual = {"steps": 10, "rows": 4, "length": 32, "targets": 16, "optimizer": "adamw"}
    for one in (share, clients):
        arguments = small if one is clients else usual
        one.add_argument("--model", help="folder of a causal model; default the embedded one")
        one.add_argument("--text", help="default the embedded messages")
        one.add_argument(
            "--steps", type=int, default=arguments["steps"], help="local steps of a round"
        )
        one.add_argument("--rows", type=int, default=arguments["rows"], help="texts in a batch")
        one.add_argument(
            "--length", type=int, default=arguments["length"], help="tokens of a text, at most"
        )
        one.add_argument(
            "--targets", type=int, default=arguments["targets"], help="members asked for"
        )
        one.add_argument("--optimizer", choices=list(OPTIMIZERS), default=arguments["optimizer"])
        if one is not clients:
            one.add_argument("--rank", type=int, default=8, help="of LoRA; 0: the whole model")
            one.add_argument("--texts", type=int, default=400)
            one.add_argument("--attacks", choices=["auto", "membership"], default="auto")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if getattr(args, "one", None):
        one_federation(args)
        return
    print(
        f"{' '.join(sys.argv[1:])}; {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {datetime.date.today()}"
    )
    {"share": measure_share, "clients": measure_clients}[args.which](args)


if __name__ == "__main__":
    main()
