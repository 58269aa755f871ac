"""What client-level privacy costs in loss: federations of many clients.

    OMP_NUM_THREADS=1 python -m benchmarks.federation.client_dp --model DIR --text FILE --log FILE
    python -m benchmarks.federation.client_dp --log benchmarks/federation/client_dp.jsonl --show

Each cell is a federation as ``fedleak federate --attack none --peft lora`` trains it, without
attacks. ``--per-round`` clients are drawn by independent coins. *Without* has the same draws and
clips, and next to no noise. Losses are of texts that no client has.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.shared import add_line, read_lines, table
from lightning_fedleak.cli.studies.federation import Federation, train_in_process

SMOKE = (
    "--model {model} --text {text} --log {out}/cells.jsonl --clients 8 --per-round 4 --rounds 2 "
    "--local-steps 1 --rank 2 --clips 1 --epsilon 50",
)
NEXT_TO_NONE = 1e-9  # noise multiplier of the runs without privacy


def losses(args: argparse.Namespace, key: dict[str, Any]) -> tuple[list[float], float]:
    """Return the validation loss before and after each round, and the noise."""
    federation = Federation(
        clients=key["clients"],
        rounds=args.rounds,
        local_steps=args.local_steps,
        model=args.model,
        text=args.text,
        peft="lora",
        lora_r=args.rank,
        optimizer="adamw",
        lr=args.lr,
        attack="none",
        epsilon=key["epsilon"],
        noise_multiplier=None if key["epsilon"] else NEXT_TO_NONE,
        clip=float(key["clip"]),
        sampling="poisson" if key["clients"] > args.per_round else "all",
        per_round=args.per_round if key["clients"] > args.per_round else None,
        seed=key["seed"],
    )
    values: list[float] = []

    with tempfile.TemporaryDirectory() as folder:
        end = train_in_process(federation, Path(folder), lambda round_: values.append(round_.loss))
    return values, end.noise or 0.0


def loss_table(lines: list[dict[str, Any]]) -> str:
    """Return the loss after all rounds, beside that without noise."""
    rows = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        names = ("model", "clients", "per_round", "epsilon", "clip")
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    for (model, clients, per_round, epsilon, clip), cells in groups.items():
        ends = [cell["losses"][-1] for cell in cells]
        noise = f"{cells[0]['noise']:.2g} x" if epsilon else "none"
        spread = f" ({min(ends):.3f} to {max(ends):.3f})" if len(ends) > 1 else ""
        loss = f"{cells[0]['losses'][0]:.3f} -> {statistics.median(ends):.3f}{spread}"
        rows.append([model, f"{clients}, {per_round}", clip, noise, loss])
    return table(["model", "clients, in a round", "clip", "noise", "loss"], rows)


def main() -> None:
    """Run what the log lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal model; default the embedded one")
    parser.add_argument("--text", help="default the embedded messages")
    parser.add_argument("--log", type=Path, required=True, help="results, one JSON object a line")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--per-round", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the clients' AdamW")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--clips", nargs="+", default=["0.2"], help="norms of updates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = read_lines(args.log)
    cells = [
        {"clients": clients, "epsilon": epsilon, "clip": clip, "seed": seed}
        for seed in args.seeds
        for clients in args.clients
        for epsilon in (None, args.epsilon)
        for clip in (args.clips if epsilon else args.clips[:1])
    ]
    for key in () if args.show else cells:
        key |= {"per_round": min(args.per_round, key["clients"]), "rounds": args.rounds}
        if any(key.items() <= line.items() for line in lines):
            continue
        start = time.process_time()
        values, noise = losses(args, key)
        result = {"losses": [round(x, 4) for x in values], "noise": round(noise, 3)}
        result |= {"model": Path(args.model or "embedded").name, "lr": args.lr, "rank": args.rank}
        result |= {"seconds": round(time.process_time() - start), "steps": args.local_steps}
        result |= {"date": str(datetime.date.today()), "machine": platform.machine()}
        lines.append(key | result)
        add_line(args.log, lines[-1])
    print(loss_table(lines))


if __name__ == "__main__":
    main()
