"""How long a report of a long run takes, and how large its page is.

    python -m benchmarks.cost.report --looks 1000 --attacks 10
    python -m benchmarks.cost.report --looks 1000 --attacks 10 --clients 20     # of a federation

The lines are those that a monitor writes, with made-up numbers. Prints the median time to read the
lines and to write the three files, without the loading of libraries, and the page's size.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from lightning_fedleak.report import write

SMOKE = (
    "--looks 20 --attacks 3 --repeats 1",
    "--looks 20 --attacks 3 --clients 5 --repeats 1",
)


def lines_of(
    looks: int, attacks: int, clients: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of ``leakage.jsonl`` and of ``run.jsonl``; of more than one client in rounds."""
    rng = random.Random(0)
    names = [f"attack_{number}" for number in range(attacks)]
    about = [
        {"name": name, "class": "Attack", "family": "words", "adversary": "a server", "needs": [],
         "reads": ["head.weight"], "exposed": True, "config": {"seed": 0}}
        for name in names
    ]  # fmt: skip
    record: list[dict[str, Any]] = [
        {"schema": 1, "run": "a", "kind": "begin", "time": "2026-01-01T00:00:00+00:00",
         "versions": {}, "machine": {}, "model": {"class": "Model"},
         "training": {"strategy": "federation"} if clients > 1 else {},
         "monitor": {}, "attacks": about, "not_played": [], "unread": [], "defenses": [],
         "gates": [], "settings_hash": "0"}
    ]  # fmt: skip
    results = []
    for look in range(looks):
        step = look // clients if clients > 1 else 50 * look
        client = look % clients
        utility = {"train_loss": 3 + rng.random(), "val_loss": 3.5}
        record.append(
            {"schema": 1, "run": "a", "kind": "look", "step": step, "utility": utility,
             "privacy": [], "seconds": 0.1, "failures": 0}
            | ({"client": client} if clients > 1 else {})
        )  # fmt: skip
        for name in names:
            value = rng.random()
            rate = {"value": value, "low": 0.9 * value, "high": min(1.0, 1.1 * value)}
            results.append(
                {"schema": 1, "run": "a", "step": step, "stage": "shared", "client": client,
                 "round": step if clients > 1 else None, "attack": name, "config": {"seed": 0},
                 "n": 500, "exposed": True,
                 "metrics": dict.fromkeys(("f1", "precision", "recall"), rate), "unknown": None}
            )  # fmt: skip
    return results, record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--looks", type=int, default=1000)
    parser.add_argument("--attacks", type=int, default=10)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"# {platform.machine()}, {date.today()}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        named = zip(
            ("leakage.jsonl", "run.jsonl"),
            lines_of(options.looks, options.attacks, options.clients),
            strict=True,
        )
        for name, lines in named:
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        seconds = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            page, *_ = write([folder])
            seconds.append(time.perf_counter() - started)
        print(
            f"{options.looks} looks of {options.attacks} attacks, clients {options.clients} | "
            f"{statistics.median(seconds):.2f} s | {page.stat().st_size / 1000:.0f} kB"
        )


if __name__ == "__main__":
    main()
