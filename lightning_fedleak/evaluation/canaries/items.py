"""The token ids of a row of a data set, and a digest of the row."""

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

    They are the ``input_ids`` of a mapping (with its ``attention_mask``), the first element of a
    tuple, or the item itself if it is a row of integers.

    Args:
        item: The item.
        name: The name of the item in messages.

    Raises:
        ValueError: The item has no token ids, or only padding.
    """
    mask = None
    if isinstance(item, Mapping):
        ids, mask = item.get("input_ids"), item.get("attention_mask")
    else:
        ids = item[0] if isinstance(item, tuple) and item else item
    row = _token_row(ids, name)
    if mask is not None:
        row = row[_token_row(mask, f"{name}['attention_mask']") != 0]
    if not row.numel():
        raise ValueError(f"{name} holds no token")
    return row


def digest_of(item: Any, name: str) -> bytes:
    """Return the SHA-256 of an item, the same in every process and version: 32 bytes.

    Raises:
        ValueError: The item holds anything but tensors, arrays, numbers, strings, None, and
            mappings and sequences of them.
    """
    return hashlib.sha256(_encoded(item, name)).digest()


def _token_row(ids: Any, name: str) -> Tensor:
    """Return token ids as (L,) int64 on the CPU, or raise ``ValueError``."""
    try:
        row = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        row = torch.empty(())
    row = row[0] if row.dim() == 2 and len(row) == 1 else row
    if row.dim() != 1 or row.is_floating_point() or row.is_complex():
        raise ValueError(f"{name} must be a row of token ids, or hold one as input_ids or first")
    return row.detach().cpu().to(torch.int64)


def _encoded(value: Any, name: str) -> bytes:
    """Return a value as bytes with its type and length, so that no two values have the same."""
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
        f"{name} is a {type(value).__name__}: give tensors, arrays, numbers, strings, or mappings "
        "or sequences of them"
    )


def _tagged(tag: str, content: bytes) -> bytes:
    """Return the content after a tag and the content's length."""
    return f"{tag} {len(content)}:".encode() + content
