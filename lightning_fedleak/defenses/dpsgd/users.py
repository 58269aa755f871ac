"""Users as the unit of privacy: the rows of each, and whether a batch keeps their order."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate, tensors_of
from lightning_fedleak.defenses.dpsgd.settings import GroupBy
from lightning_fedleak.model.batches import BatchError, read_batch
from lightning_fedleak.model.model_state import preserve_process

ORDERED = 8  # examples that show whether the collate function keeps their order. Not tuned
CANDIDATES = 64  # examples these are chosen from, to differ in length where any do. Not tuned


def rows_by_user(dataset: Any, group_by: GroupBy) -> dict[Any, list[int]]:
    """Return the rows of every user by key, in the order of each user's first row.

    Args:
        dataset: map-style.
        group_by: the name of a column, a function of an example, or one key for each row.

    Raises:
        DefenseError: a row without a key, or not one key for each row; names the column.
    """
    keys = _keys(dataset, group_by)
    if len(keys) != len(dataset):
        raise DefenseError(
            f"DPSGD: group_by gives {len(keys)} keys for {len(dataset)} rows; give one for each"
        )
    users: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        try:
            user = _comparable(key)
            if user is not None:
                users.setdefault(user, []).append(row)
        except (TypeError, ValueError, RuntimeError) as error:  # also arrays, and pandas' NA
            raise DefenseError(
                f"DPSGD: row {row}'s {_key_name(group_by)} is a {type(key).__name__}, by which "
                "users cannot be compared; give a number or a string"
            ) from error
        if user is None:
            raise DefenseError(
                f"DPSGD: row {row} has no {_key_name(group_by)} (it is {key!r}), so its user is "
                "not known. Leave such rows out of the dataset, or give them a key."
            )
    return users


def _comparable(key: Any) -> Any:
    """Return a key by which users are compared; None for None, NaN, "" and what holds one of them.

    Raises:
        TypeError: it is equal to itself alone, or has no hash.
    """
    if isinstance(key, tuple | frozenset):
        parts = [_comparable(part) for part in key]
        kind = tuple if isinstance(key, tuple) else frozenset
        return None if any(part is None for part in parts) else kind(parts)
    key = key.item() if getattr(key, "shape", None) in ((), (1,)) else key
    by_identity: Any = object.__hash__
    if key is not None and type(key).__hash__ is by_identity:
        raise TypeError("equal to itself alone")
    missing = key is None or bool(key != key) or bool(key == "")
    return None if missing else key


def _key_name(group_by: GroupBy) -> str:
    return f"'{group_by}'" if isinstance(group_by, str) else "key (group_by)"


def _keys(dataset: Any, group_by: GroupBy) -> Sequence[Any]:
    if isinstance(dataset, Subset) and (isinstance(group_by, str) or callable(group_by)):
        inner = _keys(dataset.dataset, group_by)
        return [inner[i] for i in dataset.indices]
    if callable(group_by):
        return [group_by(dataset[row]) for row in range(len(dataset))]
    if not isinstance(group_by, str):
        ordered = hasattr(group_by, "__len__") and hasattr(group_by, "__getitem__")
        if not ordered or isinstance(group_by, Mapping):
            raise DefenseError(
                f"DPSGD: group_by is a {type(group_by).__name__}, whose keys have no order. "
                "Give the name of a column, a function of an example, or a list with one key for "
                "each row."
            )
        return group_by
    if hasattr(dataset, "column_names"):
        column: Sequence[Any] = dataset[group_by]
        return column
    return [dataset[row][group_by] for row in range(len(dataset))]


def check_order(loader: DataLoader[Any]) -> None:
    """Raise an error for a dataset or collate function that changes the order of examples.

    The user of a row follows from its place. A few examples are collated twice in one order and
    once in another. Tensors that are equal in the first two must be reordered in the third, which
    depends on the collate function and not on the examples. Global random states do not change.

    Raises:
        DefenseError: it sorts or shuffles, or makes a row of several examples.
    """
    with preserve_process():
        places = _unlike(loader)
        count = len(places)
        # Sorting, reversing and rotating do not undo this order.
        order = [*range(1, count - 1), 0, count - 1] if count > 2 else [*range(count)][::-1]
        first, second, permuted = (
            _collated(loader, chosen) for chosen in (places, places, [places[i] for i in order])
        )
        conclusive = False
        for tensor, repeated, reordered in zip(first, second, permuted, strict=False):
            if len(tensor) != count:
                continue
            if _agree(tensor, repeated):
                # Or it is the same whatever the examples are: their numbers in the batch, say.
                keeps_order = _agree(tensor[order], reordered) or any(
                    _agree(tensor, constant) for constant in _collated(loader, places[:1] * count)
                )
                conclusive = conclusive or not _agree(tensor, tensor[:1].expand_as(tensor))
            else:
                keeps_order = not _is_shuffled(tensor, repeated)
            if not keeps_order:
                raise DefenseError(
                    "DPSGD: with unit=Users() the user of a row follows from its place in the "
                    f"batch, and the collate function ({_collate_name(loader)}) or the dataset's "
                    "`__getitems__` sorts or shuffles rows, or makes a row of several examples: "
                    "one user's rows would be clipped as another's. Let row i of every tensor be "
                    "of example i (pack_padded_sequence takes enforce_sorted=False)."
                )
    if count > 1 and not conclusive:
        warnings.warn(
            "DPSGD: with unit=Users() the user of a row follows from its place in the batch. "
            f"Whether the collate function ({_collate_name(loader)}) keeps the order of examples "
            "could not be checked: its batches are random, or the same for all examples. It is "
            "trusted.",
            stacklevel=4,
        )


def check_documents(loader: DataLoader[Any], *, by_user: bool) -> None:
    """Say that a row of several documents is one example; raise an error where it is a user's.

    Rows of a few examples are read, as far as they mark documents.

    Raises:
        DefenseError: users are the unit, or the collate function makes a row of several examples.
    """
    dataset: Any = loader.dataset
    last, packed = len(dataset) - 1, False
    places = sorted({last * i // (ORDERED - 1) for i in range(ORDERED)}) if last >= 0 else []
    with preserve_process(), suppress(BatchError):
        packed = read_batch(loader.collate_fn(_fetched(dataset, places)), "causal").is_packed
    if packed and by_user:
        raise DefenseError(
            "DPSGD: rows of the data hold several documents, which may be of several users, and "
            "with unit=Users() a row is of one. Give each document a row of its own."
        )
    if packed:
        warnings.warn(
            "DPSGD: rows of the data hold several documents, and a row is one example: it is "
            "clipped as a whole, and epsilon is of a row as it is packed, not of a document. "
            "Without one document the others would be packed otherwise. For a guarantee of "
            "documents give each a row of its own.",
            stacklevel=4,
        )


def _unlike(loader: DataLoader[Any]) -> list[int]:
    """Return places of a few examples, from the shortest to the longest of many."""
    dataset: Any = loader.dataset
    last = len(dataset) - 1
    places = sorted({last * i // (CANDIDATES - 1) for i in range(CANDIDATES)})
    places.sort(key=lambda place: _length(dataset[place]))
    ranks = sorted({(len(places) - 1) * i // (ORDERED - 1) for i in range(ORDERED)})
    return [places[rank] for rank in ranks]


def _length(value: Any) -> int:
    """Return how many letters and nonzero numbers an example has; padding is often zero."""
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    if isinstance(value, Tensor | np.ndarray):
        return int((value != 0).sum())
    return len(value) if isinstance(value, str | bytes) else bool(value)


def _collated(loader: DataLoader[Any], places: list[int]) -> list[Tensor]:
    """Return the tensors of a batch of these examples, fetched as a DataLoader does."""
    batch = loader.collate_fn(_fetched(loader.dataset, places))
    return [tensor for tensor in tensors_of(batch) if tensor.dim()]


def _fetched(dataset: Any, places: list[int]) -> list[Any]:
    fetch = getattr(dataset, "__getitems__", None)
    return list(fetch(places)) if fetch else [dataset[place] for place in places]


def _agree(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_floating_point() or first.is_complex():
        return torch.allclose(first, second, equal_nan=True)
    return torch.equal(first, second)


def _is_shuffled(first: Tensor, second: Tensor) -> bool:
    """Return whether they hold the same rows, each once, in another order."""
    if first.shape != second.shape:
        return False
    rows = [sorted(repr(row) for row in tensor.tolist()) for tensor in (first, second)]
    return rows[0] == rows[1] and len(set(rows[0])) == len(first)


def _collate_name(loader: DataLoader[Any]) -> str:
    collate: Any = loader.collate_fn
    if isinstance(collate, EmptyCollate):
        collate = collate.collate
    return str(getattr(collate, "__name__", type(collate).__name__))
