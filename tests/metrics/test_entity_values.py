"""What ranks of planted values show, against counts of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import binomtest, fisher_exact

from lightning_fedleak.attacks.memorization import Entities, EntityGuess
from lightning_fedleak.evaluation.entities import entity_values
from lightning_fedleak.model.snapshots import CandidateSnapshot, Observation


def guess_of(ranks: torch.Tensor, greedy: torch.Tensor | None = None) -> EntityGuess:
    return EntityGuess(
        ranks, torch.full((len(ranks),), 100), ranks < 0 if greedy is None else greedy
    )


def sides(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    members = torch.arange(n + m) < n
    return members, ~members


def test_an_attack_ranks_values_and_breaks_ties_at_random() -> None:
    log_probs = torch.tensor([[-3.0, -4, -2, -5], [-1, -2, -3, 9], [-2, -2, -2, -2]])
    snapshot = CandidateSnapshot(log_probs, torch.tensor([3, 2, 3]), torch.zeros(3).bool())
    guess: Any = Entities(20).run(Observation(candidates=snapshot))
    assert guess.ranks[:2].tolist() == [2, 1]  # what is beyond a value's candidates is not read
    tied = CandidateSnapshot(torch.zeros(4000, 4), torch.full((4000,), 3), torch.zeros(4000).bool())
    ranks = Entities(20).run(Observation(candidates=tied)).ranks  # type: ignore[attr-defined]
    assert all(binomtest(int((ranks == n).sum()), 4000, 0.25).pvalue > 1e-4 for n in (1, 2, 3, 4))


def test_excesses_are_those_of_exact_intervals() -> None:
    members, others = sides(18, 36)
    ranks = torch.full((54,), 50)
    ranks[:16] = 1
    repeats = torch.full((54,), 4)
    values: Any = entity_values(guess_of(ranks), members, others, repeats, (4,), alpha=0.05)
    inside = binomtest(16, 18).proportion_ci(1 - 0.05 / 4)
    outside = binomtest(0, 36).proportion_ci(1 - 0.05 / 4)
    assert values["first"] == pytest.approx(16 / 18)
    assert values["first_low"] == pytest.approx(inside.low - outside.high)
    assert values["first_high"] == pytest.approx(inside.high)
    assert values["first_low"] > 0.4
    assert values["first_provable"] > values["first_low"]
    assert values["median_rank"] == 1
    assert values["p_value"] < 0.001
    assert values["greedy"] == values["greedy_others"] == 0


def test_of_several_tiers_the_highest_counts_and_they_share_the_error() -> None:
    members, others = sides(40, 40)
    repeats = torch.tensor([1, 4]).repeat(40)
    ranks = torch.full((80,), 60)
    ranks[(repeats == 4) & members] = 1
    both: Any = entity_values(guess_of(ranks), members, others, repeats, (1, 4))
    many: Any = entity_values(guess_of(ranks), members, others, repeats, (4,))
    assert both["first"] == many["first"] == 1
    assert 0 < both["first_low"] < many["first_low"]
    few: Any = entity_values(guess_of(ranks), members, others, repeats, (1,))
    assert few["first"] == 0
    unknown = entity_values(guess_of(ranks), members, others, repeats, (16,))
    assert unknown == (
        "40 values were held out; trained on, by number of rows: 0 x16. 10 of each are needed: "
        "plant more (count=)"
    )


def test_permuted_draws_are_flagged_no_more_often_than_their_rate() -> None:
    """Whatever ranks the values have, a draw that says nothing of them is rarely flagged."""
    generator = torch.Generator().manual_seed(0)
    flags = p_values = 0
    for _ in range(300):
        ranks = torch.randint(1, 4, (60,), generator=generator)  # a third first: a broken control
        members = torch.randperm(60, generator=generator) < 30
        table = [
            [int((ranks[side] == 1).sum()), int((ranks[side] > 1).sum())]
            for side in (members, ~members)
        ]
        values: Any = entity_values(guess_of(ranks), members, ~members, torch.ones(60), (1,))
        flags += values["first_low"] > 0
        p_values += values["p_value"] <= 0.05
        if values["first_low"] > 0:
            assert fisher_exact(table, alternative="greater").pvalue <= 0.025
    assert flags <= 15
    assert p_values <= 24
