"""How many comfortably safe runs a RiskGate(bound="upper") lets go on, by games of a look.

    python -m benchmarks.defenses.gate_warmup

A run is comfortably safe where its AUC lies half-way between 0.5 and the threshold at every look.
Simulated: normal scores, so many members and as many others, 400 looks; 200 runs of each kind.
"""

from __future__ import annotations

import argparse
import math
from statistics import NormalDist, median

import numpy as np

from lightning_fedleak.looks.gates import Evidence, default_warmup

LOOKS, AT_MOST, AUC, ALPHA = 400, 0.7, 0.6, 0.05
SMOKE = ("--runs 2",)


def run(targets: int, warmup: int | None, auc: float, seed: int) -> tuple[bool, int]:
    """Whether one run goes on to its end, and how long its warm-up was."""
    rng = np.random.default_rng(seed)
    shift = math.sqrt(2) * NormalDist().inv_cdf(auc)
    evidence = Evidence("upper", AT_MOST, ALPHA, warmup, "auc")
    for _ in range(LOOKS):
        members, others = rng.normal(shift, 1, targets), rng.normal(0, 1, targets)
        evidence.update(float((members[:, None] > others).mean()))
        if evidence.verdict().fires:
            return False, evidence.warmup
    return True, evidence.warmup


def main() -> None:
    """Prints one row for each number of targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    steady = default_warmup(AT_MOST, ALPHA, 0.5, (0.0, 1.0))
    print(f"AUC at most {AT_MOST}; {runs} runs of {LOOKS} looks")
    print("targets  warm-up            safe runs (.6) go on   runs at the threshold go on")
    for targets in (4, 8, 16):
        for name, warmup in ((f"fixed, {steady}", steady), ("by scatter", None)):
            safe = [run(targets, warmup, AUC, seed) for seed in range(runs)]
            unsafe = [run(targets, warmup, AT_MOST, seed)[0] for seed in range(runs)]
            looks = median(length for _, length in safe)
            print(
                f"{targets:>3} + {targets:<3} {name:<11} {looks:>5.0f}"
                f" {np.mean([on for on, _ in safe]):>18.1%} {np.mean(unsafe):>22.1%}"
            )


if __name__ == "__main__":
    main()
