"""What the ranks of planted values show: how many more rank first than of those left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import fisher_exact
from torch import Tensor

from lightning_fedleak.attacks.memorization.entities import EntityGuess
from lightning_fedleak.evaluation.metrics.rates import Rate, flat, proportion
from lightning_fedleak.evaluation.metrics.released import permutation_test, spent_at

LEAST_ENTITIES = (
    10  # that were trained on so often, and left out; fewer: bounds say next to nothing
)


def entity_values(
    guess: EntityGuess,
    members: Tensor,
    others: Tensor,
    repeats: Tensor,
    times: Sequence[int],
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[str, float] | str:
    """Return what the ranks of one kind of value in one place show, or why that is unknown.

    - ``first``, with ``_low`` and ``_high``: the share of the planted values that rank first among
      their candidates, minus that of the values that were left out. Of several ``times`` it is that
      of the one where it is highest. ``first_provable`` is its lower end where all rank first and
      none of the others.
    - ``greedy``: the same of values that greedy decoding writes.
    - ``first_others`` and ``greedy_others``: the shares of the values that were left out.
    - ``median_rank``: of the planted values; ``candidates``: of each value, at most.
    - ``p_value``: of "planted values rank no higher", by permuted inclusion bits; it counts all
      looks.

    An interval holds whatever the model does: both shares have exact ends (Clopper-Pearson), which
    err with half of the look's part of ``alpha`` each, and where the lower end of the excess is
    above 0 Fisher's exact test on the draw shows it too.

    Args:
        guess: about N values.
        members: (N,) bool, values that were trained on.
        others: (N,) bool, values that were left out.
        repeats: (N,) rows of the training data that hold each value that is included.
        times: numbers of rows that count; they share the probability of error.
        look: counted from 1.
        alpha: probability of error over all looks together.
    """
    tiers = [tier for n in times if int((tier := members & (repeats == n)).sum()) >= LEAST_ENTITIES]
    n_others = int(others.sum())
    if not tiers or n_others < LEAST_ENTITIES:
        counts = ", ".join(f"{int((members & (repeats == n)).sum())} x{n}" for n in times)
        return (
            f"{n_others} values were left out, and so many were trained on: {counts}. "
            f"{LEAST_ENTITIES} of each are needed: plant more (count=)"
        )
    spent = spent_at(look, alpha) / len(tiers)
    values: dict[str, float] = {}
    for name, hits in (("first", guess.ranks == 1), ("greedy", guess.greedy)):
        rates = [_excess(hits, tier, others, spent) for tier in tiers]
        ends = zip(*((rate.value, rate.low, rate.high) for rate in rates), strict=True)
        values |= flat({name: Rate(*map(max, ends))})
        values[f"{name}_others"] = float(hits[others].double().mean())
        values[f"{name}_provable"] = min(_excess(t, t, others, spent).low for t in tiers)
    counted = torch.stack(tiers).any(0)
    pool = counted | others
    error = permutation_test(-guess.ranks[pool].double(), counted[pool])
    return values | {
        "median_rank": float(guess.ranks[counted].double().median()),
        "candidates": float(guess.candidates[pool].max()),
        "p_value": min(1.0, error * alpha / spent_at(look, alpha)),
        "members": float(counted.sum()),
        "others": float(n_others),
        "alpha": spent_at(look, alpha),
    }


def _excess(hits: Tensor, members: Tensor, others: Tensor, alpha: float) -> Rate:
    """Return how much larger a share of members has a hit, with exact ends."""
    counts = [[int(hits[side].sum()), int((~hits[side]).sum())] for side in (members, others)]
    inside, outside = (proportion(yes, yes + no, 1 - alpha / 2) for yes, no in counts)
    low = inside.low - outside.high
    if fisher_exact(counts, alternative="greater").pvalue > alpha / 2:
        low = min(low, 0.0)
    return Rate(inside.value - outside.value, low, inside.high - outside.low)
