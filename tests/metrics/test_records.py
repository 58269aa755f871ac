"""p-values, lists and bounds of records, against orders that are counted one by one."""

from __future__ import annotations

import itertools
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import nhypergeom

from lightning_fedleak.attacks.memorization import PromptRatio, ShortAnswers, gain_beyond
from lightning_fedleak.evaluation.canaries.repeats import PoolRows
from lightning_fedleak.evaluation.metrics import record_list as records
from lightning_fedleak.evaluation.metrics.record_list import RecordList, list_records
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot

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


def test_the_law_of_a_place_is_negative_hypergeometric() -> None:
    tail = records._tail(40, 25, 7)
    law = nhypergeom(65, 40, 7)
    assert tail == pytest.approx(law.sf(np.arange(40)), abs=1e-10)


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


@pytest.mark.parametrize(("n", "m"), [(150, 150), (25, 125), (400, 100)])
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
