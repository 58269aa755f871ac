"""Who is compared: which rows are drawn, and what is refused."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.released.pool import collect
from lightning_fedleak.engine.channels.released.training_rows import UnplayableGame
from lightning_fedleak.evaluation.canaries import TrainingRows, leave_out, with_entities
from lightning_fedleak.evaluation.canaries.left_out import _LeftOutRecord
from lightning_fedleak.model.batches import TokenBatch, read_batch
from tests.canaries.test_with_entities import PHONE, TOKENIZER

ALL = Memorization(max_overhead=4 / 3)


class SeedableRandomSampler(RandomSampler):
    """Takes the rows in their order, under the name of Accelerate's."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def read(items: dict[str, Tensor]) -> TokenBatch:
    return replace(read_batch(items, "causal"), position_ids=items.get("position_ids"))


def rows(n: int = 400, length: int = 16, seed: int = 0) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 5000, (n, length), generator=g)
    return [{"input_ids": row, "labels": row} for row in ids]


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=8, **(settings or {"shuffle": True}))


def test_rows_to_come_are_compared_with_those_that_have_come() -> None:
    data = rows()
    pool = collect(loader(data), ALL, read)
    assert pool.way == "not yet seen"
    assert len(pool.texts) == 400
    with pytest.raises(UnplayableGame, match="recognised"):
        pool.compared(0, 0)
    for row in data[:100]:
        pool.remember(batch([row]))
    index, members = pool.compared(0, 100)
    assert len(index) == 400
    assert int(members.sum()) == 100
    first = {tuple(row["input_ids"].tolist()) for row in data[:100]}
    assert {tuple(pool.texts[i].ids.tolist()) for i in index[members].tolist()} == first
    with pytest.raises(UnplayableGame, match="after epoch 1: add leave_out"):
        pool.compared(1, 400)


def batch(items: list[dict[str, Tensor]]) -> TokenBatch:
    return read({name: torch.stack([item[name] for item in items]) for name in items[0]})


def test_rows_that_were_held_out_are_compared_with_the_others() -> None:
    train, held_out = leave_out(rows(), 150, seed=0)
    pool = collect(loader(train), ALL, read)
    assert pool.way == "left out"
    assert int((~pool.trains).sum()) == 104  # half of the 208 that 250 rows can pay for
    kept = {tuple(row["input_ids"].tolist()) for row in (held_out[i] for i in range(150))}
    outside = (~pool.trains).nonzero()[:, 0].tolist()
    assert all(tuple(pool.texts[i].ids.tolist()) in kept for i in outside)
    for i in range(len(train)):
        pool.remember(batch([train[i]]))
    index, members = pool.compared(7, len(train))
    assert torch.equal(members, pool.trains[index])


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (lambda data: SequentialSampler(data), "SequentialSampler"),
        (lambda data: RandomSampler(data, replacement=True), "RandomSampler"),
        (
            lambda data: DistributedSampler(data, num_replicas=1, rank=0, shuffle=False),
            "DistributedSampler",
        ),
        (lambda data: SeedableRandomSampler(data), "SeedableRandomSampler"),  # one of a user's own
    ],
)
def test_an_order_that_chance_alone_did_not_choose_needs_left_out_rows(sampler, name) -> None:
    data = rows()
    with pytest.raises(UnplayableGame, match=f"a {name} does not take the rows"):
        collect(loader(data, sampler=sampler(data)), ALL, read)
    train, _ = leave_out(data, 150, seed=0)
    assert collect(loader(train, sampler=SequentialSampler(train)), ALL, read).way == "left out"


@pytest.mark.parametrize(("processes", "seedable"), [(1, True), (2, False)])
def test_a_loader_that_accelerate_prepared_says_how_it_shuffles(processes, seedable) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def prepared(shuffle: bool) -> Any:
        return data_loader.prepare_data_loader(
            DataLoader(rows(), batch_size=4, shuffle=shuffle),  # type: ignore[arg-type]
            num_processes=processes,
            process_index=processes - 1,
            use_seedable_sampler=seedable,
        )

    assert collect(prepared(True), ALL, read).way == "not yet seen"
    with pytest.raises(UnplayableGame, match="a SequentialSampler does not take the rows"):
        collect(prepared(False), ALL, read)


