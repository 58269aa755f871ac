"""Which canaries are in the data: a secret that can be kept, re-derived and committed to.

All of it follows from a key of 256 bits by HMAC-SHA256: each canary's coin, its place among the
data, and the commitment. Who knows some of the coins learns nothing about the others (a generator
of random numbers would give itself away), and the commitment tells nothing about the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, get_args

Game = Literal["add_remove", "replace"]
"""What happens to a canary that is left out. ``"add_remove"``: nothing is in its place, the data
are shorter by one; the neighbours of DP-SGD's usual accountants. ``"replace"``: an item of the data
is in its place, the length is always the same; the game of Fig. 2 of Vu et al. 2024."""

_SCHEMA = 1
_BITS = 64


class InclusionMismatch(ValueError):
    """Canaries, seed, probability or game are not those that a run began with."""


@dataclass(frozen=True, repr=False)
class InclusionRecord:
    """The coins of a set of canaries. Secret: shows nothing of itself, and is not pickled.

    Processes that start workers by spawning do hand it on to them. To a file it goes by
    :meth:`save` only.

    Attributes:
        key: 32 bytes that all else follows from.
        digests: SHA-256 of each canary, in order.
        probability: of inclusion.
        game: see :data:`Game`.
        included: whether each canary is in the data.
    """

    key: bytes
    digests: tuple[bytes, ...]
    probability: float = 0.5
    game: Game = "add_remove"
    included: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key must be 32 bytes, got {len(self.key)}")
        if not 0 < self.probability < 1:
            raise ValueError(
                f"probability must lie between 0 and 1, both excluded, got {self.probability}"
            )
        if self.game not in get_args(Game):
            raise ValueError(f"game must be one of {get_args(Game)}, got {self.game!r}")
        object.__setattr__(self, "probability", float(self.probability))
        threshold = self.probability * 2**_BITS
        coins = tuple(
            self._number("coin", i, digest) < threshold for i, digest in enumerate(self.digests)
        )
        object.__setattr__(self, "included", coins)

    @classmethod
    def flip(
        cls,
        digests: Sequence[bytes],
        seed: int | None = None,
        probability: float = 0.5,
        game: Game = "add_remove",
    ) -> InclusionRecord:
        """Flips the coins.

        Args:
            digests: of the canaries, see :func:`~lightning_fedleak.canaries.items.digest_of`.
            seed: at least 0. The same seed and canaries give the same record; whoever guesses the
                seed knows it. None takes 256 bits from the operating system.
            probability: of inclusion.
            game: see :data:`Game`.

        Raises:
            ValueError: an argument is out of its range.
        """
        key = secrets.token_bytes(32) if seed is None else key_of(seed)
        return cls(key, tuple(digests), probability, game)

    @property
    def commitment(self) -> str:
        """Binds to this record without showing it: 64 hexadecimal digits, for checkpoints and logs.

        Publish it before a run; who is given the record's file afterwards can check that no coin
        was changed. With a seed that can be guessed it hides nothing.
        """
        return self._mac("commitment", self._settings()).hex()

    def places(self, length: int) -> list[tuple[int, int]]:
        """Where the included canaries stand among ``length`` items of data.

        Between which items a canary stands (or would stand) depends on the key and ``length``
        alone, uniform over all gaps and not on any coin; so do the places of ``"replace"``.

        Returns:
            (place, canary) pairs in the order of places, which count in the data with canaries.

        Raises:
            ValueError: ``"replace"`` with fewer items than canaries.
        """
        if self.game == "replace":
            return sorted(
                (slot, i)
                for i, (slot, inside) in enumerate(
                    zip(self._slots(length), self.included, strict=True)
                )
                if inside
            )
        drawn = sorted(
            (self._number("place", i, digest), i)
            for i, digest in enumerate(self.digests)
            if self.included[i]
        )
        return [
            ((number * (length + 1) >> _BITS) + before, i)
            for before, (number, i) in enumerate(drawn)
        ]

    def save(self, path: str | Path) -> None:
        """Writes the record to a new file of mode 0600, whole or not at all.

        Raises:
            FileExistsError: there is a file already; records are not overwritten.
            OSError: it cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "schema": _SCHEMA,
            "note": "secret: which canaries are in the training data",
            "key": self.key.hex(),
            "probability": self.probability,
            "game": self.game,
            "digests": [d.hex() for d in self.digests],
            "included": [int(inside) for inside in self.included],
            "commitment": self.commitment,
        }
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                json.dump(content, file, indent=1)
            os.link(draft, path)
        finally:
            draft.unlink()

    @classmethod
    def load(cls, path: str | Path) -> InclusionRecord:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: others may read it.
            InclusionMismatch: it is no record, or its parts contradict each other.
        """
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise PermissionError(
                    f"the inclusion record {path} has mode {mode:04o}, so that others may read it: "
                    f"chmod 600 {path}"
                )
            text = file.read()
        try:
            content = json.loads(text)
            if content["schema"] != _SCHEMA:
                raise ValueError("unknown schema")
            record = cls(
                bytes.fromhex(content["key"]),
                tuple(bytes.fromhex(d) for d in content["digests"]),
                content["probability"],
                content["game"],
            )
            stated = [bool(inside) for inside in content["included"]], content["commitment"]
        except (ValueError, KeyError, TypeError) as error:
            raise InclusionMismatch(f"{path} is no inclusion record of this version") from error
        if stated != (list(record.included), record.commitment):
            raise InclusionMismatch(f"{path} was changed: its coins do not follow from its key")
        return record

    def check_same(self, other: InclusionRecord, where: str) -> None:
        """Compares with the record found at ``where``, and says what differs without showing it.

        Raises:
            InclusionMismatch: something differs.
        """
        differs = [
            name
            for name, same in (
                ("the canaries", self.digests == other.digests),
                ("the seed", hmac.compare_digest(self.key, other.key)),
                ("probability", self.probability == other.probability),
                ("game", self.game == other.game),
            )
            if not same
        ]
        if differs:
            raise InclusionMismatch(
                f"{where} belongs to another run: {', '.join(differs)} changed. Resume with what "
                "it began with, or begin anew with another record file."
            )

    def _settings(self) -> bytes:
        coins = bytes(self.included)
        stated = f"{_SCHEMA} {self.probability!r} {self.game} {len(self.digests)} ".encode()
        return stated + b"".join(self.digests) + coins

    def _slots(self, length: int) -> list[int]:
        """A different place for each canary: Fisher-Yates, of which only what is used is kept."""
        if len(self.digests) > length:
            raise ValueError(
                f"game='replace' puts each of {len(self.digests)} canaries in the place of an item "
                f"of its own, and the data set has {length} items"
            )
        moved: dict[int, int] = {}
        found = []
        for i, digest in enumerate(self.digests):
            j = i + (self._number("place", i, digest) * (length - i) >> _BITS)
            found.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return found

    def _number(self, purpose: str, index: int, digest: bytes) -> int:
        """Uniform below 2^64."""
        drawn = self._mac(purpose, index.to_bytes(8, "big") + digest)
        return int.from_bytes(drawn[: _BITS // 8], "big")

    def _mac(self, purpose: str, message: bytes) -> bytes:
        return hmac.digest(self.key, purpose.encode() + b"\0" + message, hashlib.sha256)

    def __repr__(self) -> str:
        return f"InclusionRecord({len(self.digests)} canaries)"

    def __copy__(self) -> InclusionRecord:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> InclusionRecord:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError(
                "the inclusion record of canaries is secret and is not pickled (a checkpoint or a "
                "cache would show which texts are in the data). Keep the data set out of "
                "save_hyperparameters (ignore=...), and save the record by record.save(path)."
            )
        return type(self), (self.key, self.digests, self.probability, self.game)


def key_of(seed: int) -> bytes:
    """The key that a seed stands for.

    Raises:
        ValueError: the seed is no integer of at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, or None, got {seed!r}")
    return hashlib.sha256(f"lightning-fedleak canaries {seed}".encode()).digest()
