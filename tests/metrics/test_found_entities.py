"""Values found in texts, by kind and place: against scipy, and under permuted memberships."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from transformers import ByT5Tokenizer

from lightning_fedleak.evaluation.entities import EntityFinder, FoundEntities, clustered_auc
from lightning_fedleak.model.snapshots import TokenSnapshot
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
