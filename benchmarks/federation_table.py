"""When does federation alone protect? Every optimizer, number of local steps, rank, and sum.

A cell is a federation of clients that train a causal model for a round of local steps. The update
of one of them and the mean of all are attacked by every attack that chooses itself. Shown are
medians over rounds of the F1 of words and the AUC of membership; the first round, in which a LoRA's
B is zero, calibrates and is left out::

    OMP_NUM_THREADS=1 python benchmarks/federation_table.py --model DIR --text FILE --log FILE
    python benchmarks/federation_table.py --log FILE --show

Cells that the log holds are not run again; ``--optimizers``, ``--steps``, ``--ranks`` and
``--clients`` choose. A rank of 0 is the whole model.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from federation import OPTIMIZERS, batches, model_of, train

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.federation import SUM, RoundObserver, difference, moved, trained_state
from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.finetuning.data import load_tokenizer
from lightning_fedleak.finetuning.texts import read_texts

SMOKE = (
    "--log {out}/table.jsonl --optimizers sgd --steps 1 --ranks 4 --clients 2 --rounds 1 --rows 2 "
    "--length 12 --texts 24 --targets 2",
)
ROWS = ("one client", "sum")


def cell(args: argparse.Namespace, optimizer: str, steps: int, rank: int, clients: int) -> dict:
    """Medians of one federation: of each client's update, and of the mean of all."""
    tokenizer = load_tokenizer(args.model)
    bos = [] if args.bos is None else [args.bos]
    texts = read_texts(args.text or str(EMBEDDED_MESSAGES))[: args.texts]
    rows = [bos + r for t in texts if len(r := tokenizer(t)["input_ids"]) >= 4]
    half = len(rows) // 2
    aside = [torch.tensor(r[: args.length]) for r in rows[half:]]
    outside, known = aside[: len(aside) // 2], aside[len(aside) // 2 :]
    make = OPTIMIZERS[optimizer]
    model = model_of(args.model, rank)
    pad = tokenizer.pad_token_id or 0
    sources = [
        batches(
            rows[client:half:clients], args.rows, args.length, pad,
            torch.Generator().manual_seed(args.seed + client),
        )
        for client in range(clients)
    ]  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {row: {} for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        observer = RoundObserver(
            copy.deepcopy(model),
            make,
            steps,
            folder=folder,
            public_text=PublicText(known),
            tokenizer=tokenizer,
            games=Games(targets=args.targets, held_out=PublicText(outside)),
            look_seconds=math.inf,
            tensorboard=False,
        )
        for round_ in range(args.rounds + 1):
            sent = trained_state(model)
            observer.begin(round_, sent)
            total = {n: torch.zeros_like(t) for n, t in sent.items()}
            everything: list[Any] = []
            for client, source in enumerate(sources):
                model.load_state_dict(sent, strict=False)
                data = list(itertools.islice(source, steps))
                train(model, data, make)
                returned = trained_state(model)
                if client == 0:
                    note(found["one client"], observer.look(returned, 0, batches=data), round_)
                for name, tensor in difference(sent, returned).items():
                    total[name] += tensor / clients
                everything += data
            mean = moved(sent, total)
            if clients > 1:
                note(found["sum"], observer.look(mean, SUM, batches=everything), round_)
            model.load_state_dict(mean, strict=False)
        observer.end()
    return {row: {name: median(v) for name, v in by.items()} for row, by in found.items() if by}


def note(found: dict[str, list[float]], look: Any, round_: int) -> None:
    """Keeps the highest of each family in a round."""
    if round_ == 0:
        return
    families: dict[str, list[float]] = {"words": [], "membership": []}
    for name, value in look.now.items():
        root, _, metric = name.rpartition("/")
        membership = f"{root}/auc" in look.now
        if metric == ("auc" if membership else "f1") and "/worst/" not in name:
            families["membership" if membership else "words"].append(value)
    for family, values in families.items():
        known = [v for v in values if not math.isnan(v)]
        found.setdefault(family, []).append(max(known) if known else math.nan)


def median(values: Sequence[float]) -> float | None:
    """Of what is known; None where all is unknown."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else None


def shown(lines: Sequence[dict]) -> str:
    """The table: a line for each optimizer and number of steps, a column for each rank and row."""
    ranks = sorted({line["rank"] for line in lines}, key=lambda r: (r == 0, r))
    columns = [(rank, row) for rank in ranks for row in ROWS]
    names = [f"{'whole' if rank == 0 else f'LoRA {rank}'}, {row}" for rank, row in columns]
    out = [f"| optimizer, local steps | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for optimizer in OPTIMIZERS:
        for steps in sorted({line["steps"] for line in lines}):
            own = [x for x in lines if (x["optimizer"], x["steps"]) == (optimizer, steps)]
            cells = []
            for rank, row in columns:
                of = [x["found"][row] for x in own if x["rank"] == rank and row in x["found"]]
                cells.append(_cell(of[-1]) if of else "not run")
            out.append(f"| {optimizer}, {steps} | {' | '.join(cells)} |")
    return "\n".join(out)


def _cell(found: dict) -> str:
    return ", ".join("unknown" if v is None else f"{v:.2f}" for v in found.values())


def main() -> None:
    """Runs what the log lacks, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal model; default the embedded one")
    parser.add_argument("--text", help="default the embedded messages")
    parser.add_argument("--bos", type=int, help="token id before every text")
    parser.add_argument("--log", type=Path, required=True, help="results, one JSON object a line")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=[*OPTIMIZERS])
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 0])
    parser.add_argument("--clients", type=int, default=10, help="of the sum; 1: no sum")
    parser.add_argument("--rows", type=int, default=4, help="texts in a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text, at most")
    parser.add_argument("--rounds", type=int, default=3, help="besides the first")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--targets", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = []
    if args.log.exists():
        lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    grid = itertools.product(args.optimizers, sorted(args.steps), args.ranks)
    for optimizer, steps, rank in () if args.show else grid:
        key = {"optimizer": optimizer, "steps": steps, "rank": rank, "clients": args.clients}
        if any(key.items() <= line.items() for line in lines):
            continue
        began = time.process_time()
        found = cell(args, optimizer, steps, rank, args.clients)
        lines.append(
            key
            | {"found": found, "seconds": round(time.process_time() - began, 1)}
            | {"model": Path(args.model or "embedded").name, "rounds": args.rounds}
            | {"shape": f"{args.rows} x {args.length}", "targets": args.targets}
            | {"date": str(datetime.date.today()), "machine": platform.machine()}
        )
        with args.log.open("a") as log:
            log.write(json.dumps(lines[-1]) + "\n")
    print("words F1, membership AUC; medians over rounds")
    print(shown(lines))


if __name__ == "__main__":
    main()
