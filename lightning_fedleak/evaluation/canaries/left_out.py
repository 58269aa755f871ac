"""Rows that a secret draw holds out of training: non-members from the same distribution.

An attack on the trained model compares them with rows that were trained on. A keyed hash (HMAC) of
each row's number decides which rows are held out, so that the key's file reproduces the draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import Dataset, Subset

from lightning_fedleak.evaluation.canaries.dataset import check_dataset, digest_of
from lightning_fedleak.evaluation.canaries.entities import EntityDataset
from lightning_fedleak.evaluation.canaries.record import SCHEMA, Secret, draw_or_load
from lightning_fedleak.validate import check_choice, check_integer


@dataclass(frozen=True, repr=False)
class _LeftOutRecord(Secret):
    """The draw of held-out rows of a data set. Secret: its repr shows nothing.

    Attributes:
        key: The key of 32 bytes, which determines the draw.
        length: The number of rows of the whole data set.
        count: The number of held-out rows; with ``coins``, half the number of candidates.
        digest: SHA-256 of the held-out rows, which detects other data.
        coins: Whether each candidate is held out independently, with probability 1/2.
    """

    title: ClassVar[str] = "record of left-out rows"

    key: bytes
    length: int
    count: int
    digest: bytes
    coins: bool = False

    @property
    def candidates(self) -> list[int]:
        """Return the rows that may be held out, in order."""
        return self._first(2 * self.count if self.coins else self.length)

    @property
    def out(self) -> list[int]:
        """Return the held-out rows, in order."""
        if not self.coins:
            return self._first(self.count)
        # The first byte of a hash is below 128 with probability 1/2.
        return [row for row in self.candidates if self._hash("coin", row)[0] < 128]

    def _first(self, n: int) -> list[int]:
        """Return the n rows with the smallest keyed hashes, in order."""
        hashes = [self._hash("left out", row) for row in range(self.length)]
        return sorted(sorted(range(self.length), key=hashes.__getitem__)[:n])

    def _hash(self, purpose: str, row: int) -> bytes:
        """Return the keyed hash of a row for a purpose, such as ``"coin"``."""
        return self._mac(purpose, row.to_bytes(8, "big"))

    @property
    def commitment(self) -> str:
        """Return a commitment to this record, for checkpoints and logs: 64 hexadecimal digits."""
        drawn = "coins " if self.coins else ""
        stated = f"{SCHEMA} {self.length} {self.count} {drawn}".encode() + self.digest
        return self._mac("commitment", stated).hex()

    def _content(self) -> dict[str, object]:
        return {
            "note": "secret: which rows were left out of the training data",
            "key": self.key.hex(),
            "rows": self.length,
            "left_out": self.count,
            "coins": self.coins,
            "digest": self.digest.hex(),
            "commitment": self.commitment,
        }

    @classmethod
    def _of_content(cls, content: Any) -> _LeftOutRecord:
        return cls(
            bytes.fromhex(content["key"]),
            content["rows"],
            content["left_out"],
            bytes.fromhex(content["digest"]),
            content["coins"],
        )


class TrainingRows(Dataset[Any]):
    """The rows of a data set that are trained on, as :func:`leave_out` returns them.

    Attributes:
        dataset: The user's data, unchanged.
        others: The held-out rows.
        record: The secret record of the draw.
        public_length: The expected number of rows, which depends on no inclusion bit. DP-SGD
            computes its sampling rate from it.
    """

    def __init__(self, dataset: Any, record: _LeftOutRecord) -> None:
        self.dataset = dataset
        self.record = record
        length: int = getattr(dataset, "public_length", record.length)
        self.public_length = length - record.count
        out = record.out
        self.others: Subset[Any] = Subset(dataset, out)
        absent = set(out)
        self._rows = [row for row in range(len(dataset)) if row not in absent]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._rows[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows, for torch's DataLoader; at once if the data support it."""
        rows = [self._rows[index] for index in indices]
        at_once = getattr(self.dataset, "__getitems__", None)
        return [self.dataset[row] for row in rows] if at_once is None else list(at_once(rows))

    def number_of(self, index: int) -> int:
        """Return the index in the user's data of a row of this data set."""
        return self._rows[index]

    def sources(self) -> list[tuple[Any, int]]:
        """Return a data set and an index in it for every row of the user's data, in their order.

        The data set is this one for training rows, and :attr:`others` for held-out rows.
        """
        inside = {row: (self, place) for place, row in enumerate(self._rows)}
        outside = {row: (self.others, place) for place, row in enumerate(self.others.indices)}
        everyone: dict[int, tuple[Any, int]] = {**inside, **outside}
        return [everyone[row] for row in range(len(everyone))]


def leave_out(
    dataset: Any,
    n: int,
    seed: int | None = None,
    *,
    record: str | Path | None = None,
    coins: bool = False,
) -> tuple[TrainingRows, Subset[Any]]:
    """Hold n rows out of training, chosen by a secret random draw.

    The held-out rows are from the same distribution as the training rows. If an attack on the
    trained model distinguishes them, the training is the cause. Train on the first result only; a
    :class:`~lightning_fedleak.LeakageMonitor` finds the held-out rows automatically::

        train, others = leave_out(train, 1000, record="secret/left_out.json")
        loader = DataLoader(train, batch_size=8, shuffle=True)

    Rows must be independent: a row should be a whole document or person, not a part of one.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.canaries import leave_out
        >>> train, others = leave_out([torch.tensor([n, n + 1]) for n in range(10)], 3, seed=1)
        >>> len(train), len(others), len(train.others)
        (7, 3, 3)

    Args:
        dataset: Any data set with a length and items by index, which must not change.
        n: The number of held-out rows, fewer than all rows. 437 are needed before a rate at 1% FPR
            can be shown, 706 for five looks
            (:func:`~lightning_fedleak.evaluation.metrics.released.min_non_members`).
        seed: A seed of at least 0 makes the draw reproducible, and whoever guesses the seed knows
            it. None draws from the operating system; then ``record`` is needed to resume, and with
            several processes.
        record: The file, of mode 0600, that stores the draw. If it exists, its draw is used, and
            data and ``n`` must be the same.
        coins: Whether to draw 2 n candidates, and hold out each of them independently with
            probability 1/2, so that about n are held out. This is the add/remove relation of an
            account of differential privacy: under :class:`~lightning_fedleak.DPSGD` a monitor logs
            the rates that the account allows, and reports if they refute it.

    Returns:
        The training rows, and the held-out rows.

    Raises:
        ValueError: The data set has no length or index; n is out of range; values are planted
            several times; several processes have neither seed nor record; or the record is of other
            data, n or seed.
        PermissionError: Other users may read the record.
    """
    check_dataset(dataset, "rows are left out of")
    if isinstance(dataset, EntityDataset):
        check_choice("times of the planted values", dataset.entities.record.times, [(1,)])
    max_rows = len(dataset) // 2 if coins else len(dataset) - 1
    check_integer("n", n, at_most=max_rows)

    def draw(key: bytes) -> _LeftOutRecord:
        rows = _LeftOutRecord(key, len(dataset), n, b"", coins)
        digest = hashlib.sha256()
        for row in rows.out:
            digest.update(digest_of(dataset[row], f"dataset[{row}]"))
        return replace(rows, digest=digest.digest())

    train = TrainingRows(
        dataset, draw_or_load(_LeftOutRecord, draw, seed, record, action="leave out rows")
    )
    return train, train.others
