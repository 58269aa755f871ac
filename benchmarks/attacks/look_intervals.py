"""What intervals and tests say of looks at 16 members and 16 others, and how often they are wrong.

    python -m benchmarks.attacks.look_intervals

Three tables: looks in which all members rank above all others; runs in which the attack guesses
(or reads exactly what the gate allows), and how many of them are called a leak; how many looks a
gate with ``bound="lower"`` takes. Scores are simulated: normal, rounded (ties), or guesses that
share most of their error within a look.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist, median

import numpy as np
import torch

from lightning_fedleak.looks.channels.played import Played, Window
from lightning_fedleak.looks.gates import Evidence
from lightning_fedleak.looks.run import Trials
from lightning_fedleak.metrics.clustered import Bools, Floats
from lightning_fedleak.metrics.within import over_looks, rank_p_value

N, ALPHA = 16, 0.05
MEMBER = np.arange(2 * N) < N
SMOKE = ("--runs 2 --looks 3",)

Draw = Callable[[np.random.Generator], Floats]


def normal(auc: float) -> Draw:
    """Return scores of independent texts with this AUC."""
    shift = math.sqrt(2) * NormalDist().inv_cdf(auc)
    return lambda rng: rng.normal(size=2 * N) + shift * MEMBER


def rounded(rng: np.random.Generator) -> Floats:
    """Return guesses that are tied in a few groups."""
    return np.round(rng.normal(size=2 * N), 0)


def clumped(rng: np.random.Generator) -> Floats:
    """Return guesses that follow two groups of texts, whose members are drawn at random."""
    group = rng.permutation(2 * N) < N
    return group * rng.normal() * 10 + 0.1 * rng.normal(size=2 * N)


def all_or_none(share: float) -> Draw:
    """Return scores of members that are far above or far below, each by a coin of its own."""
    return lambda rng: np.where(MEMBER, np.where(rng.random(2 * N) < share, 2.0, -2.0), 0.0)


def auc_of(score: Floats, member: Bools = MEMBER) -> float:
    """Return the share of pairs in the right order; ties count half."""
    difference = score[member][:, None] - score[~member][None]
    return float(((np.sign(difference) + 1) / 2).mean())


def fires_at(draw: Draw, at_most: float, looks: int, seed: int, *, by_games: bool = True) -> int:
    """Return the look at which a gate fires; 0 where it lets all looks pass."""
    rng, evidence = np.random.default_rng(seed), Evidence("lower", at_most, ALPHA, None, "auc")
    for look in range(1, looks + 1):
        auc = auc_of(draw(rng))
        evidence.update(auc, Trials(auc, N) if by_games else None)
        if evidence.verdict().fires:
            return look
    return 0


def is_called_a_leak(draw: Draw, looks: int, seed: int) -> bool:
    """Return whether the exact test excludes guessing at some look, corrected for all looks."""
    rng = np.random.default_rng(seed)
    p_values = (rank_p_value(draw(rng), MEMBER) for _ in range(looks))
    return any(over_looks(p, look) <= ALPHA for look, p in enumerate(p_values, 1))


def print_perfect_looks() -> None:
    """Print what looks without an error show."""
    print("looks   these looks    over steps     exact test, corrected for all looks")
    packed = Played(torch.tensor(MEMBER * 1.0), torch.tensor(MEMBER), torch.tensor(MEMBER)).pack(97)
    window, lowest = Window(100), 1.0
    for look in range(1, 101):
        outcome = window.add({0: packed})
        lowest = min(lowest, over_looks(outcome.p_value, look))
        if look in (1, 2, 4, 10, 100):
            low = outcome.over_steps["auc"].low if outcome.over_steps else math.nan
            auc = outcome.rates["auc"]
            print(f"{look:>5}   {auc.low:.3f} to {auc.high:.0f}   {low:.3f} to 1   {lowest:.2g}")


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--looks", type=int, default=50)
    options = parser.parse_args()
    print_perfect_looks()
    seeds = range(options.runs)
    print(f"\n{options.runs} runs of {options.looks} looks")
    print("at_most  scores                      runs that a gate acts on")
    harmless: list[tuple[float, str, Draw]] = [
        (0.5, "guesses, normal", normal(0.5)),
        (0.5, "guesses, tied", rounded),
        (0.5, "guesses, in clumps", clumped),
        (0.6, "guesses, normal", normal(0.5)),
        (0.6, "AUC .6, normal", normal(0.6)),
        (0.6, "AUC .6, all or none", all_or_none(0.6)),
    ]
    for at_most, name, draw in harmless:
        acted = np.mean([fires_at(draw, at_most, options.looks, seed) > 0 for seed in seeds])
        print(f"{at_most:>5}    {name:<26} {acted:>8.1%}")
    print("\nscores                     runs in which the exact test calls some look a leak")
    for _, name, draw in harmless[:3]:
        called = np.mean([is_called_a_leak(draw, options.looks // 5, seed) for seed in seeds])
        print(f"{name:<26} {called:>8.1%}   ({options.looks // 5} looks)")
    print("\nAUC    looks until a gate at .6 fires (median)    by values alone, as before")
    for auc in (1.0, 0.95, 0.8, 0.7):
        draw = normal(auc) if auc < 1 else (lambda rng: MEMBER + rng.random(2 * N) / 2)
        for_games, by_values = (
            median(
                fires_at(draw, 0.6, 10 * options.looks, seed, by_games=by_games) or math.inf
                for seed in range(max(1, options.runs // 20))
            )
            for by_games in (True, False)
        )
        print(f"{auc:<5}  {for_games:>8.0f} {by_values:>38.0f}")


if __name__ == "__main__":
    main()
