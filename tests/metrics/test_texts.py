"""What is counted of texts: found entities, records, tokens read, and draws of models."""

import itertools
import math
import stat
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, fisher_exact, mannwhitneyu
from torch import Tensor
from torchmetrics.functional.text.rouge import rouge_score
from transformers import ByT5Tokenizer

from lightning_fedleak.attacks.memorization import (
    Canaries,
    Entities,
    EntityGuess,
    ExtractionGuess,
    PromptRatio,
    ShortAnswers,
    gain_beyond,
)
from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess
from lightning_fedleak.evaluation.canaries.repeats import PoolRows, group_texts
from lightning_fedleak.evaluation.entities import (
    EntityFinder,
    FoundEntities,
    clustered_auc,
    entity_values,
)
from lightning_fedleak.evaluation.metrics import (
    TextReconstruction,
    proportion,
    reconstruction_rates,
    released,
)
from lightning_fedleak.evaluation.metrics import record_list as records
from lightning_fedleak.evaluation.metrics.draws import _similarities, refute_draw
from lightning_fedleak.evaluation.metrics.record_list import RecordList, list_records
from lightning_fedleak.evaluation.metrics.released import canary_values, membership_values
from lightning_fedleak.evaluation.metrics.texts import (
    RECONSTRUCTION_RATES,
    SentenceScores,
    in_true_order,
    sentence_scores,
)
from lightning_fedleak.model.snapshots import (
    CandidateSnapshot,
    Observation,
    ReleasedModel,
    TokenSnapshot,
)
from lightning_fedleak.model.taps import Text
from tests.helpers.processes import computed_together

# Values in texts and canaries: against scipy, counts of ranks, and brute force.


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


def test_the_auc_is_that_of_mann_whitney() -> None:
    generator = torch.Generator().manual_seed(0)
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


# p-values, lists and bounds of records, against orders that are counted one by one.


DRAWS = 300
MOST_LISTS, MOST_BOUNDS = 43, 24
"""Of 300: what true rates of .1 and .05 exceed with a probability below .01 each."""


