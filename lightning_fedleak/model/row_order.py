"""A keyed commitment to the order in which loaders take rows: one code of all their numbers."""

from __future__ import annotations

import hmac
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_next_rows = getattr(_BaseDataLoaderIter, "_next_index", None)
_watching: list[RowOrder] = []


def _noted_rows(loader: Any) -> Any:
    """Return the rows that a loader takes next, once they are noted."""
    rows = _next_rows(loader)  # type: ignore[misc]
    for order in _watching:
        order.add(loader._dataset, rows)
    return rows


class RowOrder:
    """Note the numbers of the rows that every ``DataLoader`` of torch takes, batch by batch.

    What is kept is an HMAC with SHA-256 (RFC 2104) of the numbers as a whole, for each data set.
    Without the key nobody can test a guess of the order against it. Loaders work as without this.

    Args:
        key: 32 secret bytes.

    Attributes:
        key: as above.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._codes: dict[int, tuple[object, hmac.HMAC]] = {}
        self._unreadable: set[int] = set()
        if _next_rows is not None:
            _watching.append(self)
            _BaseDataLoaderIter._next_index = _noted_rows  # type: ignore[method-assign]

    def add(self, dataset: object, rows: Any) -> None:
        """Add the number of a row, or those of a batch."""
        start = dataset, hmac.new(self.key, digestmod="sha256")
        _, code = self._codes.setdefault(id(dataset), start)
        try:
            numbers = [int(row) for row in (rows if hasattr(rows, "__iter__") else [rows])]
            code.update(f"{numbers}\n".encode())
        except (TypeError, ValueError):  # a stream has no numbers
            self._unreadable.add(id(dataset))

    def code_of(self, dataset: object) -> str | None:
        """Return the commitment to the rows of a data set; None where no row had a number."""
        code = None if id(dataset) in self._unreadable else self._codes.get(id(dataset))
        return None if code is None else code[1].hexdigest()

    def close(self) -> None:
        """Note no more; may be called twice."""
        if self in _watching:
            _watching.remove(self)
        if not _watching:
            _BaseDataLoaderIter._next_index = _next_rows  # type: ignore[assignment, method-assign]
