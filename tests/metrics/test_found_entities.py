"""Values in texts and canaries: against scipy, counts of ranks, and brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, fisher_exact, mannwhitneyu
from transformers import ByT5Tokenizer

from lightning_fedleak.attacks.memorization import Canaries, Entities, EntityGuess, ExtractionGuess
from lightning_fedleak.evaluation.entities import (
    EntityFinder,
    FoundEntities,
    clustered_auc,
    entity_values,
)
from lightning_fedleak.evaluation.metrics import released
from lightning_fedleak.evaluation.metrics.released import canary_values
from lightning_fedleak.model.snapshots import (
    CandidateSnapshot,
    Observation,
    ReleasedModel,
    TokenSnapshot,
)
from lightning_fedleak.model.taps import Text

TOKENIZER = ByT5Tokenizer()


def number(n: int) -> str:
    return f"{200 + n // 7}-{1000 + 13 * n}"


def text_of(prompt: str, label: str) -> Text:
    ids, start = (
        torch.tensor(TOKENIZER(part, add_special_tokens=False)["input_ids"])
        for part in (prompt + label, prompt)
    )
    return Text(ids, ids.masked_fill(torch.arange(len(ids)) < len(start), -100))


def snapshot(texts: list[Text], log_probs: torch.Tensor) -> TokenSnapshot:
    everything = torch.ones_like(log_probs, dtype=torch.bool)
    return TokenSnapshot(log_probs, log_probs, log_probs, everything, everything)


@pytest.mark.parametrize("seed", range(3))
def test_the_auc_is_that_of_mann_whitney(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(60).repeat_interleave(torch.randint(1, 4, (60,), generator=generator))
    members = rows < 30
    scores = torch.randint(0, 40, (len(rows),), generator=generator).double() + 9 * members
    values = clustered_auc(scores, members, rows)
    wins = mannwhitneyu(scores[members], scores[~members]).statistic
    pairs = int(members.sum()) * int((~members).sum())
    assert values["auc"] == pytest.approx(wins / pairs)
    assert values["auc_low"] <= values["auc"] <= values["auc_high"]
    assert values["auc_provable"] == pytest.approx(0.0125 ** (1 / 30))


def test_clustered_auc_is_calibrated_for_correlated_values() -> None:
    generator = np.random.default_rng(0)
    wrong, errors = 0, []
    for _ in range(120):
        rows = torch.arange(40).repeat_interleave(5)
        scores = torch.from_numpy(generator.normal(size=40))[rows]  # a row's values are one
        values = clustered_auc(scores, rows < 20, rows)
        wrong += not values["auc_low"] <= 0.5 <= values["auc_high"]
        errors.append(values["p_value"] / 2)
    assert wrong <= 6  # at most 2.5% are allowed at the first look
    assert sum(error <= 0.05 for error in errors) <= 13


def found(rows: list[tuple[str, str, bool]]) -> tuple[FoundEntities, list[Text], torch.Tensor]:
    pool = FoundEntities(EntityFinder(["phone"], [TOKENIZER]))
    texts = [text_of(prompt, label) for prompt, label, _ in rows]
    trains = [side for *_, side in rows]
    assert [*pool.counting(zip(texts, trains, strict=True))] == [*zip(texts, trains, strict=True)]
    pool.locate(texts)
    return pool, texts, torch.tensor(trains)


def compare(pool: FoundEntities, name: str, members: torch.Tensor, gains: torch.Tensor) -> Any:
    width = 80
    base = torch.full((len(members), width), -4.0)
    now = base + gains[:, None]
    rows = torch.arange(len(members))
    return pool.compare(snapshot([], now), snapshot([], base), rows, members)[name]


def test_values_are_compared_by_place_and_only_where_they_are_in_one_row() -> None:
    rows = [(f"Dear {number(n)}! ", f"Call {number(500 + n)}.", n < 25) for n in range(50)]
    rows += [("Hello! ", f"Call {number(900)}.", side) for side in (True, False)]  # on both sides
    rows += [("Hello! ", f"Call {number(950 + n // 2)}.", True) for n in range(44)]  # twice
    pool, _, members = found(rows)
    gains = members.float()
    once = compare(pool, "entity/phone/label", members, gains)
    assert (once["members"], once["others"], once["auc"]) == (25, 25, 1)
    again = compare(pool, "entity/phone/label_x2", members, gains)
    assert (again["members"], again["others"]) == (22, 25)
    assert compare(pool, "entity/phone/prompt", members, gains)["members"] == 25
    assert "0 values were" in compare(pool, "entity/phone/prompt_x2", members, gains)
    pool.are_predicted = False
    assert "predicts no next token" in compare(pool, "entity/phone/label", members, gains)
    few = compare(found(rows[5:])[0], "entity/phone/label", members[5:], gains[5:])
    assert few["members"] == 20
    few = compare(found(rows[6:])[0], "entity/phone/label", members[6:], gains[6:])
    assert few.startswith("19 values were trained on and 25 were not")


def test_the_score_is_of_the_values_tokens_alone() -> None:
    rows = [("Hi! ", f"Call {number(n)} now.", n < 20) for n in range(40)]
    pool, texts, members = found(rows)
    base = torch.full((40, 80), -4.0)
    now = base.clone()
    for row, text in enumerate(texts):
        words = TOKENIZER.decode(text.ids)
        start = words.index(number(row))
        inside = slice(start - 1, start - 1 + len(number(row)))
        now[row] += 3 * (row >= 20)  # all that is no value gained where nothing was trained on
        now[row, inside] = -2.0 if row < 20 else -4.0
    every = torch.arange(40)
    values: Any = pool.compare(snapshot([], now), snapshot([], base), every, members)
    values = values["entity/phone/label"]
    assert values["auc"] == 1
    assert values["p_value"] < 0.001


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


def canary_guess(scores: torch.Tensor, log_probs: torch.Tensor | None = None) -> ExtractionGuess:
    now = scores if log_probs is None else log_probs
    return ExtractionGuess(
        now, now - scores, torch.zeros(len(scores), dtype=torch.bool), torch.ones(len(scores)) > 0
    )


def split(n: int, n_others: int, between: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(n + between + n_others)
    return place < n, place >= n + between


@pytest.mark.parametrize(("n", "n_others"), [(11, 40), (33, 200)])
def test_exposure_is_the_rank_of_the_median_canary(n: int, n_others: int) -> None:
    scores = torch.randn(n + n_others, generator=torch.Generator().manual_seed(n)).double()
    members, others = split(n, n_others)
    scores[:n] += 1.5
    values = canary_values(canary_guess(scores), Canaries(), members, others)
    ranks = sorted(1 + sum(float(o) >= float(s) for o in scores[n:]) for s in scores[:n])
    assert values["exposure"] == pytest.approx(math.log2(n_others + 1) - math.log2(ranks[n // 2]))
    ends = binomtest(ranks[n // 2] - 1, n_others).proportion_ci(1 - 0.05 / 2, method="exact")
    assert values["exposure_low"] == pytest.approx(-math.log2(ends.high))
    assert values["exposure_high"] == pytest.approx(-math.log2(ends.low))
    assert values["exposure_capped"] == pytest.approx(sum(r == 1 for r in ranks) / n)


def test_above_all_others_it_is_capped_and_has_no_upper_end() -> None:
    members, others = split(10, 31)
    scores = members.double()
    values = canary_values(canary_guess(scores), Canaries(), members, others)
    assert values["exposure"] == values["exposure_cap"] == 5
    assert values["exposure_low"] < 5
    assert math.isinf(values["exposure_high"])
    assert values["exposure_capped"] == 1
    tied = canary_values(canary_guess(scores * 0), Canaries(), members, others)
    assert (tied["exposure"], tied["exposure_capped"], tied["auc"]) == (0, 0, 0.5)


def test_the_interval_of_exposure_holds_the_true_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of all possible non-members above the median canary, under a known law."""
    for name in ("membership_values", "extraction_values"):  # which are not asked for
        monkeypatch.setattr(released, name, lambda *_, **__: {})
    generator, wrong = torch.Generator().manual_seed(0), 0
    members, others = split(15, 60)
    for _ in range(400):
        scores = torch.randn(75, generator=generator).double() + members * 1.2
        values = canary_values(canary_guess(scores), Canaries(), members, others, alpha=0.2)
        true = -math.log2(float(torch.special.ndtr(-scores[:15].median())))
        wrong += not values["exposure_low"] <= true <= values["exposure_high"]
    assert wrong <= 60  # at most alpha / 2 = 40 of 400, and three deviations


