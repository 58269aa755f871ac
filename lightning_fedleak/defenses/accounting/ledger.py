"""The file of a client's releases, which survives a crash."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.checks import check_integer, check_number

Event = tuple[float, float]
LedgerPath = str | os.PathLike[str]
"""Noise multiplier and sample rate of a release."""

TERMS_SCHEMA = 1  # version of the file <ledger>.terms; a change refuses older ledgers
LONGEST_LINE = 80  # bytes; two floats, a count and the line's end are shorter
_GO_ON = (
    "Go on with the settings of before, or begin a new run, with a new path, from a model that "
    "this data did not train"
)
_ENDING = re.compile(r"(\.users|\.at-most-\d+-of-\d+)?(\.\d+-of-\d+)?")  # of a client's file
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class LedgerFile:
    """A file with a line for every release of one client, which outlives a crash.

    Args:
        path: file to append to, one for each client; its folder must exist. A file of an earlier
            process is read and continued, so a new run needs a new path. A file that something else
            wrote to, cut or removed since is refused. Nothing is written before the first release.
            Half a line at the end, from a crash, is then removed, if every line before it is a
            ledger's.

    Attributes:
        counts: of the releases in it.

    Raises:
        DefenseError: the path is a folder, a link, a device or a pipe, or the file holds something
            else or cannot be read. It does not change.
    """

    def __init__(self, path: LedgerPath) -> None:
        self.path = Path(path)
        self.counts, self._size, self._half = _read(self.path)

    def append(self, event: Event, count: int) -> None:
        """Write releases that are about to happen.

        Raises:
            DefenseError: the file cannot be written or has changed.
        """
        if self._half:
            self._size, self._half = _append(self.path, "", self._size, self._half), 0
        self._size = _append(self.path, f"{event[0]!r} {event[1]!r} {count}\n", self._size)


def client_path(path: LedgerPath, client: int, clients: int, unit: str = "example") -> Path:
    """Return the file of one client.

    Where the unit of privacy is a user, ``.users`` is appended, and with several clients
    ``.<client>-of-<clients>``.

    Args:
        path: of the ledger.
        client: whose file it is.
        clients: how many there are.
        unit: ``"example"`` or ``"user"``.

    Raises:
        DefenseError: there are files of another unit, or of another number of clients: an example
            may have been another client's then, and its cost there would not be counted.
    """
    path = Path(path)
    ending = {"example": "", "user": ".users"}[unit]
    for other in sorted(path.parent.glob(f"{glob.escape(path.name)}*")):
        kind = _ENDING.fullmatch(other.name, len(path.name))
        if kind and (kind[1] or "") != ending and other.is_file():
            raise DefenseError(
                f"ledger={str(other)!r} was kept for another unit of privacy than {unit!r}, or for "
                f"batches drawn otherwise. {_GO_ON}"
            )
    path = path.with_name(path.name + ending)
    if clients > 1:
        _is_there(path)
    ending = f"-of-{clients}"
    client_file = path if clients == 1 else path.with_name(f"{path.name}.{client}{ending}")
    files = path.parent.glob(f"{glob.escape(path.name)}.*-of-*")
    other_files = [p for p in files if clients == 1 or not p.name.endswith(ending)]
    if clients > 1 and path.exists():
        other_files.append(path)
    if other_files:
        raise DefenseError(
            f"ledger={str(other_files[0])!r} was kept with another number of clients than "
            f"{clients}. {_GO_ON}"
        )
    return client_file


def check_terms(ledger: Path, terms: Mapping[str, object]) -> None:
    """Write the terms of the ledger's releases to a file, or compare them with an earlier run's.

    Args:
        ledger: path of the ledger; its terms are in ``<ledger>.terms``.
        terms: the settings that the accounting depends on.

    Raises:
        DefenseError: an earlier run had other terms, or they are not known.
    """
    path = ledger.with_name(f"{ledger.name}.terms")
    data = (json.dumps({"schema": TERMS_SCHEMA, **terms}, sort_keys=True) + "\n").encode()
    try:
        released = ledger.exists() and ledger.stat().st_size
        if not released and not path.is_symlink() and path.exists():
            content = path.read_bytes()
            if len(content) < len(data) and data.startswith(content):  # cut off by a kill
                path.unlink()
        exists = path.exists()
        agrees = exists and not path.is_symlink() and path.read_bytes() == data
        if not agrees and (exists or released):
            raise DefenseError(
                f"ledger={str(ledger)!r} was kept under other terms than {data.decode().strip()} "
                f"(see {path.name}). {_GO_ON}"
            )
        if exists:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DefenseError(
            f"ledger={str(ledger)!r} cannot be used ({error}): give a path in a folder that exists "
            "and may be written"
        ) from error


def check_release(noise_multiplier: float, sample_rate: float = 1.0, count: float = 1) -> None:
    """Raise a DefenseError unless these are the numbers of releases of one kind."""
    hint = "the noise's standard deviation over the clip norm"
    check_number("noise_multiplier", noise_multiplier, at_least=0, hint=hint)
    hint = "the chance of each example to be in a batch: mean batch size over number of examples"
    check_number("sample_rate", sample_rate, above=0, at_most=1, hint=hint)
    check_count(count, "count")


def check_count(value: float, name: str) -> None:
    """Raise a DefenseError unless the value is a whole number of at least 1.

    A count may be a float, as in the tensors of a checkpoint.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_integer(name, value)