def test_values_planted_in_the_rows_that_stay_make_membership_unknown() -> None:
    data = [{"input_ids": row, "labels": row} for row in torch.randint(40, 90, (600, 60))]
    plant = partial(with_entities, kinds=PHONE, places=["label"], tokenizer=TOKENIZER, seed=1)
    settings = {"times": (1,), "count": 30}
    train, _ = leave_out(data, 150, seed=0)
    with pytest.raises(UnplayableGame, match=r"plant before leave_out, times=\(1,\)"):
        collect(loader(Subset(plant(train, **settings), range(200))), ALL, read)
    train, _ = leave_out(plant(data, **settings), 150, seed=0)
    assert collect(loader(train), ALL, read).way == "left out"
    assert collect(loader(plant(data, **settings)), ALL, read).way == "not yet seen"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


PACKED = [row | {"position_ids": torch.arange(16) % 8} for row in rows()]


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (loader(rows()), {"why_drawn": "a resumed fit"}, "a resumed fit: train on"),
        (DataLoader(Stream(), batch_size=8), {}, "not a stream"),
        ([DataLoader(rows())], {}, "one torch DataLoader"),  # type: ignore[arg-type]
        (None, {}, "loader="),
        (loader(PACKED), {}, "packed rows.*add leave_out"),
    ],
)
def test_loaders_without_rows_to_compare_are_refused(data: Any, settings: Any, words: str) -> None:
    with pytest.raises(UnplayableGame, match=words):
        collect(data, ALL, read, **settings)


def test_rows_that_change_are_refused_and_random_states_are_put_back() -> None:
    class Noisy(Dataset[Any]):
        def __init__(self, noise: bool) -> None:
            self.rows, self.noise = rows(), noise

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            offset = int(torch.randint(2, (1,))) + int(np.random.randint(2)) + random.randint(0, 1)
            row = self.rows[index]
            return {name: ids + offset * self.noise for name, ids in row.items()}

    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    collect(loader(Noisy(False)), ALL, read)
    with pytest.raises(UnplayableGame, match="do not read the same twice"):
        collect(loader(Noisy(True)), ALL, read)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_repeats_and_short_texts_leave_on_both_sides() -> None:
    data = rows()
    data[7] = {name: ids.clone() for name, ids in data[3].items()}
    short = torch.full((16,), -100)
    short[3:5] = 1
    data[11] = {"input_ids": data[11]["input_ids"], "labels": short}
    pool = collect(loader(data), ALL, read)
    assert (pool.repeated, pool.short, len(pool.texts)) == (2, 1, 398)
    assert "2 that other rows repeat and 1 short" in pool.cost
    assert "1 texts that are in several rows are only tested for extraction" in pool.cost
    assert pool.times.tolist() == [1] * 397 + [2]  # both rows are asked about as one text
    assert torch.equal(pool.texts[397].ids, data[3]["input_ids"])
    for row in data[20:100]:
        pool.remember(batch([row]))
    index, members = pool.compared(0, 80)
    assert int(members.sum()) == 80
    assert 397 not in index  # no other: one of its rows may be in the next batch
    for row in data[:20]:
        pool.remember(batch([row]))
    index, members = pool.compared(0, 100)
    alone = pool.alone[index]
    assert int(members[alone].sum()) == 97  # without both copies and the short one
    assert int((~members).sum()) == 300
    assert index[~alone].tolist() == [397]
    assert members[~alone].all()


@pytest.mark.parametrize("way", ["not yet seen", "left out"])
def test_recognised_rows_may_fall_short_by_chance_alone(way: str) -> None:
    """The least number that five standard deviations allow is known, and one fewer is not."""
    data = rows(800)
    pool = collect(
        loader(data if way == "not yet seen" else leave_out(data, 200, seed=0)[0]), ALL, read
    )
    inside = pool.trains.nonzero()[:, 0]
    n, length = len(inside), pool.length
    passed = length // 2
    share = passed / length if pool.once else -math.expm1(-passed / length)
    fewest = math.ceil(n * share - 5 * math.sqrt(n * share * (1 - share)) - 1)
    assert 10 < fewest < n * share - 20
    pool.seen[inside[:fewest]] = True
    assert int(pool.compared(0, passed)[1].sum()) == fewest
    pool.seen[inside[0]] = False
    with pytest.raises(UnplayableGame, match=f"only {fewest - 1} of {n} rows were recognised"):
        pool.compared(0, passed)


