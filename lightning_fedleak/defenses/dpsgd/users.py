"""The user of each row, where the unit of privacy is a user with all rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Subset

from lightning_fedleak.defenses.base import DefenseError

GroupBy = str | Callable[[Any], Any] | Sequence[Any]


def users_of(dataset: Any, group_by: GroupBy) -> list[list[int]]:
    """Return the rows of every user, without the keys of :func:`rows_by_user`."""
    return [*rows_by_user(dataset, group_by).values()]


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
                f"DPSGD: row {row}'s {_name(group_by)} is a {type(key).__name__}, by which users "
                "cannot be compared; give a number or a string"
            ) from error
        if user is None:
            raise DefenseError(
                f"DPSGD: row {row} has no {_name(group_by)} (it is {key!r}), so its user is not "
                "known. Leave such rows out of the dataset, or give them a key."
            )
    return users


def digest_of(users: Sequence[Sequence[int]]) -> int:
    """Return a digest, of 48 bits, of the rows of every user."""
    text = ";".join(",".join(map(str, rows)) for rows in users)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


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


def _name(group_by: GroupBy) -> str:
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
    names = getattr(dataset, "column_names", None)
    if names is not None:
        if group_by not in names:
            raise _no_column(group_by, names)
        column: Sequence[Any] = dataset[group_by]
        return column
    keys = []
    for row in range(len(dataset)):
        example = dataset[row]
        if not isinstance(example, Mapping) or group_by not in example:
            names = [*example] if isinstance(example, Mapping) else []
            raise _no_column(group_by, names, row)
        keys.append(example[group_by])
    return keys


def _no_column(name: str, names: Sequence[Any], row: int | None = None) -> DefenseError:
    owner = "the dataset has" if row is None else f"row {row} has"
    columns = f"; {owner} {', '.join(map(repr, names))}" if names else ""
    return DefenseError(
        f"DPSGD: unit='user' needs the user of each row, and {owner} no column '{name}'{columns}. "
        "Give group_by the name of one, a function of an example, or one key for each row."
    )
