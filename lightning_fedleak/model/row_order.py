"""A keyed commitment to the order in which loaders take rows: one code of all their numbers."""

from __future__ import annotations

import hmac
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

_next_rows = getattr(_BaseDataLoaderIter, "_next_index", None)
_watching: list[RowOrder] = []


def _noted_rows(loader: Any) -> Any:
    """Return the rows that a loader takes next, once they are noted."""
    rows = _next_rows(loader)  # type: ignore[misc]
    for order in _watching:
        order.add(loader._dataset, rows)
    return rows


def _refer_to(dataset: object) -> Callable[[], object]:
    """Return what gives the data set, and keeps it in memory only where that is a plain list."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset


class RowOrder:
    """Note the numbers of the rows that every ``DataLoader`` of torch takes, batch by batch.

    What is kept is an HMAC with SHA-256 (RFC 2104) of the numbers as a whole, for each data set.
    Without the key nobody can test a guess of the order against it. Loaders work as without this:
    of batches that can be read once, nothing is read, and there is no code.

    Args:
        key: 32 secret bytes.

    Attributes:
        key: as above.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._codes: dict[int, tuple[Callable[[], object], hmac.HMAC | None]] = {}
        if _next_rows is not None:
            _watching.append(self)
            _BaseDataLoaderIter._next_index = _noted_rows  # type: ignore[method-assign]

    def add(self, dataset: object, rows: Any) -> None:
        """Add the number of a row, or those of a batch."""
        refer, code = self._codes.get(id(dataset), (None, None))
        if refer is None or refer() is not dataset:  # a new one, perhaps where another was
            refer, code = _refer_to(dataset), hmac.new(self.key, digestmod="sha256")
        try:
            if not isinstance(rows, list | tuple | Tensor | np.ndarray | Integral):
                raise TypeError("a stream, or a batch that can be read once")
            numbers = [int(row) for row in ([rows] if isinstance(rows, Integral) else rows)]
            if code is not None:
                code.update(f"{numbers}\n".encode())
        except Exception:  # whatever rows are, the loader goes on with them
            code = None
        self._codes[id(dataset)] = refer, code

    def code_of(self, dataset: object) -> str | None:
        """Return the commitment to the rows of a data set; None where no row had a number."""
        refer, code = self._codes.get(id(dataset), (None, None))
        is_same = refer is not None and refer() is dataset
        return code.hexdigest() if is_same and code is not None else None

    def close(self) -> None:
        """Note no more; may be called twice."""
        if self in _watching:
            _watching.remove(self)
        if not _watching:
            _BaseDataLoaderIter._next_index = _next_rows  # type: ignore[assignment, method-assign]
