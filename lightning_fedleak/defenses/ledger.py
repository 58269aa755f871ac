"""What a client has released so far: a count that never runs backwards, also through a crash."""

from __future__ import annotations

import errno
import glob
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedleak.defenses.base import DefenseError, State

Event = tuple[float, float]
"""Noise multiplier and sample rate of a release."""


class Ledger:
    """Counts releases by their noise multiplier and sample rate.

    Composition does not ask for the order, so the counts are all that an accountant needs. A
    checkpoint forgets what was released after it was written and before a crash. A ledger with a
    file does not: every release is a line on the disk before :meth:`record` returns. Record first,
    release after: then nothing that left the client is missing, and at worst one release is counted
    that never came to be.

    Args:
        path: file to append to, one for each client; its folder must exist. A file of an earlier
            process is read and gone on with, so a new run needs a new path. One run at a time: a
            file that something else wrote to, cut or removed since is refused. None for no file.

    Raises:
        DefenseError: the file holds something else, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._counts: dict[Event, int] = {}
        self._size = 0
        if self.path is not None:
            self._counts, self._size = _read(self.path)

    def __len__(self) -> int:
        """Number of releases."""
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        """Noise multiplier, sample rate and count of every kind of release."""
        for (noise_multiplier, sample_rate), count in self._counts.items():
            yield noise_multiplier, sample_rate, count

    @property
    def kinds(self) -> frozenset[Event]:
        """The pairs (noise multiplier, sample rate) that were released with."""
        return frozenset(self._counts)

    def record(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Counts releases that are about to happen.

        Raises:
            DefenseError: a value out of range, or the file cannot be written or is not as it was
                left; nothing is counted.
        """
        check_noise_multiplier(noise_multiplier)
        check_sample_rate(sample_rate)
        check_count(count, "count")
        event = float(noise_multiplier), float(sample_rate)
        if self.path is not None:
            line = f"{event[0]!r} {event[1]!r} {count}\n"
            self._size = _append(self.path, line, self._size)
        self._counts[event] = self._counts.get(event, 0) + count

    def state_dict(self) -> dict[str, Tensor]:
        """``releases``: (K, 3) float64, noise multiplier, sample rate and count."""
        rows = [[sigma, rate, float(count)] for sigma, rate, count in self]
        return {"releases": torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)}

    def load_state_dict(self, state: State) -> None:
        """Takes the larger count of every kind of release: nothing counted is ever forgotten.

        An empty state changes nothing.

        Raises:
            DefenseError: not the state of a ledger.
        """
        if "releases" not in state:
            return
        rows = torch.as_tensor(state["releases"], dtype=torch.float64)
        if rows.dim() != 2 or rows.shape[1] != 3:
            raise DefenseError(
                f"the accountant's state holds `releases` of shape {tuple(rows.shape)}, expected "
                "(K, 3): the checkpoint is not one of this version"
            )
        for sigma, rate, count in rows.tolist():
            check_noise_multiplier(sigma)
            check_sample_rate(rate)
            known = self._counts.get((sigma, rate), 0)
            if count > known:
                missing = int(count) - known
                self.record(sigma, rate, missing)


def client_path(path: str | os.PathLike[str], client: int, clients: int) -> Path:
    """The file of one client: with several ``.<client>-of-<clients>`` is appended.

    Raises:
        DefenseError: there are files of another number of clients. An example may have been another
            client's then, and what it paid there would be forgotten.
    """
    path = Path(path)
    ending = f"-of-{clients}"
    own = path if clients == 1 else path.with_name(f"{path.name}.{client}{ending}")
    found = path.parent.glob(f"{glob.escape(path.name)}.*-of-*")
    others = [p for p in found if clients == 1 or not p.name.endswith(ending)]
    if clients > 1 and path.exists():
        others.append(path)
    if others:
        raise DefenseError(
            f"the ledger {others[0]} was kept with another number of clients than {clients}, so an "
            "example may have been in another client's releases. Go on with as many clients as "
            "before, or begin a new run from a model that this data did not train, with a new path"
        )
    return own


def check_noise_multiplier(value: float) -> None:
    """Refuses what is no noise multiplier.

    Raises:
        DefenseError: negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise DefenseError(
            f"noise_multiplier={value!r} must be a finite number of at least 0: the noise's "
            "standard deviation over the clip norm"
        )


def check_sample_rate(value: float) -> None:
    """Refuses what is no probability of being sampled.

    Raises:
        DefenseError: outside (0, 1].
    """
    if not 0 < value <= 1:
        raise DefenseError(
            f"sample_rate={value!r} must lie in (0, 1]: the chance of each example to be in a "
            "batch, that is, mean batch size over number of examples"
        )


def check_count(value: int, name: str) -> None:
    """Refuses what is no positive number of steps.

    Raises:
        DefenseError: below 1, or not whole.
    """
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise DefenseError(f"{name}={value!r} must be a whole number of at least 1")


def _read(path: Path) -> tuple[dict[Event, int], int]:
    """Counts by event, and the file's bytes. A last line without its end was never released."""
    if not path.exists():
        return {}, 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    counts: dict[Event, int] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            sigma, rate, count = line.split()
            event, more = (float(sigma), float(rate)), int(count)
            check_noise_multiplier(event[0])
            check_sample_rate(event[1])
            check_count(more, "count")
        except ValueError as error:
            start = line[:40].decode("ascii", "replace")
            raise DefenseError(
                f"line {number} of the ledger {path} is not a release ({start!r}): give a path "
                "that nothing else writes to"
            ) from error
        counts[event] = counts.get(event, 0) + more
    return counts, len(whole)


def _append(path: Path, line: str, expected: int) -> int:
    """Adds a whole line or none of it, and returns once it would survive a loss of power.

    Args:
        path: of the file; it is made where no bytes are expected.
        line: with its end.
        expected: bytes that the file must hold.

    Returns:
        How many it holds now.
    """
    data = line.encode("ascii")
    try:
        flags = os.O_WRONLY | os.O_APPEND | (0 if expected else os.O_CREAT)
        descriptor = os.open(path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_size != expected:
                raise _changed(path)
            try:
                written = os.write(descriptor, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes fit on the disk")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, expected)
                raise
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if not expected:
            _sync_folder(path.parent)
    except OSError as error:
        raise DefenseError(
            f"the ledger {path} cannot be written ({error}): the release was not made. Give a path "
            "in a folder that exists and has room"
        ) from error
    if size != expected + len(data):
        raise _changed(path)
    return size


def _changed(path: Path) -> DefenseError:
    return DefenseError(
        f"the ledger {path} was changed by something else since it was read: the release was not "
        "made. Two runs on one ledger would each overlook what the other releases: give every run "
        "a path of its own, or begin this one again when the other has ended"
    )


def _sync_folder(folder: Path) -> None:
    """Makes a new file's name last as well; nothing where folders cannot be opened (Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
