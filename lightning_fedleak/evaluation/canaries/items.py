"""What a canary is made of: its token ids, its fingerprint, and whether it looks like the data."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def token_ids_of(item: Any, name: str) -> Tensor:
    """Return the tokens of one item without padding, (L,) int64.

    Read from ``input_ids`` (and ``attention_mask``) of a mapping, from the first part of a tuple,
    or from the item itself where it is a row of integers.

    Raises:
        ValueError: no token ids are found, or none that are not padding.
    """
    mask = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise ValueError(
                f"{name} has no 'input_ids' (it has {sorted(map(str, item))}): pass "
                "token_ids=, a function from an item to its token ids"
            )
        ids, mask = item["input_ids"], item.get("attention_mask")
    else:
        ids = item[0] if isinstance(item, tuple) and item else item
    row = _token_row(ids, name)
    if mask is not None:
        visible = _token_row(mask, f"{name}['attention_mask']")
        if visible.shape != row.shape:
            raise ValueError(f"{name}: attention_mask and input_ids differ in length")
        row = row[visible != 0]
    if not row.numel():
        raise ValueError(f"{name} holds no token")
    return row


def digest_of(item: Any, name: str) -> bytes:
    """Return the SHA-256 of an item, the same in every process and version: 32 bytes.

    Raises:
        ValueError: the item holds something else than tensors, arrays, numbers, strings, None, and
            mappings and sequences of them.
    """
    return hashlib.sha256(_encoded(item, name)).digest()


def check_alike(item: Any, canary: Any, name: str) -> None:
    """Raise an error for a canary that is built in another way than the items of the data set.

    Lengths of rows may differ; keys, dtypes and numbers of dimensions may not.

    Raises:
        ValueError: with the part that differs.
    """
    if isinstance(item, Mapping) and isinstance(canary, Mapping):
        if set(item) != set(canary):
            raise ValueError(
                f"{name} has the keys {sorted(map(str, canary))}, the data set's items have "
                f"{sorted(map(str, item))}: build canaries as the items are built"
            )
        for key in item:
            check_alike(item[key], canary[key], f"{name}[{key!r}]")
        return
    if isinstance(item, tuple) and isinstance(canary, tuple) and len(item) == len(canary):
        for i, (expected, actual) in enumerate(zip(item, canary, strict=True)):
            check_alike(expected, actual, f"{name}[{i}]")
        return
    expected, actual = _kind(item), _kind(canary)
    if expected != actual:
        raise ValueError(
            f"{name} is {actual}, where the data set's items have {expected}: build canaries as "
            "the items are built"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} with {value.dim()} dimensions"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with {value.ndim} dimensions"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _token_row(ids: Any, name: str) -> Tensor:
    try:
        row = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is {_kind(ids)}, and no token ids were found in it: pass token_ids=, a "
            "function from an item to its token ids"
        ) from error
    if row.dim() == 2 and len(row) == 1:
        row = row[0]
    if row.dim() != 1 or row.is_floating_point() or row.is_complex():
        raise ValueError(
            f"{name} must hold one row of token ids, got {row.dtype} of shape {tuple(row.shape)}"
        )
    return row.detach().cpu().to(torch.int64)


def _encoded(value: Any, name: str) -> bytes:
    """Return type, length and content, so that no two values have the same bytes."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tagged(f"tensor {value.dtype} {tuple(value.shape)}", raw)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _tagged(f"array {value.dtype.str} {value.shape}", value.tobytes())
    if value is None or isinstance(value, bool):
        return _tagged("constant", repr(value).encode())
    if isinstance(value, str):
        return _tagged("str", value.encode())
    if isinstance(value, bytes):
        return _tagged("bytes", value)
    if isinstance(value, numbers.Integral):
        return _tagged("int", str(int(value)).encode())
    if isinstance(value, numbers.Real):
        return _tagged("float", repr(float(value)).encode())
    if isinstance(value, Mapping):
        parts = [
            _encoded(str(key), name) + _encoded(value[key], f"{name}[{key!r}]")
            for key in sorted(value, key=str)
        ]
        return _tagged(f"mapping {len(parts)}", b"".join(parts))
    if isinstance(value, Sequence):
        parts = [_encoded(part, f"{name}[{i}]") for i, part in enumerate(value)]
        return _tagged(f"sequence {len(parts)}", b"".join(parts))
    raise ValueError(
        f"{name} is a {type(value).__name__}, of which no fingerprint can be taken: canaries are "
        "tensors, arrays, numbers, strings, or mappings and sequences of them"
    )


def _tagged(tag: str, content: bytes) -> bytes:
    return f"{tag} {len(content)}:".encode() + content


def fetch(dataset: Any, places: Sequence[int]) -> list[Any]:
    """Return items of a data set, at once where it can."""
    at_once = getattr(dataset, "__getitems__", None)
    if at_once is None or not places:
        return [dataset[place] for place in places]
    return list(at_once(places))
