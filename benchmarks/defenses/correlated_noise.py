"""What correlated noise buys: the error it leaves in the weights, at the same epsilon.

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.correlated_noise
    OMP_NUM_THREADS=1 python -m benchmarks.defenses.correlated_noise --cost

With a constant learning rate the weights after t steps hold the sum of the noise of these steps. A
number is the root of the mean square of these sums over all steps, over that of independent noise
with Poisson sampling: below 1 is better. Noise multipliers are those at which a run costs epsilon
by PRV at delta 1e-5. ``banded`` draws from ``bands`` groups in turn, ``banded_inverse`` takes fixed
batches.

``--cost`` prints the processor time of the noise of a release, over that of independent noise.
"""

from __future__ import annotations

import argparse
import functools
import math
import time

import torch

from lightning_fedleak.defenses.accounting.accounting import noise_multiplier_for
from lightning_fedleak.defenses.dpsgd.correlated_noise import NoisePlan, Places, StepNoise
from lightning_fedleak.defenses.noise import noise_key

SMOKE = ("--runs 0 --bands 1 2 --epsilons 8 --rdp", "--cost --numbers 1000 --bands 1 2")

DELTA = 1e-5
RUNS = ((10_000, 64, 3), (10_000, 512, 10), (10_000, 512, 50), (100_000, 4096, 20))
"""Examples, expected batch size, epochs."""


noise = functools.cache(noise_multiplier_for)


def error(plan: NoisePlan, rate: float, epsilon: float, kind: str) -> float:
    """Root of the mean squared sum of noise, in clip norms."""
    sigma = noise(epsilon, DELTA, rate, plan.rounds, kind)
    found = plan.matrices
    return sigma * found.sensitivity * math.sqrt(found.errors.mean())


def table(args: argparse.Namespace) -> None:
    kind = "rdp" if args.rdp else "prv"
    for run in args.runs:
        examples, batch, epochs = RUNS[run]
        per_epoch = round(examples / batch)
        steps = epochs * per_epoch
        for epsilon in args.epsilons:
            print(
                f"{examples:,} examples, batches of {batch}, {epochs} epochs, epsilon {epsilon:g}"
            )
            independent = error(
                NoisePlan("banded", 1, steps, 1, examples), batch / examples, epsilon, kind
            )
            for bands in args.bands:
                cells = []
                rate = bands * batch / examples
                if rate <= 1:
                    plan = NoisePlan("banded", bands, steps, bands, examples)
                    own = error(plan, rate, epsilon, kind) / independent
                    cells.append(f"banded {own:.3f}")
                plan = NoisePlan("banded_inverse", bands, steps, per_epoch, examples)
                own = error(plan, 1.0, epsilon, kind) / independent
                print(f"  {bands:3} bands", *cells, f"banded_inverse {own:.3f}", flush=True)


def cost(args: argparse.Namespace) -> None:
    like, base = torch.zeros(args.numbers), b"e" * 32
    first = 0.0
    for mechanism in ("independent", "banded", "banded_inverse"):
        for bands in [1] if mechanism == "independent" else [b for b in args.bands if b > 1]:
            steps = StepNoise(mechanism, bands)
            if mechanism != "independent":
                steps.settle(NoisePlan(mechanism, bands, 200, bands, 1000), Places("", {}))
            spent = []
            for release in range(bands + args.rounds):
                steps.begin(base, release)
                start = time.process_time()
                steps.draw(0, like, lambda b, r, i: noise_key(b, 0, r, i, "dpsgd"))
                spent.append(time.process_time() - start)
                steps.end()
            own = sorted(spent[bands:])[args.rounds // 2]
            first = first or own
            print(f"{mechanism:15} {bands:3} bands: {own / first:.2f} ({1e3 * own:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="*", default=[*range(len(RUNS))])
    parser.add_argument("--bands", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1.0, 8.0])
    parser.add_argument("--rdp", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--numbers", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    (cost if args.cost else table)(args)


if __name__ == "__main__":
    main()
