"""The secret of which canaries are in the data, with its file and a commitment to it.

Everything in it is derived from a key of 256 bits by HMAC-SHA256: each canary's inclusion bit, how
often it is repeated, its positions in the data, and the commitment. The inclusion bits are outputs
of a keyed pseudorandom function. So some bits reveal nothing about the others, unlike the outputs
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

SCHEMA = 1  # version of the file format; files of other versions are refused
_COMPUTED_FIELDS = ("included", "commitment")  # fields of a file that :meth:`load` checks
_BITS = 64  # bits of the random numbers that give inclusion bits and positions


class Secret(ABC):
    """A frozen dataclass of values that are derived from a secret key.

    Only :meth:`save` writes it to a file. Pickling is refused, because a checkpoint or a cache
    would reveal the secret. It is allowed only to start a worker process by spawning.

    Attributes:
        title: The name of such a secret in messages.
        key: The key of 32 bytes.
    """

    title: ClassVar[str]
    key: bytes

    @abstractmethod
    def _content(self) -> dict[str, object]:
        """Return the content of the file."""

    @classmethod
    @abstractmethod
    def _of_content(cls, content: Any) -> Self:
        """Return the secret of a file's content."""

    def save(self, path: str | Path) -> None:
        """Write a file of mode 0600, atomically.

        Raises:
            FileExistsError: The file exists.
        """
        write_secret(Path(path), {"schema": SCHEMA, **self._content()})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the secret of a file.

        Raises:
            PermissionError: Other users may read the file.
            ValueError: The file is not such a record, or its content does not follow from its key.
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
            ValueError: Data, key or settings differ.
        """
        if self != other:
            raise ValueError(
                f"{name} belongs to another run: resume with its data, seed and settings, or begin "
                "a new run with another record file"
            )

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _mac(self, purpose: str, message: bytes) -> bytes:
        """Return HMAC-SHA256 of a message, with a separate domain for each purpose."""
        return hmac.digest(self.key, purpose.encode() + b"\0" + message, hashlib.sha256)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError(
                f"{self!r} is secret, and not pickled: keep the data set out of hyperparameters by "
                "save_hyperparameters(ignore=...)"
            )
        values = (getattr(self, field.name) for field in fields(self) if field.init)  # type: ignore[arg-type]
        return type(self), tuple(values)


@dataclass(frozen=True, repr=False)
class InclusionRecord(Secret):
    """The inclusion bits of a set of canaries. Secret, so it is not pickled.

    Attributes:
        key: The key of 32 bytes.
        digests: SHA-256 of each canary, in order.
        probability: The probability of inclusion.
        times: The possible numbers of repetitions, equally likely and independent of inclusion.
        included: Whether each canary is in the data.
        repeats: The number of repetitions of each canary if it is included.
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
        included = tuple(
            self._number("coin", i, digest) < threshold for i, digest in enumerate(self.digests)
        )
        # The index in ``times`` of each canary's number of repetitions.
        tiers = (
            self._number("times", i, digest) * len(self.times) >> _BITS
            for i, digest in enumerate(self.digests)
        )
        object.__setattr__(self, "included", included)
        object.__setattr__(self, "repeats", tuple(self.times[tier] for tier in tiers))

    @property
    def commitment(self) -> str:
        """Return a commitment to this record, for checkpoints and logs: 64 hexadecimal digits.

        Publish it before a run. Whoever gets the record's file afterwards can then check that no
        inclusion bit was changed. With a seed that can be guessed it hides nothing.
        """
        return self._mac("commitment", self._committed_bytes()).hex()

    def places(self, length: int) -> list[tuple[int, int]]:
        """Return the places of the included canaries among ``length`` items of data.

        A canary is inserted into a gap between items. The gap is uniform over all gaps, and depends
        on no inclusion bit.

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
        """Return the settings, the digests and the inclusion bits, which the commitment fixes."""
        included = bytes(self.included)
        stated = f"{SCHEMA} {self.probability!r} {len(self.digests)} times {self.times} "
        return stated.encode() + b"".join(self.digests) + included

    def _number(self, purpose: str, index: int, digest: bytes) -> int:
        """Return a number uniform below 2^64."""
        digest_bytes = self._mac(purpose, index.to_bytes(8, "big") + digest)
        return int.from_bytes(digest_bytes[: _BITS // 8], "big")


def seed_key(seed: int) -> bytes:
    """Return the key of a seed.

    Raises:
        ValueError: The seed is not an integer of at least 0.
    """
    check_integer("seed", seed, at_least=0)
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
    """Return the secret of a file if it exists; else draw one, and write it to the file.

    Args:
        kind: The class of the secret.
        draw: A function that returns the secret of a key.
        seed: The seed of the key; None draws the key from the operating system.
        file: The file that all processes see; None: no file.
        action: The action for the error message, such as ``"draw canaries"``.

    Raises:
        ValueError: Several processes have neither seed nor file, or the secret of the file has
            other data or settings.
        PermissionError: Other users may read the file.
    """
    if file is None and seed is None and _several_processes():
        raise ValueError(
            f"each process would {action} of its own: pass record=, a file for all, or a seed"
        )
    key = secrets.token_bytes(32) if seed is None else seed_key(seed)
    if file is None:
        return draw(key)
    if not Path(file).exists():
        drawn = draw(key)
        try:
            drawn.save(file)
        except FileExistsError:
            pass  # another process wrote its draw first, which is used
        else:
            return drawn
    saved = kind.load(file)
    draw(saved.key if seed is None else key).check_same(saved, f"the record {file}")
    return saved


_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables by which launchers set the number of processes, before torch.distributed starts."""


def _several_processes() -> bool:
    """Return whether there are several processes, by torch or by the launcher's variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() > 1
    return any(int(os.environ.get(name, "1")) > 1 for name in _SIZES)
