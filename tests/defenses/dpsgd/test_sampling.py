"""What a loader that is split among clients means for the account."""

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.poisson import Draws, Sampling
from lightning_fedleak.defenses.dpsgd.sampling import sampling_of
from lightning_fedleak.defenses.dpsgd.settings import Users
from tests.helpers.inputs import context

Row = tuple[list[int], int]


class Texts(Dataset[Row]):
    """Token ids, and labels."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        return [1 + (7 * index + t) % 96 for t in range(self.lengths[index])], index % 3


VARIOUS = [1] * 60 + [*range(1, 41)]


def padded(rows: Sequence[Row]) -> dict[str, Tensor]:
    ids = pad_sequence([torch.tensor(row) for row, _ in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([y for _, y in rows]),
    }


def longest_first(rows: Sequence[Row]) -> dict[str, Tensor]:
    return padded(sorted(rows, key=lambda row: -len(row[0])))


def with_others(rows: Sequence[Row]) -> dict[str, Tensor]:
    """The next row of the batch as a negative."""
    result = padded(rows)
    return result | {"negative": result["input_ids"].roll(1, 0)}


def masked(rows: Sequence[Row]) -> dict[str, Tensor]:
    """As for masked language models: the labels are drawn too."""
    result = padded(rows)
    ids = result["input_ids"]
    hidden = torch.rand(ids.shape) < 0.3
    return result | {
        "input_ids": ids.masked_fill(hidden, 99),
        "labels": ids.masked_fill(~hidden, -100),
    }


def masked_longest_first(rows: Sequence[Row]) -> dict[str, Tensor]:
    return masked(sorted(rows, key=lambda row: -len(row[0])))


def last_first(rows: Sequence[Row]) -> dict[str, Tensor]:
    return padded(rows[::-1])


def numbered(rows: Sequence[Row]) -> dict[str, Tensor]:
    return padded(rows) | {"number": torch.arange(len(rows))}


def noise(rows: Sequence[Row]) -> Tensor:
    return torch.rand(len(rows), 3)


class Unordered(Texts):
    """As a query whose answer comes by key."""

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[i] for i in sorted(indices)]


def by_user(collate: Any, dataset: Dataset[Any]) -> Sampling:
    return sampling_of(
        DataLoader(dataset, batch_size=4, collate_fn=collate),
        context(),
        Draws(bytes(32)),
        trust="local",
        users=Users([row // 2 for row in range(len(dataset))]),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("collate", "dataset"),
    [
        (longest_first, Texts(VARIOUS)),
        (with_others, Texts(VARIOUS)),
        (masked_longest_first, Texts(VARIOUS)),
        (padded, Unordered(VARIOUS)),
        *((f, Texts([2, 5])) for f in (last_first, longest_first, with_others)),
        (padded, Unordered([2, 5])),
    ],
)
def test_rows_in_another_order_than_the_examples_are_refused_where_users_are_drawn(
    collate: Any, dataset: Dataset[Any]
) -> None:
    """A user's rows are those at their places, so that others' would be clipped as theirs."""
    with pytest.raises(DefenseError, match=f"collate function .{collate.__name__}.*changes"):
        by_user(collate, dataset)


@pytest.mark.parametrize("collate", [padded, masked, numbered])
@pytest.mark.parametrize("lengths", [VARIOUS, [2, 5], [3, 1, 2]])
def test_rows_in_order_are_taken_and_random_numbers_left_as_they_were(
    collate: Any, lengths: Sequence[int]
) -> None:
    before = random.getstate(), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_user(collate, Texts(lengths))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(("collate", "lengths"), [(noise, VARIOUS), (masked, [30] * 20)])
def test_an_order_that_cannot_be_seen_is_said(collate: Any, lengths: Sequence[int]) -> None:
    with pytest.warns(UserWarning, match="could not be checked.*trusted"):
        by_user(collate, Texts(lengths))


def test_a_public_length_decides_rate_steps_and_mean_size_in_place_of_the_length() -> None:
    """So an example that is added or removed changes no draw of the others."""

    class Rows(TensorDataset):
        public_length = 120

    def draw(length: int) -> Sampling:
        loader = DataLoader(Rows(torch.arange(length)), batch_size=8, shuffle=True)
        draws = Draws(bytes(32))
        return sampling_of(loader, context(), draws, trust="local")

    one, more = draw(120), draw(121)
    for sampling in (one, more):
        assert (sampling.rate, sampling.expected, sampling.examples) == (8 / 120, 8.0, 120)
    for first, second in zip(one.loader.batch_sampler, more.loader.batch_sampler, strict=True):
        assert first == [row for row in second if row < 120]


@pytest.mark.parametrize("depth", ["flat", "whole", "in a concatenation", "in a Subset", "in two"])
def test_a_subset_of_a_dataset_with_a_public_length_is_refused(depth: str) -> None:
    """The number of its rows depends on the rows that were left out, however deep they are."""

    class Rows(TensorDataset):
        public_length = 10

    rows = Rows(torch.arange(9))
    wrapped: Any = {
        "flat": rows,
        "whole": Rows(torch.arange(10)),  # another answer would tell that none is missing
        "in a concatenation": ConcatDataset([rows, TensorDataset(torch.arange(3))]),
        "in a Subset": ConcatDataset([Subset(rows, range(5))]),
        "in two": ConcatDataset([ConcatDataset([rows])]),
    }[depth]
    loader = DataLoader(Subset(wrapped, range(4)), batch_size=2, shuffle=True)
    with pytest.raises(DefenseError, match="Take the Subset first"):
        sampling_of(loader, context(), Draws(bytes(32)), trust="local")
