"""What the final model alone gives away of a federation, to somebody who saw no update.

The federation is that of ``federation_table``, with a round of one step before those that count.
But a coin says which texts clients hold: the file's first texts differ from its last. The model is
asked after so many rounds, beside the model of the beginning, about texts that some client has
trained on and about texts of nobody::

    OMP_NUM_THREADS=1 python -m benchmarks.federation.final_model --model DIR --text FILE --bos 1 \
        --log FILE
    python -m benchmarks.federation.final_model --log FILE --show

Membership: AUC of ``Combined`` with its 95% interval, and the TPR at 1% FPR that is *shown* (an
exact lower bound). Extraction: the share of texts of which 16 tokens follow from the 16 before in
one of so many samples as ``Extraction`` draws, beyond that of others. A cell has one value for each
seed in the log, and an interval around all of theirs. *Unknown* is shown of fewer others than a
bound needs. Cells that the log holds are not run again. A rank of 0 is the whole model.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import math
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.federation.federation_table import clients_of, mean_of
from benchmarks.federation.rounds import OPTIMIZERS, model_of, optimizer_of, rate_of, train
from benchmarks.shared import add_line, read_lines, table
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.cli.studies.memorization import ReleasedPool
from lightning_fedleak.federation import difference, moved, trained_state
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps.tokens import Text, ask_tokens

SMOKE = (
    "--log {out}/final.jsonl --optimizers sgd --steps 1 --ranks 4 --clients 2 --rounds 8 --rows 2 "
    "--length 16 --texts 80 --asked 40",
)
ATTACKS = Combined(), Extraction()


def asked_pool(args: argparse.Namespace) -> tuple[ReleasedPool, TokenSnapshot]:
    """Return texts that clients hold and texts of nobody, and what the first model says of them."""
    tokenizer, rows, half, _ = clients_of(args, by_coin=True)
    sides = [
        [Text(ids, ids) for row in side[: args.asked] for ids in [torch.tensor(row[: args.length])]]
        for side in (rows[:half], rows[half:])
    ]
    pool = ReleasedPool(*sides, lambda ids: str(tokenizer.decode(ids)))
    return pool, ask_tokens(find_anatomy(model_of(args.model, 0)), pool.texts)


def part_of(pool: ReleasedPool, rows: Tensor) -> ReleasedPool:
    """Return some texts of a pool."""
    part = copy.copy(pool)
    part.texts = [pool.texts[row] for row in rows.tolist()]
    part.members, part.times = pool.members[rows], pool.times[rows]
    part.compressed = pool.compressed[rows]
    return part


def cell(
    args: argparse.Namespace,
    pool: ReleasedPool,
    base: TokenSnapshot,
    optimizer: str,
    steps: int,
    rank: int,
) -> list[dict[str, Any]]:
    """Return what was found after each of ``--rounds``, and the losses."""
    sources = clients_of(args, by_coin=True)[3]
    make = optimizer_of(optimizer, rank)
    model = model_of(args.model, rank)
    trained: set[tuple[int, ...]] = set()
    lines = []
    for round_ in range(max(args.rounds) + 1):
        sent, updates, losses = trained_state(model), [], []
        for source in sources:
            model.load_state_dict(sent, strict=False)
            sample = list(itertools.islice(source, steps if round_ else 1))
            losses.append(train(model, sample, make))
            updates.append(difference(sent, trained_state(model)))
            for batch in sample:
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    trained.add(tuple(ids[mask > 0].tolist()))
        model.load_state_dict(moved(sent, mean_of(updates)), strict=False)
        if round_ in args.rounds:
            observed = torch.tensor([tuple(text.ids.tolist()) in trained for text in pool.texts])
            rows = (observed | ~pool.members).nonzero()[:, 0]
            part = part_of(pool, rows)
            now = ask_tokens(find_anatomy(model), part.texts)
            result = part.compare(base.rows(rows), now, ATTACKS)
            values = {n: v for one in result.values.values() for n, v in one.items()}
            lines.append(
                {"rounds": round_, "trained": len(trained)}
                | {"loss": round(sum(losses) / len(losses), 3)}
                | {"members": result.n_members, "others": result.n_others}
                | {"one_law": result.one_law, "visible": round(result.visible, 3)}
                | {n: None if math.isnan(v) else round(v, 4) for n, v in values.items()}
            )
    return lines


def rate_table(lines: list[dict[str, Any]], metric: str) -> str:
    """Return a row for each optimizer, number of steps and of rounds; columns by rank."""
    ranks = sorted({line["rank"] for line in lines}, key=lambda rank: (rank == 0, rank))
    names = [f"LoRA {rank}, {metric}" if rank else f"whole, {metric}" for rank in ranks]
    runs: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        key = line["optimizer"], line["steps"], line["rounds"], line["rank"]
        runs.setdefault(key, []).append(line)
    cells = {key: _cell(cell_runs, metric) for key, cell_runs in runs.items()}
    keys = dict.fromkeys(key[:3] for key in cells)
    order = sorted(keys, key=lambda key: (list(OPTIMIZERS).index(key[0]), *key[1:]))
    rows = [
        [", ".join(map(str, key)), *(cells.get((*key, rank), "not run") for rank in ranks)]
        for key in order
    ]
    return table(["optimizer, local steps, rounds", *names], rows)


def _cell(runs: list[dict[str, Any]], metric: str) -> str:
    """Return the value of each seed, and the interval around all of theirs."""
    digits = 3 if metric == "shown" else 2
    values = ["unknown" if run[metric] is None else f"{run[metric]:.{digits}f}" for run in runs]
    if metric == "shown" or "unknown" in values:
        return ", ".join(values)
    low, high = (
        min(run[f"{metric}_low"] for run in runs),
        max(run[f"{metric}_high"] for run in runs),
    )
    return f"{', '.join(values)} ({low:.2f} to {high:.2f})"


def facts(lines: list[dict[str, Any]]) -> list[str]:
    """Return settings that a table's caption gives."""
    names = ("clients", "shape", "members", "others", "visible", "one_law", "seed", "date")
    output = [f"{n}: {', '.join(dict.fromkeys(str(line[n]) for line in lines))}" for n in names]
    return [*output, f"processor: {sum(line['seconds'] for line in lines) / 60:.0f} min"]


