"""Where examples stand in a dataset, and whether that has changed.

Where noise is correlated over steps, the steps that an example may be in follow from its place. One
that moves in the middle of a mechanism takes part more often than is accounted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_fedleak.defenses.dpsgd.poisson import origins
from lightning_fedleak.lightning_packages import both

READ = 16
"""Examples by whose contents it is seen whether a dataset is in the same order."""


@dataclass(frozen=True)
class Places:
    """Digests of what stands where. Of the data, so they are for this user's eyes only.

    Attributes:
        order: of this process's places, the users' keys and rows, and the indices of Subset and
            ConcatDataset.
        contents: of each field of a few examples that is alike in two readings. What is drawn anew
            (augmentation) tells no order.
    """

    order: str
    contents: dict[str, str]

    def differ(self, other: Places) -> bool:
        """Whether examples are seen to stand elsewhere."""
        both_tell = self.contents.keys() & other.contents.keys()
        return self.order != other.order or any(
            self.contents[field] != other.contents[field] for field in both_tell
        )


def places_of(
    dataset: Any, shard: range, users: Mapping[Any, Sequence[int]] | None = None
) -> Places:
    """What is seen of them. The global generators are left as they were.

    Args:
        dataset: map-style.
        shard: places of this process, or numbers of its users.
        users: the rows of each, by key.
    """
    order = hashlib.sha256(f"{shard!r} {len(dataset)}".encode())
    for key, rows in (users or {}).items():
        order.update(f"\0{[*plain(key)]!r} {[*rows]!r}".encode())
    if isinstance(dataset, Subset | ConcatDataset):
        sources, places = origins(dataset)
        _, first, number = np.unique(sources, return_index=True, return_inverse=True)
        # Identities are others in the next process: a source is numbered by where it is met first.
        order.update(np.stack((first[number], places)).astype("<i8").tobytes())
    last = len(dataset) - 1
    chosen = sorted({last * i // (READ - 1) for i in range(READ)})
    [isolate_rng, *_] = both("utilities.seed.isolate_rng")
    with isolate_rng(include_cuda=False):
        once, again = (_contents(dataset, chosen) for _ in range(2))
    return Places(order.hexdigest(), {f: d for f, d in once.items() if again.get(f) == d})


def plain(value: Any) -> Iterator[str]:
    """The numbers and words in an example."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain(item)
    elif hasattr(value, "tolist"):
        yield repr(value.tolist())
    elif hasattr(value, "tobytes"):  # an image
        yield repr(value.tobytes())
    elif isinstance(value, str | bytes | int | float):
        yield repr(value)


def _contents(dataset: Any, chosen: Sequence[int]) -> dict[str, str]:
    found: dict[str, Any] = {}
    for place in chosen:
        for field, text in _fields(dataset[place]):
            digest = found.setdefault(field, hashlib.sha256())
            digest.update(f"\0{place} {text}".encode())
    return {field: digest.hexdigest() for field, digest in found.items()}


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        items = enumerate(value)
    else:
        yield name, "\0".join(plain(value))
    for key, item in items:
        yield from _fields(item, f"{name}/{key}")


__all__ = ["Places", "places_of", "plain"]
