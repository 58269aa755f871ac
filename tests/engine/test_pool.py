"""Who is compared: which rows are drawn, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
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
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.pool import NoOthers, collect
from lightning_fedleak.evaluation.canaries import LeftOutRecord, TrainingRows, leave_out
from lightning_fedleak.model.batches import TokenBatch, read_batch

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


def test_rows_not_yet_seen_are_the_others() -> None:
    data = rows()
    pool = collect(loader(data), ALL, read)
    assert pool.way == "not yet seen"
    assert len(pool.texts) == 400
    with pytest.raises(NoOthers, match="recognised"):
        pool.compared(0, 0)
    for row in data[:100]:
        pool.remember(batch([row]))
    index, members = pool.compared(0, 100)
    assert len(index) == 400
    assert int(members.sum()) == 100
    first = {tuple(row["input_ids"].tolist()) for row in data[:100]}
    found = {tuple(pool.texts[i].ids.tolist()) for i in index[members].tolist()}
    assert found == first
    with pytest.raises(NoOthers, match="after epoch 1: add leave_out"):
        pool.compared(1, 400)


def batch(items: list[dict[str, Tensor]]) -> TokenBatch:
    return read({name: torch.stack([item[name] for item in items]) for name in items[0]})


def test_rows_that_were_left_out_are_the_others() -> None:
    train, others = leave_out(rows(), 150, seed=0)
    pool = collect(loader(train), ALL, read)
    assert pool.way == "left out"
    assert int((~pool.trains).sum()) == 104  # half of the 208 that 250 rows can pay for
    kept = {tuple(row["input_ids"].tolist()) for row in (others[i] for i in range(150))}
    outside = (~pool.trains).nonzero()[:, 0].tolist()
    assert all(tuple(pool.texts[i].ids.tolist()) in kept for i in outside)
    for i in range(len(train)):
        pool.remember(batch([train[i]]))
    index, members = pool.compared(7, len(train))
    assert torch.equal(members, pool.trains[index])


def test_left_out_rows_are_found_behind_other_data_sets() -> None:
    class Wrapped(Dataset[Any]):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> Any:
            return self.dataset[index]

    train, _ = leave_out(rows(), 150, seed=0)
    assert collect(loader(Wrapped(train)), ALL, read).way == "left out"


def test_texts_of_the_users_own() -> None:
    settings = Memorization(others=rows(200, seed=9), max_overhead=4 / 3)
    pool = collect(loader(rows(), shuffle=False), settings, read)
    assert pool.way == "given"
    assert (~pool.trains).any()


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (lambda data: SequentialSampler(data), "SequentialSampler"),
        (lambda data: WeightedRandomSampler([1.0] * 400, 400), "WeightedRandomSampler"),
        (lambda data: RandomSampler(data, replacement=True), "RandomSampler"),
        (lambda data: RandomSampler(data, num_samples=100), "RandomSampler"),
        (
            lambda data: DistributedSampler(data, num_replicas=1, rank=0, shuffle=False),
            "DistributedSampler",
        ),
        (lambda data: SeedableRandomSampler(data), "SeedableRandomSampler"),  # one of a user's own
    ],
)
def test_an_order_that_chance_alone_did_not_choose_needs_left_out_rows(
    sampler: Any, name: str
) -> None:
    data = rows()
    with pytest.raises(NoOthers, match=f"a {name} does not take the rows"):
        collect(loader(data, sampler=sampler(data)), ALL, read)
    train, _ = leave_out(data, 150, seed=0)
    assert collect(loader(train, sampler=SequentialSampler(train)), ALL, read).way == "left out"


def test_a_distributed_shuffle_is_accepted() -> None:
    data = rows()
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)  # type: ignore[arg-type]
    assert collect(loader(data, sampler=sampler), ALL, read).way == "not yet seen"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seedable", [True, False])
def test_a_loader_that_accelerate_prepared_is_asked_how_it_shuffles(
    processes: int, seedable: bool
) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def prepared(shuffle: bool) -> Any:
        return data_loader.prepare_data_loader(
            DataLoader(rows(), batch_size=4, shuffle=shuffle),  # type: ignore[arg-type]
            num_processes=processes,
            process_index=processes - 1,
            use_seedable_sampler=seedable,
        )

    assert collect(prepared(True), ALL, read).way == "not yet seen"
    with pytest.raises(NoOthers, match="a SequentialSampler does not take the rows"):
        collect(prepared(False), ALL, read)


def test_a_resumed_fit_has_no_rows_that_were_surely_not_seen() -> None:
    with pytest.raises(NoOthers, match="resumed fit"):
        collect(loader(rows()), ALL, read, resumed=True)


def test_streams_and_other_loaders_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows())

    with pytest.raises(NoOthers, match="read as a stream"):
        collect(DataLoader(Stream(), batch_size=8), ALL, read)
    with pytest.raises(NoOthers, match="one torch DataLoader"):
        collect([DataLoader(rows())], ALL, read)
    with pytest.raises(NoOthers, match="pass loader="):
        collect(None, ALL, read)


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
    with pytest.raises(NoOthers, match="do not read the same twice"):
        collect(loader(Noisy(True)), ALL, read)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_a_collate_function_that_empties_its_items_leaves_the_data() -> None:
    data = rows()

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([item.pop(name) for item in items]) for name in [*items[0]]}

    collect(DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate), ALL, read)  # type: ignore[arg-type]
    assert all(set(row) == {"input_ids", "labels"} for row in data)


def test_packed_rows_need_left_out_rows() -> None:
    data = [row | {"position_ids": torch.arange(16) % 8} for row in rows()]
    with pytest.raises(NoOthers, match="packed into a row"):
        collect(loader(data), ALL, read)


def test_repeats_and_short_texts_leave_on_both_sides() -> None:
    data = rows()
    data[7] = {name: ids.clone() for name, ids in data[3].items()}
    short = torch.full((16,), -100)
    short[3:5] = 1
    data[11] = {"input_ids": data[11]["input_ids"], "labels": short}
    pool = collect(loader(data), ALL, read)
    assert (pool.repeated, pool.short, len(pool.texts)) == (2, 1, 398)
    assert "2 that other rows repeat and 1 short" in pool.cost
    assert "1 texts that stand in several rows are asked about alone" in pool.cost
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
    told = pool.alone[index]
    assert int(members[told].sum()) == 97  # neither copy is told from others, nor the short one
    assert int((~members).sum()) == 300
    assert index[~told].tolist() == [397]
    assert members[~told].all()


def test_rows_that_are_not_asked_about_are_searched_for_repeats() -> None:
    """A copy and a near copy of rows that are asked about stand among those that are not."""
    data = rows(2000, 32)
    settings = Memorization(max_overhead=0.2)
    drawn = {tuple(text.ids.tolist()) for text in collect(loader(data), settings, read).texts}
    asked = [n for n, row in enumerate(data) if tuple(row["input_ids"].tolist()) in drawn]
    unasked = [n for n in range(2000) if n not in asked]
    assert len(asked) == 333
    for place, near in ((0, False), (1, True)):
        ids = data[asked[place]]["input_ids"].clone()
        ids[12] = 4 if near else ids[12]
        data[unasked[place]] = {"input_ids": ids, "labels": ids}
    pool = collect(loader(data), settings, read)
    assert (pool.repeated, pool.searched) == (2, 1.0)
    assert pool.times.tolist() == [1] * 331 + [2, 2]
    groups = {tuple(text.ids.tolist()) for text in pool.texts[331:]}
    assert groups == {tuple(data[n]["input_ids"].tolist()) for n in asked[:2]}


def test_only_so_many_rows_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fedleak.engine.channels.pool.MOST_ROWS", 400)
    pool = collect(loader(rows(2000)), Memorization(max_overhead=0.2), read)
    assert pool.searched == pytest.approx(400 / (2000 - 333))
    assert "(in 24% of the rows)" in pool.cost


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
    least = math.ceil(n * share - 5 * math.sqrt(n * share * (1 - share)) - 1)
    assert 10 < least < n * share - 20
    pool.seen[inside[:least]] = True
    assert int(pool.compared(0, passed)[1].sum()) == least
    pool.seen[inside[0]] = False
    with pytest.raises(NoOthers, match=f"only {least - 1} of {n} rows were recognised"):
        pool.compared(0, passed)


def test_copies_do_not_stand_for_rows_that_are_not_recognised() -> None:
    """A text that stands in three rows is met sooner than one that stands in one."""
    data = rows(600)
    for n in range(0, 300, 3):
        data[n + 1] = data[n + 2] = data[n]
    pool = collect(loader(data), ALL, read)
    n = int(pool.alone.sum())
    assert (n, len(pool.texts)) == (300, 400)
    pool.seen[n:] = True
    least = math.ceil(n / 2 - 5 * math.sqrt(n / 4) - 1)
    pool.seen[:least] = True
    assert int(pool.compared(0, 300)[1].sum()) == least + 100
    pool.seen[0] = False
    with pytest.raises(NoOthers, match=f"only {least - 1} of 300 rows were recognised"):
        pool.compared(0, 300)


def test_copies_are_no_unit_of_the_game_of_an_account() -> None:
    """Each row has a coin of its own. Which texts play, and in which order, depends on none."""

    class OtherCoin(LeftOutRecord):
        @property
        def out(self) -> list[int]:
            return sorted({*super().out} ^ set(self.candidates[:40]))

    data = rows(400)
    for n in range(0, 120, 3):
        data[n + 1] = data[n + 2] = data[n]
    train, _ = leave_out(data, 150, seed=0, coins=True)
    changed = TrainingRows(train.dataset, OtherCoin(**vars(train.record)))
    pool, other = (collect(loader(one), ALL, read, chooses=True) for one in (train, changed))
    play = [
        [text.ids.tolist() for text in one.texts[: int(one.alone.sum())]] for one in (pool, other)
    ]
    assert play[0] == play[1]
    n = len(play[0])
    assert pool.alone[:n].all()
    assert other.alone[:n].all()
    assert torch.equal(pool.aside[:n], other.aside[:n])
    copies = {tuple(data[n]["input_ids"].tolist()) for n in range(0, 120, 3)}
    assert not copies & {tuple(ids) for ids in play[0]}
    groups = pool.texts[n:]
    inside = [tuple(train[i]["input_ids"].tolist()) for i in range(len(train))]
    assert 10 < len(groups) <= 40
    for text, times in zip(groups, pool.times[n:].tolist(), strict=True):
        assert inside.count(tuple(text.ids.tolist())) == times > 1
    assert pool.trains[n:].all()


def test_the_budget_sets_how_many_are_asked_and_the_refusal_how_many_would_be() -> None:
    data = rows(2000)
    pool = collect(loader(data), Memorization(max_overhead=0.2), read)
    assert len(pool.texts) == int(0.2 * 2000 / (0.4 * 3))
    with pytest.raises(
        NoOthers, match=r"only 33 texts can .* 2000 rows.* Memorization\(max_overhead=0.12\)"
    ):
        collect(loader(data), Memorization(), read)
    with pytest.raises(NoOthers, match=r"only 0 texts can .* Memorization\(max_overhead=6\)"):
        collect(loader(rows(40)), Memorization(), read)


def test_every_process_draws_the_same_rows() -> None:
    data = rows(2000)
    settings = Memorization(max_overhead=0.2)
    pools = [collect(loader(data), settings, read) for _ in range(2)]
    first, second = ([text.ids.tolist() for text in pool.texts] for pool in pools)
    assert first == second


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_overhead": 0.0},
        {"alpha": 1.0},
        {"looks": (0.0,)},
        {"looks": (0.9, 0.5)},
        {"most_texts": 5},
        {"seed": -1},
    ],
)
def test_a_setting_out_of_range_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Memorization(**arguments)


def test_rows_that_are_not_recognised_in_batches_are_unknown() -> None:
    """A collate function that cuts a batch to its shortest row: alone, a row is read whole."""
    data = [{"input_ids": r["input_ids"][: 10 + n % 7]} for n, r in enumerate(rows())]

    def cut(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        shortest = min(len(item["input_ids"]) for item in items)
        return {"input_ids": torch.stack([item["input_ids"][:shortest] for item in items])}

    pool = collect(DataLoader(data, batch_size=8, shuffle=True, collate_fn=cut), ALL, read)  # type: ignore[arg-type]
    for start in range(0, 200, 8):
        pool.remember(read(cut(data[start : start + 8])))
    assert pool.passed == 200
    assert 0 < pool.seen.sum() < 100
    with pytest.raises(NoOthers, match=r"only \d+ of 400 rows were recognised"):
        pool.compared(0, pool.passed)


def test_rows_that_a_collate_function_merges_are_counted_apart() -> None:
    """What passes is counted in texts, however many of them a row of the batch holds."""

    def merge(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        places = [torch.arange(len(item["input_ids"])) for item in items]
        ids = torch.cat([item["input_ids"] for item in items])[None]
        return {"input_ids": ids, "labels": ids, "position_ids": torch.cat(places)[None]}

    data = rows()
    pool = collect(DataLoader(data, batch_size=8, shuffle=True, collate_fn=merge), ALL, read)  # type: ignore[arg-type]
    for start in range(0, 200, 8):
        pool.remember(read(merge(data[start : start + 8])))
    assert pool.passed == int(pool.seen.sum()) == 200
    assert pool.length == 400
    pairs = [merge(data[n : n + 2]) for n in range(0, 400, 2)] * 2
    train = leave_out(pairs, 60, seed=0)[0]
    packed = DataLoader(train, batch_size=1, collate_fn=lambda items: items[0])
    assert collect(packed, ALL, read).length == 2 * 340


def test_what_is_asked_of_rows_with_coins_depends_on_no_coin() -> None:
    """Two worlds in which one coin fell otherwise: the same texts in the same order."""

    class OtherCoin(LeftOutRecord):
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
    with pytest.raises(NoOthers):
        pool.compared(0, 0)  # fewer than ten of them were asked about
    index, members = pool.compared(0, 0, everyone=True)
    assert torch.equal(members, pool.trains)
    assert torch.equal(index, torch.arange(len(pool.texts)))


@pytest.mark.parametrize(
    ("data", "settings", "why"),
    [
        (rows(), ALL, "by whether they were drawn"),
        (rows(), Memorization(others=rows(200, seed=9), max_overhead=4 / 3), "no coin decided"),
        (leave_out(rows(), 150, seed=0)[0], ALL, "the number of rows left out was fixed"),
        (
            Subset(leave_out(rows(500), 150, seed=0, coins=True)[0], range(300)),
            ALL,
            "data set wraps",
        ),
    ],
)
def test_other_texts_are_no_game_of_an_account(data: Any, settings: Any, why: str) -> None:
    assert why in (collect(loader(data), settings, read).no_game or "")