def test_the_budget_sets_how_many_are_asked_and_the_refusal_how_many_would_be() -> None:
    data = rows(2000)
    pool = collect(loader(data), Memorization(max_overhead=0.2), read)
    assert len(pool.texts) == int(0.2 * 2000 / (0.4 * 3))
    with pytest.raises(
        UnplayableGame, match=r"allow 33 of 200 .*leave_out\(rows, 100.*n\(max_overhead=0.17\)\)"
    ):
        collect(loader(data), Memorization(), read)
    with pytest.raises(
        UnplayableGame, match=r"allow 0 of 40 .*leave_out\(rows, 20.*n\(max_overhead=3.2\)\)"
    ):
        collect(loader(rows(40)), Memorization(), read)
    with pytest.raises(UnplayableGame, match=r"16 rows .* 20 rows are the fewest"):
        collect(loader(rows(16)), Memorization(), read)


@pytest.mark.parametrize(("n", "shuffle"), [(20, True), (40, False), (160, False), (877, True)])
def test_what_a_refusal_advises_is_all_that_is_needed(n: int, shuffle: bool) -> None:
    with pytest.raises(UnplayableGame) as refusal:
        collect(loader(rows(n), shuffle=shuffle), Memorization(), read)
    advice = r"leave_out\(rows, (\d+), seed=1\).*memorization=(.*)\)"
    [(others, setting)] = re.findall(advice, str(refusal.value))
    train, _ = leave_out(rows(n), int(others), seed=1)
    pool = collect(loader(train, shuffle=shuffle), eval(setting), read)
    assert min(int(pool.trains.sum()), int((~pool.trains).sum())) == min(100, n // 2)


def test_what_is_asked_of_rows_with_coins_depends_on_no_coin() -> None:
    """Two worlds in which one coin fell otherwise: the same texts in the same order."""

    class OtherCoin(_LeftOutRecord):
        @property
        def out(self) -> list[int]:
            return sorted({*super().out} ^ {self.candidates[5]})

    train, _ = leave_out(rows(), 150, seed=0, coins=True)
    changed = TrainingRows(train.dataset, OtherCoin(**vars(train.record)))
    assert abs(len(changed) - len(train)) == 1
    pool, other = (collect(loader(data), ALL, read) for data in (train, changed))
    assert pool.no_game is None
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(pool.texts, other.texts, strict=True))
    assert int((pool.trains != other.trains).sum()) <= 1
    assert 0 < int(pool.trains.sum()) < len(pool.texts) == len(other.texts)
    inside = {tuple(train[i]["input_ids"].tolist()) for i in range(len(train))}
    for text, member in zip(pool.texts, pool.trains.tolist(), strict=True):
        assert (tuple(text.ids.tolist()) in inside) == member
    for i in range(20):
        pool.remember(batch([train[i]]))
    with pytest.raises(UnplayableGame):
        pool.compared(0, 0)  # fewer than ten of them were asked about
    index, members = pool.compared(0, 0, everyone=True)
    assert torch.equal(members, pool.trains)
    assert torch.equal(index, torch.arange(len(pool.texts)))


@pytest.mark.parametrize(
    ("data", "settings", "why"),
    [
        (rows(), ALL, "by whether they were drawn"),
        (rows(), Memorization(others=rows(200, seed=9), max_overhead=4 / 3), "no draw decided"),
        (leave_out(rows(), 150, seed=0)[0], ALL, "a fixed number of rows was held out"),
        (
            Subset(leave_out(rows(500), 150, seed=0, coins=True)[0], range(300)),
            ALL,
            "data set wraps",
        ),
    ],
)
def test_other_texts_are_no_game_of_an_account(data: Any, settings: Any, why: str) -> None:
    assert why in (collect(loader(data), settings, read).no_game or "")
