"""Rows left out of training by a secret draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_fedleak.evaluation.canaries import leave_out, with_entities
from tests.canaries.test_with_entities import PHONE, TOKENIZER, chats


def some_rows(n: int = 40) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor([row, row + 1])} for row in range(n)]


def first_ids(rows: object) -> list[int]:
    return [int(rows[i]["input_ids"][0]) for i in range(len(rows))]  # type: ignore[index, arg-type]


def test_training_rows_and_others_are_the_data() -> None:
    train, others = leave_out(some_rows(), 7, seed=0)
    assert sorted(first_ids(train) + first_ids(others)) == list(range(40))
    assert len(others) == 7
    assert train.others is others


def test_every_row_is_left_out_equally_often() -> None:
    counts = np.zeros(10)
    rows = some_rows(10)
    draws = 1000
    for seed in range(draws):
        counts[first_ids(leave_out(rows, 3, seed=seed)[1])] += 1
    expected = 0.3 * draws
    assert (np.abs(counts - expected) < 5 * np.sqrt(draws * 0.3 * 0.7)).all()


@pytest.mark.parametrize("change", ["rows", "n", "seed", "text"])
def test_a_record_of_another_run_is_refused(tmp_path: Path, change: str) -> None:
    file = tmp_path / "left_out.json"
    leave_out(some_rows(), 39, seed=1, record=file)
    rows = some_rows(41 if change == "rows" else 40)
    if change == "text":
        for row in rows:
            row["input_ids"] = row["input_ids"] + 100
    with pytest.raises(ValueError, match="another run"):
        leave_out(
            rows, 38 if change == "n" else 39, seed=2 if change == "seed" else None, record=file
        )


def test_with_coins_each_of_twice_as_many_rows_is_left_out_by_its_own(tmp_path: Path) -> None:
    data = some_rows(60)
    draws = [leave_out(data, 20, seed=seed, coins=True)[0] for seed in range(400)]
    out = np.zeros((400, 60), dtype=bool)
    for draw, train in enumerate(draws):
        out[draw, train.record.out] = True
        assert len(train.record.candidates) == 40
        assert set(train.record.out) <= set(train.record.candidates)
        assert train.public_length == 40
        assert len(train) == 60 - len(train.others)
    assert np.abs(out.mean(0) - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 400)
    counts = out.sum(1)  # of 40 fair coins
    assert counts.mean() == pytest.approx(20, abs=5 * np.sqrt(10 / 400))
    assert counts.var() == pytest.approx(10, rel=0.4)


class Stream(IterableDataset[int]):
    def __iter__(self) -> object:
        return iter(range(3))


def test_what_cannot_be_drawn_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="items by index"):
        leave_out(Stream(), 1)
    for n in (0, 40, True):
        with pytest.raises(ValueError, match="n must be an integer from 1 to 39"):
            leave_out(some_rows(), n)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="rows of its own"):
        leave_out(some_rows(), 7)


def test_rows_that_repeat_a_planted_value_are_not_left_out() -> None:
    settings = {"tokenizer": TOKENIZER, "count": 5, "seed": 1}
    with pytest.raises(ValueError, match=r"times .* must be \(1,\)"):
        leave_out(with_entities(chats(), PHONE, times=(1, 4), **settings), 20, seed=1)
    once = with_entities(chats(), PHONE, times=(1,), **settings)
    train, others = leave_out(once, 20, seed=1)
    assert len(train) + len(others) == len(once)
