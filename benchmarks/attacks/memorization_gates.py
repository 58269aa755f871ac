"""How often a gate on the trained weights acts though nothing is above its threshold.

    python -m benchmarks.attacks.memorization_gates --runs 2000 --looks 5
    python -m benchmarks.attacks.memorization_gates --runs 2000 --looks 200

Each run draws members and others once and looks at the same texts again and again; a text keeps
part of its score from look to look, as real ones do. Without a leak, members and others follow one
law. Planted, the true AUC (or the true TPR at 1% FPR) is exactly ``at_most``. Counts the runs in
which the lower end of some look's interval lies above ``at_most``: at most 5% of them may. The
gate on the worst of several attacks acts where that of any attack does; these split the 5%.
"""

from __future__ import annotations

import argparse
import platform
from datetime import date
from typing import Any

import numpy as np
import torch
from scipy.stats import beta, norm

from lightning_fedleak.evaluation.metrics.released import (
    FPR,
    membership_values,
    shown_tpr,
    spent_at,
)

SMOKE = ("--runs 3 --looks 2",)

ALPHA = 0.05  # probability that a gate ever acts where it should not, the default of RiskGate
STICKY = 0.9  # correlation of a text's scores at two looks, as of the last two epochs' looks
ALIKE = 0.7  # correlation of two attacks' scores of a text; independent ones alarm more often
NEAR = 0.8  # of the width that an interval needs, below which the bootstrap is left out


def scores_of(
    rng: np.random.Generator, n: int, looks: int, shift: float, attacks: int
) -> np.ndarray:
    """Return (looks, attacks, n) normal scores around ``shift``, the same texts at every look."""
    parts = [rng.normal(size=shape) for shape in (n, (attacks, n), (looks, 1, n))]
    fresh = rng.normal(size=(looks, attacks, n))
    shares = np.outer([STICKY, 1 - STICKY], [ALIKE, 1 - ALIKE]).ravel() ** 0.5
    lasting = shares[0] * parts[0] + shares[1] * parts[1]
    return shift + lasting + shares[2] * parts[2] + shares[3] * fresh


def near_auc(scores: np.ndarray, members: np.ndarray, at_most: float, spent: float) -> bool:
    """Return whether the AUC lies so far above that its interval may; by its variance alone."""
    inside, non_members = np.sort(scores[members]), np.sort(scores[~members])
    below = np.searchsorted(non_members, inside) / len(non_members)
    above = 1 - np.searchsorted(inside, non_members, "right") / len(inside)
    error = np.sqrt(below.var() / len(inside) + above.var() / len(non_members))
    return bool(below.mean() - at_most > NEAR * norm.isf(spent / 2) * error)


def near_tpr(scores: np.ndarray, members: np.ndarray, at_most: float, spent: float) -> bool:
    """Return whether the TPR's lower end would be above at the largest FPR that its bar allows."""
    inside, non_members = scores[members], scores[~members]
    bar = np.sort(non_members)[::-1][int(FPR * len(non_members))]
    hits = int((inside > bar).sum())
    return hits > 0 and bool(beta.ppf(spent / 2, hits, len(inside) - hits + 1) > at_most)


def acts(scores: np.ndarray, members: np.ndarray, rate: str, at_most: float, **spent: Any) -> bool:
    """Return whether the lower end of an attack's interval is above ``at_most`` at a look."""
    near = near_tpr if rate == "shown" else near_auc
    if not near(scores, members, at_most, spent_at(**spent)):
        return False
    score, member = torch.tensor(scores), torch.tensor(members)
    if rate == "shown":
        return shown_tpr(score, member, **spent).low > at_most
    return membership_values(score, member, **spent)["auc_low"] > at_most


def alarms(
    options: argparse.Namespace, rate: str, at_most: float, shift: float, attacks: int
) -> float:
    """Return the share of runs in which some look's lower end is above ``at_most``."""
    n = options.members + options.others
    members = np.arange(n) < options.members
    fired = 0
    for run in range(options.runs):
        rng = np.random.default_rng([options.seed, run])
        inside = scores_of(rng, options.members, options.looks, shift, attacks)
        non_members = scores_of(rng, options.others, options.looks, 0.0, attacks)
        fired += any(
            acts(one, members, rate, at_most, look=look, alpha=ALPHA / attacks)
            for look, scores in enumerate(np.concatenate([inside, non_members], 2), 1)
            for one in scores
        )
    return fired / options.runs


def main() -> None:
    """Read the options, simulate, and print one line for each gate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--members", type=int, default=200)
    parser.add_argument("--others", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"# {platform.machine()}, {date.today()}: {options.members} members, {options.others} "
        f"others, {options.looks} looks, {options.runs} runs"
    )
    print("| gate | truth | runs in which it acts |\n|---|---|---|")
    bar = norm.isf(0.01)
    planted, near_certain = (float(np.sqrt(2) * norm.ppf(area)) for area in (0.7, 0.98))
    for rate, at_most, shift, attacks in (
        ("auc", 0.5, 0.0, 1),
        ("auc", 0.7, planted, 1),
        ("auc", 0.98, near_certain, 1),
        ("auc", 0.5, 0.0, 3),
        ("auc", 0.7, planted, 3),
        ("shown", 0.01, 0.0, 1),
        ("shown", 0.2, float(bar - norm.isf(0.2)), 1),
    ):
        share = alarms(options, rate, at_most, shift, attacks)
        name = rate if attacks == 1 else f"the worst {rate} of {attacks} attacks"
        print(f"| {name} at most {at_most:g} | {at_most:g} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
