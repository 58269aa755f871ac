"""The training rows of reference models, drawn independently of membership.

A *reference model* is trained like the audited model, but on other rows. How likely it finds a text
shows how likely the text is without having been trained on. A *member* is a row that the audited
model is trained on.

A reference must not be trained on a row that it scores, and its training rows must not depend on
membership. A reference that was trained on exactly the non-members would report members even for a
model that was trained on no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


def halves(n: int, count: int, seed: int = 0) -> Tensor:
    """Return (count, n) bool, the random half of the rows that each reference is trained on.

    References 2 k and 2 k + 1 have complementary halves.
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(0, count, 2):
        inside = torch.randperm(n, generator=generator) < n // 2
        rows += [inside, ~inside]
    return torch.stack(rows[:count])


def draw_references(n_queried: int, rest: int, rows: int, seed: int) -> Tensor:
    """Return (K, n_queried + rest) bool, the rows that each of K references is trained on.

    If there are enough further rows, one reference is trained on ``rows`` of them, and scores all
    queried rows. Else there are two references, on complementary random halves of all rows; each
    scores the rows that it was not trained on. Neither choice depends on membership, so members and
    non-members stay exchangeable.

    Args:
        n_queried: The number of queried rows, which come first.
        rest: The number of further rows, which are in random order.
        rows: The number of rows that one reference needs.
        seed: The seed of the halves.
    """
    if rows > rest:
        return halves(n_queried + rest, 2, seed)
    places = torch.arange(n_queried + rest)[None]
    return (places >= n_queried) & (places < n_queried + rows)


@dataclass(frozen=True)
class _ReferenceData(Dataset[Any]):
    """Some rows of the user's data, as a data set.

    Attributes:
        sources: The data set and the index of each row.
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
        sources: The data set and the index of each of n rows, members and non-members.
        inside: (K, n) bool, the rows that each of one or two references is trained on.
        row_of: (N,) int64, the row of each of the N queried texts.
    """

    sources: Sequence[tuple[Any, int]]
    inside: Tensor
    row_of: Tensor

    @property
    def data(self) -> list[_ReferenceData]:
        """Return the training data of each reference."""
        indices = (is_inside.nonzero()[:, 0].tolist() for is_inside in self.inside)
        return [_ReferenceData([self.sources[i] for i in rows]) for rows in indices]

    @property
    def seen(self) -> Tensor:
        """Return (N,) bool, the texts that the first reference is trained on.

        A second reference is trained on the other texts.
        """
        return self.inside[0, self.row_of]