def pool(n: int, m: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores of one law, and which n of n + m are members."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n + m, generator=generator, dtype=torch.float64)
    return scores, torch.randperm(n + m, generator=generator) < n


def planted(n: int, m: int, real: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    scores, members = pool(n, m, seed)
    scores[members.nonzero()[:real, 0]] += 8
    return scores, members


def of(scores: torch.Tensor, members: torch.Tensor, **settings: object) -> RecordList:
    rows = PoolRows([[n] for n in range(len(scores))], torch.ones(len(scores), dtype=torch.long))
    return RecordList.of(scores, members, torch.full((len(scores),), 20), rows, **settings)


@pytest.mark.parametrize(("n", "m"), [(4, 5), (6, 3), (5, 6), (1, 7)])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_bound_is_exact_over_all_orders(n: int, m: int, alpha: float) -> None:
    bars, limits = records._envelope(n, m, alpha)
    orders = list(itertools.combinations(range(n + m), m))
    too_high = 0
    for places in orders:
        above = np.array(places) - np.arange(m)
        too_high += bool((above[bars - 1] > limits).any())
    assert too_high / len(orders) <= alpha
    counted = records._stays_below(n, m, bars, limits)
    assert counted == pytest.approx(1 - too_high / len(orders), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 10_000))
def test_p_values_and_bounds_are_those_of_plain_counting(n: int, m: int, seed: int) -> None:
    scores, members = planted(n, m, n // 2, seed)
    scores = scores.round(decimals=1)  # with ties
    inside, others = scores[members], scores[~members]
    p_values = records.record_p_values(scores, members)
    assert p_values.tolist() == [(1 + sum(bool(o >= s) for o in others)) / (m + 1) for s in inside]
    order, chosen = sorted(p_values), records.listed(p_values, 0.2)
    sizes = [k for k in range(1, n + 1) if order[k - 1] <= 0.2 * k / n + 1e-12]
    assert chosen.sum() == max(sizes, default=0)
    assert chosen.sum() == 0 or chosen.sum() >= records.smallest_list(n, m, 0.2)
    bars, limits = records._envelope(n, m, 0.1)
    ordered = sorted(others.tolist(), reverse=True)
    beyond = [
        sum(bool(s > ordered[j - 1]) for s in inside) - v
        for j, v in zip(bars.tolist(), limits.tolist(), strict=True)
    ]
    assert records.at_least(scores, members, 0.1) == max(0, *beyond)
    assert records.at_least(scores, members, 0.1) <= records.most_provable(n, m, 0.1)


@pytest.mark.parametrize(("n", "m"), [(150, 150), (25, 125)])
def test_permuted_draws_raise_no_more_alarms_than_allowed(n: int, m: int) -> None:
    scores, members = pool(n, m)
    generator = torch.Generator().manual_seed(1)
    lists = bounds = 0
    for _ in range(DRAWS):
        drawn = members[torch.randperm(n + m, generator=generator)]
        head = of(scores, drawn).head
        lists += bool(head["listed"])
        bounds += bool(head["at_least"])
    assert lists <= MOST_LISTS
    assert bounds <= MOST_BOUNDS


@pytest.mark.parametrize("is_short", [True, False])
def test_permuted_draws_of_short_answers_and_of_prompts_raise_no_more_alarms(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers and prompts of which a few are far likelier than others, as in real texts."""
    monkeypatch.setattr(f"{membership_values.__module__}.PERMUTATIONS", 900)  # exact with any
    generator, columns = torch.Generator().manual_seed(3), 3 if is_short else 30
    labels = torch.ones(200, columns, dtype=torch.bool)
    said = [-torch.rand(200, columns, generator=generator) * 5 for _ in range(2)]
    said[1] /= 1 + 9 * torch.rand(200, 1, generator=generator) ** 4
    base, now = (TokenSnapshot(one, one, one, labels, labels) for one in said)
    answers = torch.randint(0, 12, (200,), generator=generator)
    released = ReleasedModel(now, base, torch.ones(200), answers)
    scores = (ShortAnswers() if is_short else PromptRatio()).score(released)
    rows = PoolRows([[n] for n in range(200)], torch.ones(200, dtype=torch.long))
    lists = bounds = areas = p_values = 0
    for _ in range(DRAWS):
        drawn = torch.randperm(200, generator=generator) < 16
        values = membership_values(scores, drawn, exact=is_short)
        areas += values["auc_low"] > 0.5
        p_values += values["p_value"] <= 0.05
        if is_short:
            head = list_records(released, drawn, rows, short=True).head
            lists += bool(head["listed"])
            bounds += bool(head["at_least"])
    assert lists <= MOST_LISTS
    assert max(bounds, areas, p_values) <= MOST_BOUNDS


def test_the_score_is_fitted_without_the_draw() -> None:
    """The residual of each text is the same for all draws: permuting them is all there is."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.ones(200, 20, dtype=torch.bool)
    answers = [-torch.rand(200, 20, generator=generator) * 5 for _ in range(2)]
    greedy = answers[0] > -1
    base, now = (TokenSnapshot(one, one, one.abs(), greedy, labels) for one in answers)
    released = ReleasedModel(now, base, torch.ones(200))
    scores = gain_beyond(released, torch.ones(200, dtype=torch.bool))
    features = np.stack(
        [
            np.ones(200),
            answers[0].double().mean(1),
            answers[0].double().std(1, correction=0),
            greedy.double().mean(1),
        ],
        axis=1,
    )
    gain = (answers[1].double() - answers[0].double()).mean(1).numpy()
    weights = np.linalg.solve(features.T @ features, features.T @ gain)
    assert scores.numpy() == pytest.approx(gain - features @ weights, abs=1e-9)
    assert (scores.numpy() @ features) == pytest.approx(np.zeros(4), abs=1e-8)
    half = torch.arange(200) < 100
    assert not torch.allclose(gain_beyond(released, half), scores)


def test_real_ones_are_counted_and_listed_at_the_rate() -> None:
    false, wrong = [], 0
    for seed in range(60):
        scores, members = planted(150, 400, 60, seed)
        real = members.nonzero()[:60, 0].tolist()
        found = of(scores, members)
        chosen = [line.row for line in found.lines if line.listed]
        false.append(len({*chosen} - {*real}) / max(1, len(chosen)))
        wrong += found.head["at_least"] > 60
        assert found.head["at_least"] >= 40
        assert {*real} <= {*chosen}
    assert np.mean(false) <= 0.1
    assert wrong <= 8  # of 60 at 5%


def test_too_few_others_make_nothing_known_and_never_zero() -> None:
    head = of(*pool(40, 3)).head
    assert head["listed"] is None
    assert head["smallest_list"] > 40
    low = torch.arange(43.0)
    head = of(low, low < 3).head
    assert (head["listed"], head["at_least"]) == (0, 0)
    tiny = of(*pool(1, 3), alpha=0.01)
    assert tiny.head["at_least"] is None
    assert np.isnan(tiny.counts["at_least"])


def test_copies_come_first_and_are_dropped_together(tmp_path: Path) -> None:
    scores, members = planted(20, 30, 20)
    texts = members.nonzero()[:, 0].tolist()
    times = torch.ones(50, dtype=torch.long)
    times[texts[3]] = 3
    copies = [[row] for row in range(50)]
    copies[texts[3]] = [70, 60, 80]
    rows = PoolRows(copies, times, {90: "short", 91: "unknown"}, [([95, 94], 5)])
    found = RecordList.of(scores, members, torch.full((50,), 9), rows)
    assert [line.row for line in found.lines[:3]] == [60, 70, 80]
    assert [line.p for line in found.lines[:3]] == [None] * 3
    assert [(line.row, line.status) for line in found.lines[-2:]] == [
        (90, "short"),
        (91, "unknown"),
    ]
    short = [line for line in found.lines if line.row in (94, 95)]
    assert [(line.status, line.repeats, line.group, line.score) for line in short] == [
        ("repeated", 5, 2, None)
    ] * 2
    assert [line.row for line in found.riskiest(0.05)] == [60, 70, 80]
    assert len(found.riskiest(1.0)) == 22  # short copies have no score
    assert found.riskiest(0.0) == []
    counts = {name: found.head[name] for name in ("repeated", "short", "unknown", "members")}
    assert counts == {"repeated": 5, "short": 1, "unknown": 1, "members": 19}
    path = tmp_path / "private" / "records.jsonl"
    found.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = RecordList.load(path)
    assert again.lines == found.lines
    assert again.head == {**found.head, "not_said": list(found.head["not_said"])}
    path.chmod(0o644)
    with pytest.raises(ValueError, match="not 0600"):
        RecordList.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "other"}', "secret words"])
def test_other_files_are_no_lists_and_are_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="cannot be used as a list") as refusal:
        RecordList.load(path)
    assert "secret" not in str(refusal.value)


# Against counting by hand, torchmetrics' ROUGE, and the coverage that the intervals promise.


token = st.integers(0, 4)
sentence = st.lists(st.tuples(st.integers(-1, 4), token, st.booleans()), min_size=5, max_size=5)
texts = st.lists(sentence, min_size=1, max_size=6)


def as_tensors(data: list[list[tuple[int, int, bool]]]) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.tensor([[[g, t, int(m)] for g, t, m in row] for row in data])
    return columns[..., 0], columns[..., 1], columns[..., 2]


def longest_common_subsequence(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common_subsequence(a[1:], b[1:])
    return max(longest_common_subsequence(a[1:], b), longest_common_subsequence(a, b[1:]))


@given(texts)
def test_rates_are_what_counting_gives(data: list[list[tuple[int, int, bool]]]) -> None:
    shares, exact, rouge, right, total = [], [], [], 0, 0
    for row in data:
        kept = [(g, t) for g, t, m in row if m]
        if not kept:
            continue
        hits = sum(g == t for g, t in kept)
        shares.append(hits / len(kept))
        exact.append(hits == len(kept))
        rouge.append(longest_common_subsequence(*map(list, zip(*kept, strict=True))) / len(kept))
        right, total = right + hits, total + len(kept)
    rates = reconstruction_rates(sentence_scores(*as_tensors(data)))
    assert tuple(rates) == RECONSTRUCTION_RATES
    if not shares:
        assert all(math.isnan(rate.value) for rate in rates.values())
        return
    assert rates["token_accuracy"].value == pytest.approx(np.mean(shares))
    assert rates["token_accuracy_pooled"].value == pytest.approx(right / total)
    assert rates["exact_sentences"] == proportion(sum(exact), len(exact))
    assert rates["rouge_l"].value == pytest.approx(np.mean(rouge), rel=1e-6)
    for rate in rates.values():
        assert 0 <= rate.low <= rate.value <= rate.high <= 1


@given(sentence)
def test_rouge_is_the_librarys_with_gaps_and_repeats(data) -> None:
    guessed, truth, _ = as_tensors([data])
    got = sentence_scores(guessed, truth)
    words = [" ".join(f"w{i}" if i >= 0 else "gap" for i in ids[0]) for ids in (guessed, truth)]
    found = rouge_score(*words, rouge_keys=("rouge1", "rouge2", "rougeL"))
    assert float(got.rouge_1[0]) == pytest.approx(float(found["rouge1_fmeasure"]), rel=1e-6)
    assert float(got.rouge_2[0]) == pytest.approx(float(found["rouge2_fmeasure"]), rel=1e-6)
    assert float(got.rouge_l[0]) == pytest.approx(float(found["rougeL_recall"]), rel=1e-6)
    without = sentence_scores(guessed, truth, rouge=False)
    for scores in (without.rouge_l, without.rouge_1, without.rouge_2):
        assert bool(scores.isnan().all())


def test_a_text_is_found_where_half_of_it_is_right() -> None:
    truth = torch.arange(5, 10).expand(3, 5)
    guessed = truth.clone()
    guessed[0, 3:] = NOTHING  # 3 of 5
    guessed[1, 1:4] = NOTHING  # 2 of 5
    mask = torch.ones(3, 5)
    mask[2, 4] = 0
    guessed[2, :2] = NOTHING  # 2 of 4
    found = reconstruction_rates(sentence_scores(guessed, truth, mask))["texts_found"]
    assert found == proportion(2, 3)


def test_intervals_of_means_cover_the_truth() -> None:
    """Sentences of very different accuracy, 95% intervals: cover in at least 92% of worlds."""
    rng = np.random.default_rng(0)
    worlds, n, covered = 300, 12, {"token_accuracy": 0, "token_accuracy_pooled": 0}
    for world in range(worlds):
        lengths = rng.integers(5, 50, n)
        accuracy = rng.beta(2, 1, n)
        hits = rng.binomial(lengths, accuracy)
        nan = torch.full((n,), math.nan)
        scores = SentenceScores(torch.tensor(hits), torch.tensor(lengths), nan, nan, nan)
        rates = reconstruction_rates(scores, resamples=200, seed=world)
        assert all(math.isnan(rates[f"rouge_{n}"].value) for n in (1, 2, "l"))
        for name in covered:
            covered[name] += rates[name].low <= 2 / 3 <= rates[name].high
    assert min(covered.values()) / worlds > 0.92, covered


@given(texts, texts)
def test_the_metric_is_the_functions_over_all(first, second) -> None:
    one = TextReconstruction()
    left, right = TextReconstruction(), TextReconstruction()
    for metric, data in ((left, first), (right, second)):
        guessed, truth, mask = as_tensors(data)
        metric.update(TextGuess(guessed), truth, mask)
        one.update(guessed, truth, mask)
    expected = reconstruction_rates(sentence_scores(*as_tensors(first + second)))
    left.merge_state(right)
    for metric in (one, left):
        got = metric.compute()
        for name, rate in expected.items():
            for key, value in ((name, rate.value), (f"{name}_low", rate.low)):
                assert float(got[key]) == pytest.approx(value, nan_ok=True)


@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_processes_pool_their_sentences_even_if_one_saw_none(tmp_path) -> None:
    truth = torch.arange(12).reshape(3, 4)

    def make(rank: int) -> TextReconstruction:
        metric = TextReconstruction()
        if rank == 1:
            metric.update(truth.clamp(max=7), truth)
        return metric

    expected = reconstruction_rates(sentence_scores(truth.clamp(max=7), truth))
    for values in computed_together(make, tmp_path):
        assert {n: float(values[n]) for n in expected} == pytest.approx(
            {n: r.value for n, r in expected.items()}
        )


@given(st.data())
def test_texts_in_any_order_are_put_where_most_tokens_are_right(data) -> None:
    n, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    length, known = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    grid = st.integers(0, 2)
    guessed = torch.tensor(data.draw(_grid(n, known, st.integers(-1, 2))))
    truth = torch.tensor(data.draw(_grid(rows, length, grid)))
    mask = torch.tensor(data.draw(_grid(rows, length, st.integers(0, 1))))
    told = in_true_order(guessed, truth, mask)
    padded = torch.full((n + rows, length), NOTHING)
    padded[:n, : min(known, length)] = guessed[:, :length]
    best = max(
        int(((padded[list(order)] == truth) & (mask != 0)).sum())
        for order in permutations(range(n + rows), rows)
    )
    assert int(((told == truth) & (mask != 0)).sum()) == best
    given = [row.tolist() for row in padded]
    assert all(given.count(row) >= told.tolist().count(row) for row in told.tolist())


def _grid(rows: int, columns: int, of: st.SearchStrategy[int]):
    row = st.lists(of, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


# Scores that ignore the training refute a draw that did not take place, and no other.


N, LENGTH = 120, 24
MEMBERS = torch.arange(N) < N // 2


def texts_of(generator: torch.Generator, shift: torch.Tensor) -> list[Text]:
    """Return texts of a vocabulary of 400; members take a share of words of their own."""
    rows = torch.randint(0, 300, (N, LENGTH), generator=generator)
    own = torch.randint(300, 400, (N, LENGTH), generator=generator)
    picked = torch.rand(N, LENGTH, generator=generator) < shift[:, None]
    return [Text(row, row) for row in torch.where(picked, own, rows)]


def draws_snapshot(generator: torch.Generator, gain: torch.Tensor) -> TokenSnapshot:
    log_probs = -3 + torch.randn(N, LENGTH - 1, generator=generator) + gain[:, None]
    ones = torch.ones_like(log_probs)
    return TokenSnapshot(log_probs, -6 * ones, 2 * ones, ones > 0, ones > 0)


def refuted(seed: int, words: float = 0, gain: float = 0) -> str | None:
    generator = torch.Generator().manual_seed(seed)
    texts = texts_of(generator, words * MEMBERS)
    base = draws_snapshot(generator, gain * MEMBERS)
    return refute_draw(base, torch.full((N,), 50.0), texts, MEMBERS)


def test_a_draw_that_took_place_is_believed() -> None:
    assert [refuted(seed) for seed in range(20)] == [None] * 20


def test_other_words_and_a_base_that_knows_the_members_refute_it() -> None:
    assert "'words', which ignores the training" in str(refuted(0, words=0.3))
    assert "the base knows one side" in str(refuted(0, gain=0.8))


def test_texts_that_share_passages_are_permuted_together() -> None:
    """Twenty documents in words of their own, cut in six, overlap: a draw of documents is one."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(0, 15, (20, 96), generator=generator)
    documents += 15 * torch.arange(20)[:, None]
    sides = torch.arange(N) // 6 % 2 == 0
    base = draws_snapshot(generator, torch.zeros(N))
    found = []
    for step in (7, 16):  # passages of 16 tokens share 9, or none
        parts = [d[n : n + 16].clone() for d in documents for n in range(0, 6 * step, step)]
        texts = [Text(part, part) for part in parts]
        groups = group_texts(texts, sides.numpy())
        found.append((groups.max() + 1, refute_draw(base, torch.full((N,), 50.0), texts, sides)))
        assert group_texts(texts, (torch.arange(N) % 2 == 0).numpy()).max() == N - 1
    assert found[0] == (20, None)
    assert found[1][0] > 100
    assert found[1][1] is not None


def test_texts_of_a_row_are_permuted_together() -> None:
    """Twenty rows hold six texts in words of their own each: a draw of rows is one."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(N) // 6
    ids = torch.randint(0, 15, (N, 16), generator=generator) + 15 * owners[:, None]
    texts, sides = [Text(row, row) for row in ids], owners % 2 == 0
    settings = draws_snapshot(generator, torch.zeros(N)), torch.full((N,), 50.0), texts
    assert refute_draw(*settings, sides) is not None
    assert refute_draw(*settings, sides, owners) is None
    assert group_texts(texts, (torch.arange(N) % 2 == 0).numpy(), owners.numpy()).max() == 19


def test_similarities_are_cosines_of_weighted_counts() -> None:
    texts = texts_of(torch.Generator().manual_seed(3), torch.zeros(N))[:6]
    counts = np.stack([np.bincount(text.ids.numpy(), minlength=400) for text in texts])
    weights = np.log(6 / np.maximum((counts > 0).sum(0), 1))
    rows = np.log1p(counts) * weights
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert _similarities(texts) == pytest.approx(rows @ rows.T)