def main() -> None:
    """Run what the log lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal model; default the embedded one")
    parser.add_argument("--text", help="default the embedded messages")
    parser.add_argument("--bos", type=int, help="token id before every text")
    parser.add_argument("--log", type=Path, required=True, help="results, one JSON object a line")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=[*OPTIMIZERS])
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="texts in a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text, at most")
    parser.add_argument("--rounds", nargs="+", type=int, default=[3], help="besides the first")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--asked", type=int, default=600, help="texts of each side, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = read_lines(args.log)
    pool: tuple[ReleasedPool, TokenSnapshot] | None = None
    named = {"model": Path(args.model or "embedded").name, "clients": args.clients}
    named |= {"seed": args.seed}
    grid = itertools.product(args.optimizers, sorted(args.steps), args.ranks)
    for optimizer, steps, rank in () if args.show else grid:
        key = {"optimizer": optimizer, "steps": steps, "rank": rank} | named
        finished = {line["rounds"] for line in lines if key.items() <= line.items()}
        if finished.issuperset(args.rounds):
            continue
        start = time.process_time()
        if pool is None:
            pool = asked_pool(args)
        results = cell(args, *pool, optimizer, steps, rank)
        common = {"seconds": round((time.process_time() - start) / len(results), 1)}
        common |= {"rate": rate_of(optimizer, rank), "shape": f"{args.rows} x {args.length}"}
        common |= {"date": str(datetime.date.today()), "machine": platform.machine()}
        new = [key | result | common for result in results]
        lines += new
        add_line(args.log, *new)
    for metric in ("auc", "shown", "extracted"):
        print(rate_table(lines, metric) + "\n")
    print("\n".join(facts(lines)))


if __name__ == "__main__":
    main()
