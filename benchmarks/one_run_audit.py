"""Three lower bounds on epsilon from one run of DPSGD with planted gradients.

    OMP_NUM_THREADS=1 python -m benchmarks.one_run_audit
    OMP_NUM_THREADS=1 python -m benchmarks.one_run_audit --jax     # with jax-privacy installed

Every audit is a whole run of ``DPSGD`` in which 500 planted gradients are there or not, each by a
coin of its own (see ``tests/proof/planted_gradients.py``). A score is what was released along the
gradient, summed over steps. The three bounds are of the same scores:

- ``guesses``: ``audit_one_run``, of (epsilon, delta)-DP and nothing else;
- ``curve``: the same, by the whole trade-off curve of a Gaussian mechanism (``claim="gaussian"``);
- ``sums``: ``audit_gaussian_scores``.

For each, the median bound over the epsilon that PRV says of what was accounted, and how many of the
audits exceed it: 5% may, binomial ``p`` beside. ``refused`` are audits whose scores are plainly not
those of one Gaussian mechanism. ``--jax`` adds jax-privacy's bound by the same curve.
"""

from __future__ import annotations

import argparse
import collections
import statistics

import torch

from lightning_fedleak.auditing import audit_gaussian_scores, audit_one_run
from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from tests.proof.dp_sgd import refutations
from tests.proof.planted_gradients import PlantedGradients

SMOKE = ("--audits 2 --canaries 60 --rows 1 3",)

DELTA = 1e-5
ROWS = ((0.5, 1.0, 1), (1.0, 1.0, 1), (2.0, 1.0, 1), (1.0, 0.5, 4), (1.0, 0.2, 25))
"""Noise multiplier, sample rate, steps."""


def jax_bound(scores: torch.Tensor, members: torch.Tensor) -> float:
    from jax_privacy.auditing import CanaryScoreAuditor

    auditor = CanaryScoreAuditor(scores[members].numpy(), scores[~members].numpy())
    return float(auditor.epsilon_one_run_fdp(0.05, DELTA))


def report(sigma: float, rate: float, steps: int, args: argparse.Namespace) -> None:
    planted = PlantedGradients(
        lambda: DPSGD(0.7, noise_multiplier=sigma, target_delta=DELTA),
        targets=args.canaries,
        batch_size=round(rate * args.canaries),
        steps=steps,
        seed=args.seed,
    )
    bounds = collections.defaultdict(list)
    refused = 0
    for number in range(args.audits):
        members = planted.coins(number)
        given = planted.run(members, number).sum(0), members
        bounds["guesses"].append(audit_one_run(*given, delta=DELTA).epsilon)
        bounds["curve"].append(audit_one_run(*given, delta=DELTA, claim="gaussian").epsilon)
        if args.jax:
            bounds["jax-privacy"].append(jax_bound(*given))
        try:
            bounds["sums"].append(audit_gaussian_scores(*given, delta=DELTA).epsilon)
        except ValueError:
            refused += 1
    epsilon = epsilon_of(planted.history, DELTA, "prv")
    print(f"sigma {sigma:g}, rate {rate:g}, {steps} steps: epsilon {epsilon:.3f}", end="")
    print(f", sums refused in {refused} of {args.audits}" if refused else "")
    for name, own in bounds.items():
        found = refutations(own, epsilon)
        print(
            f"  {name:12} median {statistics.median(own) / epsilon:.3f}   exceed {found.refuted:3} "
            f"of {found.audits}, p {found.p_value:.2g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument("--canaries", type=int, default=500)
    parser.add_argument("--rows", type=int, nargs="*", default=[*range(len(ROWS))])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jax", action="store_true")
    args = parser.parse_args()
    for row in args.rows:
        report(*ROWS[row], args)


if __name__ == "__main__":
    main()