def test_canaries_of_other_tiers_are_on_neither_side() -> None:
    members, others = split(10, 20, between=5)
    scores = torch.arange(35).double()
    apart = canary_values(canary_guess(scores), Canaries(), members, others)
    rows = members | others
    alone = canary_values(canary_guess(scores[rows]), Canaries(), members[rows], others[rows])
    assert apart == pytest.approx(alone, nan_ok=True)


def canary_snapshot(generator: torch.Generator, labels: torch.Tensor) -> TokenSnapshot:
    values = -torch.rand(labels.shape, generator=generator)
    greedy = torch.rand(labels.shape, generator=generator) < 0.7
    return TokenSnapshot(values, values, values, greedy, labels)


@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_only_the_last_label_tokens_count(tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.rand(12, 9, generator=generator) < 0.8
    labels[:, 2:5] = True
    now, base = (canary_snapshot(generator, labels) for _ in range(2))
    model = ReleasedModel(now, base, torch.ones(12))
    attack = Canaries(tokens)
    guess = attack.run(Observation(released=model))
    for row in range(12):
        places = labels[row].nonzero()[:, 0].tolist()[-(tokens or 99) :]
        assert float(guess.log_probs[row]) == pytest.approx(
            sum(float(now.log_probs[row, p]) for p in places)
        )
        assert bool(guess.greedy[row]) == all(bool(now.greedy[row, p]) for p in places)
        gain = sum(float(now.log_probs[row, p] - base.log_probs[row, p]) for p in places)
        assert float(attack.score(model)[row]) == pytest.approx(gain, abs=1e-6)
