"""Poisson sampling: its rates, its independence, its loaders."""

from collections import namedtuple
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from transformers import BatchEncoding

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.dpsgd.poisson import Draws, EmptyCollate, PoissonBatchSampler
from lightning_fedleak.defenses.dpsgd.sampling import check_torch_loader, poisson_loader

SECRET = bytes(range(32))


def sampler(n: int = 200, rate: float = 0.1, **changes) -> PoissonBatchSampler:
    return PoissonBatchSampler(range(n), rate, 10, Draws(**{"entropy": SECRET, **changes}))


def masks(source: PoissonBatchSampler, steps: int, first: int = 0) -> np.ndarray:
    result = np.zeros((steps, max(source.shard) + 1), dtype=bool)
    for step in range(steps):
        result[step, source.draw(first + step)] = True
    return result


def numbers(n: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(2 * n).reshape(n, 2), torch.arange(n))


def poisson(loader: DataLoader, rate: float = 0.1, **changes) -> DataLoader:
    names = {"entropy", "client", "first_step"}
    where = {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    draws = Draws(**{"entropy": SECRET, **where})
    check_torch_loader(loader)
    return poisson_loader(loader, rate, draws, **rest)


# ---- the law --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.003, 1 / 32, 0.5, 0.97])
def test_every_example_comes_at_the_rate(rate: float) -> None:
    steps, n = 1000, 200
    drawn = masks(sampler(n, rate), steps)
    assert scipy.stats.binomtest(int(drawn.sum()), steps * n, rate).pvalue > 1e-4
    z = (drawn.sum(0) - steps * rate) / np.sqrt(steps * rate * (1 - rate))
    assert scipy.stats.chi2.sf((z**2).sum(), n) > 1e-4  # no example more often than another
    assert scipy.stats.chi2.cdf((z**2).sum(), n) > 1e-4  # nor too evenly


def test_batch_sizes_are_binomial() -> None:
    n, rate, steps = 40, 0.05, 4000
    sizes = masks(sampler(n, rate), steps).sum(1)
    law = scipy.stats.binom(n, rate)
    observed = np.array([*((sizes == k).sum() for k in range(6)), (sizes > 5).sum()])
    expected = steps * np.array([*(law.pmf(k) for k in range(6)), law.sf(5)])
    assert observed[0] > 0  # empty batches come too
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def _independent(a: np.ndarray, b: np.ndarray) -> float:
    table = [[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]]
    return float(scipy.stats.chi2_contingency(table).pvalue)


def test_clients_shards_steps_and_secrets_draw_independently() -> None:
    drawn = masks(sampler(rate=0.3), 300)
    rest = {
        "client": masks(sampler(rate=0.3, client=1), 300),
        "secret": masks(sampler(rate=0.3, entropy=SECRET[::-1]), 300),
        "step": masks(sampler(rate=0.3), 300, first=300),
        "next step": masks(sampler(rate=0.3), 300, first=1),
    }
    for other in rest.values():
        assert not np.array_equal(drawn, other)
        assert _independent(drawn, other) > 1e-4
    neighbours = drawn[:, :-1], drawn[:, 1:]
    assert _independent(*neighbours) > 1e-4
    shards = [PoissonBatchSampler(range(r, 400, 2), 0.3, 1, Draws(SECRET)) for r in (0, 1)]
    even, odd = (np.stack([np.isin(list(s.shard), s.draw(k)) for k in range(300)]) for s in shards)
    assert not np.array_equal(even, odd)
    assert _independent(even, odd) > 1e-4


def test_a_resumed_run_repeats_no_mask() -> None:
    first = sampler()
    before = [tuple(batch) for _ in range(3) for batch in first]
    assert first.step == 30
    resumed = sampler(first_step=first.step)
    after = [tuple(batch) for _ in range(3) for batch in resumed]
    rewound = [tuple(batch) for batch in sampler(entropy=b"n" * 32)]  # a new fit, an old counter
    everything = before + after + rewound
    assert len(set(everything)) == len(everything)


@given(st.integers(1, 300), st.floats(1e-6, 1.0), st.integers(0, 2**40))
def test_any_draw_is_a_sorted_part_of_the_shard(n: int, rate: float, step: int) -> None:
    drawn = PoissonBatchSampler(range(3, 3 + 2 * n, 2), rate, 1, Draws(SECRET, 7)).draw(step)
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(range(3, 3 + 2 * n, 2))
    if rate == 1:
        assert len(drawn) == n


# ---- loaders --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_drawn_examples(workers: int) -> None:
    loader = poisson(DataLoader(numbers(), batch_size=2, shuffle=True, num_workers=workers))
    assert len(loader) == 10
    for epoch in range(2):
        expected = [sampler(20).draw(epoch * 10 + step) for step in range(10)]
        batches = list(loader)
        assert [batch[1].tolist() for batch in batches] == expected
        assert [batch[0].shape for batch in batches] == [(len(drawn), 2) for drawn in expected]
        assert all(batch[0].dtype == torch.int64 for batch in batches)
    assert [] in expected


def test_under_a_distributed_sampler_the_shard_is_the_clients_own() -> None:
    dataset = numbers(11)  # torch would repeat one example to make three shards alike
    observed: list[int] = []
    for rank in range(3):
        split = DistributedSampler(dataset, num_replicas=3, rank=rank, shuffle=True)
        loader = DataLoader(dataset, batch_size=2, sampler=split)
        (batch,) = poisson(loader, 1.0, client=rank)
        assert batch[1].tolist() == list(range(rank, 11, 3))
        observed += batch[1].tolist()
    assert sorted(observed) == list(range(11))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Shapeless(Dataset):
    def __getitem__(self, index):
        return index


class OwnBatches(BatchSampler):
    pass


class Twice(RandomSampler):
    """Of a class of torch's, with a way of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 0])


class TwiceApart(DistributedSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 0])


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter(())


class FailsOnNothing(TensorDataset):
    def __getitems__(self, indices):
        return [indices[0]] * len(indices)


class NeverEmpty(TensorDataset):
    def __getitems__(self, indices):
        return [self[i] for i in indices or [0]]


DATA = numbers()
WEIGHTED = WeightedRandomSampler([1.0] * 20, 20)


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        ([1, 2], "DataLoader"),
        (DataLoader(Stream(), batch_size=2), "map-style"),
        (DataLoader(DATA, batch_size=None), "batch_size"),
        (DataLoader(Shapeless(), batch_size=2, sampler=[0]), "map-style"),
        (
            DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, True)),
            "OwnBatches",
        ),
        (DataLoader(DATA, batch_sampler=[[0], [1]]), "batch_size .* not a list"),
        (OwnLoader(DATA, batch_size=2), "OwnLoader"),
        (DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([1, 2])), "Subset"),
        (DataLoader(DATA, batch_size=2, sampler=WEIGHTED), "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "RandomSampler"),
        (DataLoader(DATA, sampler=DistributedSampler(numbers(9), 2, 0)), "DistributedSampler"),
        (DataLoader(DATA, sampler=[0, 0, 1]), "in place of list"),
        (DataLoader(DATA, sampler=Twice(DATA)), "Twice"),
        (DataLoader(DATA, sampler=TwiceApart(DATA, 2, 0)), "TwiceApart"),
        (DataLoader(DATA, sampler=DistributedSamplerWrapper(WEIGHTED, 2, 0)), "WeightedRandom"),
        (poisson(DataLoader(DATA, batch_size=2)), "not a SecretLoader"),
        (DataLoader(Subset(DATA, []), batch_size=2), "no examples"),
        (DataLoader(FailsOnNothing(torch.ones(3)), batch_size=2), "IndexError"),
        (DataLoader(NeverEmpty(torch.ones(3)), batch_size=2), "gives 1: let it return"),
    ],
)
def test_loaders_that_are_refused(loader, word: str) -> None:
    with pytest.raises(DefenseError, match=word):
        poisson(loader)


# ---- empty batches --------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "texts"])


def collate(examples: list[int]) -> dict:
    n = len(examples)
    return {
        "input_ids": torch.ones(n, 5, dtype=torch.long),
        "time_first": torch.ones(5, n),
        "texts": [f"text {e}" for e in examples],
        "pair": Pair(torch.ones(n), tuple("ab" for _ in examples)),
        "encoding": BatchEncoding({"input_ids": torch.ones(n, 3, dtype=torch.int32)}),
        "array": np.ones((n, 2)),
        "causal_mask": torch.ones(5, 5),
        "scale": 0.5,
        "name": "train",
        "nothing": None,
        "layers": [torch.ones(n, 2), torch.ones(n, 3)],
        "dicts": [{"x": torch.ones(4)} for _ in examples],
    }


def test_an_empty_batch_keeps_the_form_and_holds_nothing() -> None:
    batch = EmptyCollate(collate, [1, 2, 3], 1)([])
    assert batch["input_ids"].shape == (0, 5)
    assert batch["input_ids"].dtype == torch.long
    assert batch["time_first"].shape == (5, 0)
    assert batch["texts"] == []
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].x.shape == (0,)
    assert batch["pair"].texts == ()
    assert isinstance(batch["encoding"], BatchEncoding)
    assert batch["encoding"]["input_ids"].shape == (0, 3)
    assert batch["array"].shape == (0, 2)
    assert torch.equal(batch["causal_mask"], torch.ones(5, 5))
    assert (batch["scale"], batch["name"], batch["nothing"]) == (0.5, "train", None)
    assert [layer.shape for layer in batch["layers"]] == [(0, 2), (0, 3)]
    assert batch["dicts"] == []


@pytest.mark.parametrize("rows", [1, 6])
def test_a_collate_function_that_splits_or_packs_examples_is_refused(rows: int) -> None:
    def collate(examples: list[int]) -> dict:
        n = rows if len(examples) == 3 else len(examples)
        return {"ids": torch.ones(n, 4), "pair": (torch.ones(n), ["a"])}

    wrapped = EmptyCollate(collate, [1, 2], 0)
    assert wrapped([5, 6])["ids"].shape == (2, 4)
    with pytest.raises(DefenseError, match=f"made {rows} rows of 3 examples"):
        wrapped([5, 6, 7])
