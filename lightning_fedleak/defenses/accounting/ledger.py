"""The ledger file, which records a client's releases and survives a crash.

A *release* is one noised update. A line of the file has its noise multiplier, its sample rate, and
a count.
"""

import errno
import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lightning_fedleak.defenses.base import DefenseError, check_integer, check_number
from lightning_fedleak.validate import explain_errors

Event = tuple[float, float]
"""Noise multiplier and sample rate of a release."""
LedgerPath = str | os.PathLike[str]

TERMS_SCHEMA = 1  # version of the file <ledger>.terms; other versions are refused
MAX_LINE_BYTES = 80  # two floats, a count and the line's end take fewer bytes
_GO_ON = (
    "Continue with the previous settings, or start a new run with a new ledger path, from a model "
    "that this data did not train"
)
# The end of a file's name: unit of privacy (the second form is of earlier versions), and client.
_ENDING = re.compile(r"(\.users|\.at-most-\d+-of-\d+)?(\.\d+-of-\d+)?")
# Neither follow a link nor wait for a pipe.
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class LedgerFile:
    """A file with one line per release of one client; it survives a crash.

    Args:
        path: The file to append to, one for each client; its folder must exist. A file of an
            earlier process is read and continued, so a new run needs a new path. If something else
            has changed, truncated or removed the file since it was read, the next release is
            refused. Nothing is written before the first release. With it, an incomplete last line
            (from a crash) is removed, if all lines before it are valid.

    Attributes:
        counts: The number of releases in the file, by noise multiplier and sample rate.

    Raises:
        DefenseError: The path is a folder, a link, a device or a pipe, or the file is not a ledger
            or cannot be read. The file is not changed.
    """

    def __init__(self, path: LedgerPath) -> None:
        self.path = Path(path)
        # Sizes in bytes: of the file, and of an incomplete last line.
        self.counts, self._size, self._tail_size = _read(self.path)

    def append(self, event: Event, count: int) -> None:
        """Write releases to the file before they happen.

        Raises:
            DefenseError: The file cannot be written or has changed.
        """
        if self._tail_size:
            self._size, self._tail_size = _append(self.path, "", self._size, self._tail_size), 0
        self._size = _append(self.path, f"{event[0]!r} {event[1]!r} {count}\n", self._size)


def client_path(path: LedgerPath, client: int, clients: int, unit: str) -> Path:
    """Return the path of one client's ledger.

    ``.users`` is appended if the unit of privacy is a user, and with several clients
    ``.<client>-of-<clients>``.

    Args:
        path: The ledger's path, as the user passed it.
        client: The index of the client.
        clients: The number of clients.
        unit: The unit of privacy: ``"example"`` or ``"user"``.

    Raises:
        DefenseError: There are files of another unit, or of another number of clients: an example
            may have belonged to another client there, and that cost would not be counted.
    """
    path = Path(path)
    unit_ending = {"example": "", "user": ".users"}[unit]
    of_clients = f"-of-{clients}" if clients > 1 else ""
    for existing in sorted(path.parent.glob(f"{glob.escape(path.name)}*")):
        if suffix := _ENDING.fullmatch(existing.name, len(path.name)):
            other_unit, number = suffix[1] or "", (suffix[2] or "").partition("-")
            if (other_unit, "".join(number[1:])) != (unit_ending, of_clients):
                raise DefenseError(
                    f"ledger={str(existing)!r} was written for another unit of privacy than "
                    f"{unit!r}, or another number of clients than {clients}. {_GO_ON}"
                )
    return path.with_name(f"{path.name}{unit_ending}{of_clients and f'.{client}{of_clients}'}")


def check_terms(ledger: Path, terms: Mapping[str, object]) -> None:
    """Write the terms of the ledger's releases to a file, or compare with those of an earlier run.

    Args:
        ledger: The path of the ledger; its terms are in ``<ledger>.terms``.
        terms: The settings that the accounting depends on.

    Raises:
        DefenseError: The ledger was written under other terms, or its terms are unknown.
    """
    path = ledger.with_name(f"{ledger.name}.terms")
    data = (json.dumps({"schema": TERMS_SCHEMA, **terms}, sort_keys=True) + "\n").encode()
    cause = f"ledger={str(ledger)!r} cannot be used"
    hint = "Give a path in a folder that exists and may be written"
    with explain_errors(cause, OSError, error=DefenseError, hint=hint):
        released = ledger.exists() and ledger.stat().st_size
        if not released and not path.is_symlink() and path.exists():
            content = path.read_bytes()
            if len(content) < len(data) and data.startswith(content):  # cut off by a kill
                path.unlink()
        exists = path.exists()
        agrees = exists and not path.is_symlink() and path.read_bytes() == data
        if not agrees and (exists or released):
            raise DefenseError(
                f"ledger={str(ledger)!r} was written under other terms than "
                f"{data.decode().strip()} (see {path.name}). {_GO_ON}"
            )
        if exists:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def check_release(noise_multiplier: float, sample_rate: float = 1.0, count: float = 1) -> None:
    """Raise a DefenseError if the noise multiplier, sample rate or count is invalid."""
    check_number("noise_multiplier", noise_multiplier, at_least=0)
    check_number("sample_rate", sample_rate, above=0, at_most=1)
    # A count may be a float, as in the tensors of a checkpoint.
    whole = isinstance(count, float) and count.is_integer()
    check_integer("count", int(count) if whole else count)


