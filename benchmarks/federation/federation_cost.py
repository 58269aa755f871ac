"""What it costs a client of a federation to be watched, in time.

    OMP_NUM_THREADS=1 python -m benchmarks.federation.federation_cost --model DIR --text FILE

Rounds of one client, in a plain loop, that a mod without a gate watches at most so often as
``max_overhead`` lets it: processor time of training, of looks, and of what a round costs that is
not looked at, with calibration on a line of its own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.federation.rounds import OPTIMIZERS, batches, model_of, optimizer_of, train
from benchmarks.shared import print_place
from lightning_fedleak.attacks import GradientMembership, PublicText
from lightning_fedleak.callbacks import Games
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
    "--rounds 2 --steps 1 --rank 4 --rows 2 --length 12 --texts 24 --targets 2 "
    "--attacks membership",
)


class Client:
    """One client of a federation, and who watches it."""

    def __init__(self, args: argparse.Namespace, folder: Path, share: float | None) -> None:
        tokenizer = load_tokenizer(args.model)
        texts = read_texts(args.text or str(EMBEDDED_MESSAGES))[: args.texts]
        rows = [r for t in texts if len(r := tokenizer(t)["input_ids"]) >= 4]
        half = len(rows) // 2
        held_out = [torch.tensor(r[: args.length]) for r in rows[half:]]
        outside, reference = held_out[: len(held_out) // 2], held_out[len(held_out) // 2 :]
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


def main() -> None:
    """Measure a client."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.05, help="max_overhead")
    parser.add_argument("--model", help="folder of a causal model; default the embedded one")
    parser.add_argument("--text", help="default the embedded messages")
    parser.add_argument("--steps", type=int, default=10, help="local steps of a round")
    parser.add_argument("--rows", type=int, default=4, help="texts in a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text, at most")
    parser.add_argument("--targets", type=int, default=16, help="members asked for")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA; 0: the whole model")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--attacks", choices=["auto", "membership"], default="auto")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print_place(torch.get_num_threads(), " ".join(sys.argv[1:]))
    measure_share(args)


if __name__ == "__main__":
    main()