def _is_there(path: Path) -> bool:
    """Return whether there is a file, without opening it, which blocks on a pipe or device.

    Raises:
        DefenseError: the path is something else.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    _check_file(path, mode)
    return True


def _check_file(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise DefenseError(
            f"ledger={str(path)!r} is a folder, a link, a device, a pipe or a socket: give the "
            "path of a file on a disk, which need not exist yet"
        )


def _read(path: Path) -> tuple[Counter[Event], int, int]:
    """Return counts by event, the file's bytes, and how many of these are half a line at its end.

    The release of a line without its end was never made.

    Raises:
        DefenseError: the file cannot be read.
    """
    try:
        return _read_counts(path)
    except OSError as error:
        raise DefenseError(f"ledger={str(path)!r} cannot be read ({error})") from error


def _read_counts(path: Path) -> tuple[Counter[Event], int, int]:
    counts = Counter[Event]()
    if not _is_there(path):
        return counts, 0, 0
    with os.fdopen(os.open(path, os.O_RDONLY | _OPEN_FLAGS), "rb") as file:
        _check_file(path, os.fstat(file.fileno()).st_mode)
        size, line = 0, file.readline(LONGEST_LINE)
        while line.endswith(b"\n"):
            event, more = _release(path, line)
            counts[event] += more
            size, line = size + len(line), file.readline(LONGEST_LINE)
    if line:
        *whole, last = line.rstrip(b"\r").split(b" ")
        begins = counts and len(line) < LONGEST_LINE and re.fullmatch(rb"[0-9.e+-]*", last)
        _release(path, b" ".join([*whole, *b"1.0 1.0 1".split()[len(whole) :]]) if begins else b"")
    return counts, size + len(line), len(line)


def _release(path: Path, line: bytes) -> tuple[Event, int]:
    """Return event and count of a line that :meth:`LedgerFile.append` wrote.

    Raises:
        DefenseError: it writes no such line.
    """
    try:
        text = line.decode("ascii").removesuffix("\n").removesuffix("\r")
        sigma, rate, count = text.split(" ")
        event, more = (float(sigma), float(rate)), int(count)
        check_release(*event, more)
        return event, more
    except ValueError:
        raise DefenseError(
            f"ledger={str(path)!r} is not a ledger: one of its lines is no release. It is left as "
            "it was. Give a path that nothing else writes to, or that does not exist yet"
        ) from None


def _append(path: Path, line: str, expected: int, cut: int = 0) -> int:
    """Append a whole line or none of it, and return once it would survive a loss of power.

    Args:
        path: of the file; it is created where no bytes are expected.
        line: with its end.
        expected: bytes that the file must hold.
        cut: how many of these are removed from the end first.

    Returns:
        The bytes of the file.
    """
    data = line.encode("ascii")
    start = expected - cut
    try:
        _is_there(path)
        flags = os.O_WRONLY | os.O_APPEND | _OPEN_FLAGS | (0 if expected else os.O_CREAT)
        descriptor = os.open(path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            _check_file(path, status.st_mode)
            if status.st_size != expected:
                raise _changed(path)
            if cut:
                os.ftruncate(descriptor, start)
            written = 0
            try:
                written = os.write(descriptor, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes fit on the disk")
                os.fsync(descriptor)
            except OSError:
                if os.fstat(descriptor).st_size == start + written:
                    os.ftruncate(descriptor, start)
                raise
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if not expected:
            _sync_folder(path.parent)
    except OSError as error:
        raise DefenseError(
            f"ledger={str(path)!r} cannot be written ({error}): the release was not made. Give a "
            "path in a folder that exists and has free space"
        ) from error
    if size != start + len(data):
        raise _changed(path)
    return size


def _changed(path: Path) -> DefenseError:
    return DefenseError(
        f"ledger={str(path)!r} was changed by something else since it was read: the release was "
        "not made. Give every run a path of its own, or run one after the other"
    )


def _sync_folder(folder: Path) -> None:
    """Write a folder's names to the disk; do nothing where folders cannot be opened (Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
