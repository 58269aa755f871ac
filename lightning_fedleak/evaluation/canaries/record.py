"""The secret of which canaries are in the data: it can be kept, re-derived and committed to.

All of it follows from a key of 256 bits by HMAC-SHA256: each canary's inclusion bit, how
often it is repeated, its positions in the data, and the commitment. The inclusion bits are outputs
of a keyed pseudorandom function: knowing some reveals nothing about the others, unlike the outputs
of an ordinary generator, and the commitment reveals nothing about the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch

from lightning_fedleak.private_files import read_secret, write_secret
from lightning_fedleak.validate import check_integer, check_number, explain_errors

SCHEMA = 1  # version of the file; others are not read
_COMPUTED_FIELDS = ("included", "commitment")  # fields of a file that :meth:`load` computes again
_BITS = 64  # of the numbers that inclusion bits and positions are derived from


class Secret(ABC):
    """A frozen dataclass of what follows from a key. It goes to a file by :meth:`save` only.

    It is not pickled: a checkpoint or a cache would show what it holds. It is pickled only to
    start a worker process by spawning.

    Attributes:
        title: what it is called in messages.
        key: 32 bytes that all else follows from.
    """

    title: ClassVar[str]
    key: bytes

    @abstractmethod
    def _content(self) -> dict[str, object]:
        """Return what the file holds."""

    @classmethod
    @abstractmethod
    def _of_content(cls, content: Any) -> Self:
        """Return the secret of a file's content."""

    def save(self, path: str | Path) -> None:
        """Write a file that only its owner may read, whole or not at all.

        Raises:
            FileExistsError: there is a file already.
        """
        write_secret(Path(path), {"schema": SCHEMA, **self._content()})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the secret of a file.

        Raises:
            PermissionError: others may read the file.
            ValueError: the file is no such record, or what it states does not follow from
                its key.
        """
        unread = f"{path} is no {cls.title} of this version"
        with explain_errors(unread, ValueError, KeyError, TypeError, error=ValueError):
            content = read_secret(Path(path), f"the {cls.title}")
            if content["schema"] != SCHEMA:
                raise ValueError("it has another schema")
            secret = cls._of_content(content)
            stated = {name: content[name] for name in _COMPUTED_FIELDS if name in secret._content()}
        if any(secret._content()[name] != value for name, value in stated.items()):
            raise ValueError(f"{path} was changed: it does not follow from its key")
        return secret

    def check_same(self, other: Self, name: str) -> None:
        """Raise an error unless ``other`` is of the same data, key and settings.

        Raises:
            ValueError: it is not.
        """
        if self != other:
            raise ValueError(
                f"{name} belongs to another run: its data, seed or settings are not these. Resume "
                "with what it began with, or begin again with another record file."
            )

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _mac(self, purpose: str, message: bytes) -> bytes:
        return hmac.digest(self.key, purpose.encode() + b"\0" + message, hashlib.sha256)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError(
                f"{self!r} is secret and is not pickled. Keep the data set out of "
                "save_hyperparameters (ignore=...), and the record in its file (record=)."
            )
        values = (getattr(self, field.name) for field in fields(self) if field.init)  # type: ignore[arg-type]
        return type(self), tuple(values)


@dataclass(frozen=True, repr=False)
class InclusionRecord(Secret):
    """The coins of a set of canaries. Secret: shows nothing of itself, and is not pickled.

    Attributes:
        key: 32 bytes that all else follows from.
        digests: SHA-256 of each canary, in order.
        probability: The probability of inclusion.
        times: how often a canary may be repeated, each equally likely, whatever its coin is.
        included: whether each canary is in the data.
        repeats: how often each canary stands in the data if it is included.
    """

    title: ClassVar[str] = "inclusion record"

    key: bytes
    digests: tuple[bytes, ...]
    probability: float = 0.5
    times: tuple[int, ...] = (1,)
    included: tuple[bool, ...] = field(init=False)
    repeats: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_number("probability", self.probability, above=0, below=1)
        for number in self.times:
            check_integer("times", number)
        if not self.times or list(self.times) != sorted(set(self.times)):
            raise ValueError(f"times must be numbers in rising order, got {self.times}")
        object.__setattr__(self, "probability", float(self.probability))
        threshold = self.probability * 2**_BITS
        coins = tuple(
            self._number("coin", i, digest) < threshold for i, digest in enumerate(self.digests)
        )
        tiers = (
            self._number("times", i, digest) * len(self.times) >> _BITS
            for i, digest in enumerate(self.digests)
        )
        object.__setattr__(self, "included", coins)
        object.__setattr__(self, "repeats", tuple(self.times[tier] for tier in tiers))

    @property
    def commitment(self) -> str:
        """Return a commitment to this record, for checkpoints and logs: 64 hexadecimal digits.

        Publish it before a run: who gets the record's file afterwards can check that no coin was
        changed. With a seed that can be guessed it hides nothing.
        """
        return self._mac("commitment", self._committed_bytes()).hex()

    def places(self, length: int) -> list[tuple[int, int]]:
        """Return where the included canaries stand among ``length`` items of data.

        The gap between items in which a canary stands (or would stand) is uniform over all gaps,
        and depends on no coin.

        Returns:
            (place, canary) pairs by their places in the data with canaries, one for each copy.
        """
        copies = [
            (self._number(f"copy {copy}" if copy else "place", i, digest), i)
            for i, digest in enumerate(self.digests)
            for copy in range(self.repeats[i] if self.included[i] else 0)
        ]
        return [
            ((number * (length + 1) >> _BITS) + rank, i)
            for rank, (number, i) in enumerate(sorted(copies))
        ]

    def _content(self) -> dict[str, object]:
        return {
            "note": "secret: which canaries are in the training data",
            "key": self.key.hex(),
            "probability": self.probability,
            "digests": [d.hex() for d in self.digests],
            "included": [int(inside) for inside in self.included],
            "commitment": self.commitment,
            "times": list(self.times),
        }

    @classmethod
    def _of_content(cls, content: Any) -> InclusionRecord:
        return cls(
            bytes.fromhex(content["key"]),
            tuple(bytes.fromhex(d) for d in content["digests"]),
            content["probability"],
            tuple(content["times"]),
        )

    def _committed_bytes(self) -> bytes:
        coins = bytes(self.included)
        stated = f"{SCHEMA} {self.probability!r} {len(self.digests)} times {self.times} "
        return stated.encode() + b"".join(self.digests) + coins

    def _number(self, purpose: str, index: int, digest: bytes) -> int:
        """Return a number uniform below 2^64."""
        digest_bytes = self._mac(purpose, index.to_bytes(8, "big") + digest)
        return int.from_bytes(digest_bytes[: _BITS // 8], "big")


def seed_key(seed: int) -> bytes:
    """Return the key that a seed stands for.

    Raises:
        ValueError: the seed is no integer of at least 0.
    """
    check_integer("seed", seed, at_least=0, hint="None draws from the operating system")
    return hashlib.sha256(f"lightning-fedleak canaries {seed}".encode()).digest()


S = TypeVar("S", bound=Secret)


def draw_or_load(
    kind: type[S],
    draw: Callable[[bytes], S],
    seed: int | None,
    file: str | Path | None,
    *,
    action: str,
) -> S:
    """Return the secret of a file if it exists, else one that is drawn and written to that file.

    Args:
        kind: the class of the secret.
        draw: returns one by its key.
        seed: determines the key; None draws it from the operating system.
        file: The file that all processes see; None for none.
        action: what is drawn, for the error: ``"draw canaries"``.

    Raises:
        ValueError: several processes have neither seed nor file, or the file's is of other data or
            settings.
        PermissionError: others may read the file.
    """
    if file is None and seed is None and _several_processes():
        raise ValueError(
            f"each process would {action} of its own: pass record=, a file that all of them see, "
            "or a seed"
        )
    key = secrets.token_bytes(32) if seed is None else seed_key(seed)
    if file is None:
        return draw(key)
    if not Path(file).exists():
        drawn = draw(key)
        try:
            drawn.save(file)
        except FileExistsError:
            pass  # another process was first: its draw is used
        else:
            return drawn
    saved = kind.load(file)
    draw(saved.key if seed is None else key).check_same(saved, f"the record {file}")
    return saved


_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where launchers say how many processes there are, before the processes know of each other."""


def _several_processes() -> bool:
    """Return whether other processes train too, by torch or by what launchers set."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() > 1
    return any(int(os.environ.get(name, "1")) > 1 for name in _SIZES)