def _exists(path: Path) -> bool:
    """Return whether the file exists. It is not opened, because a pipe or a device would block.

    Raises:
        DefenseError: The path exists but is not a regular file.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    _check_file(path, mode)
    return True


def _check_file(path: Path, mode: int) -> None:
    """Raise an error unless a file's mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise DefenseError(
            f"ledger={str(path)!r} is no regular file: give the path of a file on a disk, which "
            "need not exist yet"
        )


def _read(path: Path) -> tuple[Counter[Event], int, int]:
    """Return counts by event, the file's size in bytes, and the size of an incomplete last line.

    The release of an incomplete line was never made.

    Raises:
        DefenseError: The file cannot be read.
    """
    with explain_errors(f"ledger={str(path)!r} cannot be read", OSError, error=DefenseError):
        counts = Counter[Event]()
        if not _exists(path):
            return counts, 0, 0
        with os.fdopen(os.open(path, os.O_RDONLY | _OPEN_FLAGS), "rb") as file:
            _check_file(path, os.fstat(file.fileno()).st_mode)
            size, line = 0, file.readline(MAX_LINE_BYTES)
            while line.endswith(b"\n"):
                event, count = _parse_line(path, line)
                counts[event] += count
                size, line = size + len(line), file.readline(MAX_LINE_BYTES)
        if line:
            # An incomplete last line must be the beginning of a valid one: all numbers except the
            # last are complete, and the line must be valid with ones instead of the rest.
            *numbers, end = line.rstrip(b"\r").split(b" ")
            may_be_cut = counts and len(line) < MAX_LINE_BYTES and re.fullmatch(rb"[0-9.e+-]*", end)
            filled_line = b" ".join([*numbers, *b"1.0 1.0 1".split()[len(numbers) :]])
            _parse_line(path, filled_line if may_be_cut else b"")
        return counts, size + len(line), len(line)


def _parse_line(path: Path, line: bytes) -> tuple[Event, int]:
    """Return event and count of a line that :meth:`LedgerFile.append` wrote.

    Raises:
        DefenseError: The line is not in the format of that method.
    """
    try:
        text = line.decode("ascii").removesuffix("\n").removesuffix("\r")
        sigma, rate, count_text = text.split(" ")
        event, count = (float(sigma), float(rate)), int(count_text)
        check_release(*event, count)
        return event, count
    except ValueError:
        raise DefenseError(
            f"ledger={str(path)!r} is not a ledger, and is unchanged: give a path that nothing "
            "else writes to"
        ) from None


def _append(path: Path, line: str, expected_size: int, n_remove: int = 0) -> int:
    """Append the whole line or nothing, and return once it is safely on the disk.

    Args:
        path: The file; it is created if ``expected_size`` is 0.
        line: The line, with its newline.
        expected_size: The size in bytes that the file must have.
        n_remove: The number of bytes to remove from the end first.

    Returns:
        The size of the file in bytes.
    """
    data = line.encode("ascii")
    start = expected_size - n_remove
    cause = f"ledger={str(path)!r} cannot be written: the release was not made"
    hint = "Give a path in a folder that exists and has free space"
    with explain_errors(cause, OSError, error=DefenseError, hint=hint):
        _exists(path)  # raises an error for a folder or a pipe
        flags = os.O_WRONLY | os.O_APPEND | _OPEN_FLAGS | (0 if expected_size else os.O_CREAT)
        descriptor = os.open(path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            _check_file(path, status.st_mode)
            if status.st_size != expected_size:
                raise _changed_error(path)
            if n_remove:
                os.ftruncate(descriptor, start)
            n_written = 0
            try:
                n_written = os.write(descriptor, data)
                if n_written != len(data):
                    raise OSError(errno.ENOSPC, f"{n_written} of {len(data)} bytes fit on the disk")
                os.fsync(descriptor)
            except OSError:
                if os.fstat(descriptor).st_size == start + n_written:
                    os.ftruncate(descriptor, start)
                raise
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if not expected_size:
            _sync_folder(path.parent)
    if size != start + len(data):
        raise _changed_error(path)
    return size


def _changed_error(path: Path) -> DefenseError:
    """Return the error for a file that something else has changed."""
    return DefenseError(
        f"ledger={str(path)!r} was changed by something else since it was read: the release was "
        "not made. Use a separate path for each run"
    )


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a new file survives a power loss; not on Windows."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
