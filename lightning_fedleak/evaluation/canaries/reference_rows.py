"""Rows that reference models are trained on, drawn without looking at who is a member.

A reference must not have seen a row that it scores, and which rows it is trained on must not depend
on who is a member. Trained on the non-members themselves it would tell members of a model that was
trained on none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


def halves(n: int, count: int, seed: int = 0) -> Tensor:
    """Return (count, n) bool, the rows that each reference is trained on.

    Reference 2 k + 1 is trained on the rows that reference 2 k is not trained on.
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(0, count, 2):
        inside = torch.randperm(n, generator=generator) < n // 2
        rows += [inside, ~inside]
    return torch.stack(rows[:count])


def draw_references(asked: int, rest: int, rows: int, seed: int) -> Tensor:
    """Return (K, asked + rest) bool, which rows each of K references is trained on.

    Where ``rest`` has so many rows, one reference is trained on them and scores all that are asked
    about. Else there are two, on random halves of everything, each of which scores the rows that it
    was not trained on. Neither looks at who is a member, so that members and others stay
    exchangeable.

    Args:
        asked: rows that the models are asked about; they come first.
        rest: further rows, in random order.
        rows: The rows that one reference is to be trained on.
        seed: draws the halves.
    """
    if rows > rest:
        return halves(asked + rest, 2, seed)
    places = torch.arange(asked + rest)[None]
    return (places >= asked) & (places < asked + rows)


@dataclass(frozen=True)
class _ReferenceData(Dataset[Any]):
    """Some rows of the user's data, as a data set.

    Attributes:
        sources: For each row a data set, and its place in it.
    """

    sources: Sequence[tuple[Any, int]]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        dataset, row = self.sources[index]
        return dataset[row]


@dataclass(frozen=True)
class ReferenceRows:
    """The rows that references are trained on.

    Attributes:
        sources: n rows of the user's data, members and others: a data set, and the place in it.
        inside: (K, n) bool, which of them each of one or two references is trained on.
        row_of: (N,) int64, the row that each of the N texts stands in that the models are asked
            about.
    """

    sources: Sequence[tuple[Any, int]]
    inside: Tensor
    row_of: Tensor

    @property
    def data(self) -> list[_ReferenceData]:
        """Return what each reference is trained on."""
        rows = (inside.nonzero()[:, 0].tolist() for inside in self.inside)
        return [_ReferenceData([self.sources[n] for n in chosen]) for chosen in rows]

    @property
    def seen(self) -> Tensor:
        """Return (N,) bool, the texts that the first reference is trained on, and the last not."""
        return self.inside[0, self.row_of]
