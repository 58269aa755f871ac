"""Dataclasses that are read from lines of JSON and written to them, by the types of their fields.

A field is declared once: its type says which JSON value it takes, a default makes it optional, and
:func:`named` gives its key if that differs from its name, and the entry ``"write"`` in a field's
metadata is a function that converts it to JSON. :meth:`Record.from_json` reads and checks
a line, :func:`as_json` converts a record back, and :func:`append_line` adds a line to a file. Each
line holds the hash of the line before it and its own, so that changes of the file are detected.
"""

import hashlib
import json
import math
import os
import stat
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    IO,
    Annotated,
    Any,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

SCHEMA = 4
"""Version of the lines that are written and read."""
BEFORE = "before"
"""Key under which each line holds :func:`hash_line` of the line before it in the file."""
HASH = "hash"
"""Last key of each line: :func:`hash_line` of the line without it."""
BLOCK = 2**14
"""Bytes that are read at once from a file's end, for its last line; most lines are shorter."""
MAX_NUMBER = 2**53
"""Largest absolute value that is accepted: floats above it do not hold every integer exactly.

Gates' limits and the user's own metrics may be larger, such as the loss of a diverged run.
"""

JsonObject = Mapping[str, Any]
"""An object of JSON whose keys no record names, such as the settings of an attack."""


def _expect(holds: bool, path: str) -> None:
    """Raise a ``ValueError`` with the path of a JSON value unless a condition on it holds."""
    if not holds:
        raise ValueError(path)


def named(key: str, **more: Any) -> Any:
    """Return a dataclass field with its own key in JSON; ``more`` are arguments of ``field``."""
    return field(metadata={"key": key}, **more)


OTHER_KEYS = {"others": True}
"""Metadata of a mapping field that takes all keys of the JSON object without a field."""


@dataclass(frozen=True)
class Record:
    """A line, or an object in a line. Subclasses are frozen dataclasses."""

    @classmethod
    def from_json(cls, value: Any, path: str = "") -> Self:
        """Return the record of a JSON object.

        Args:
            value: the object.
            path: its path in the line, such as ``monitor/clients``, for the error.

        Raises:
            ValueError: a field is missing or is not what its type says.
        """
        _expect(isinstance(value, Mapping), path)
        root = f"{path}/" if path else ""
        record_type: type = cls
        fields_by_key, hints = _fields_by_key(record_type), _hints(record_type)
        arguments: dict[str, object] = {}
        for key, attribute in fields_by_key.items():
            if not attribute.init:
                continue
            if "others" in attribute.metadata:
                unnamed = {k: v for k, v in value.items() if k not in fields_by_key}
                arguments[attribute.name] = unnamed
            elif key in value:
                arguments[attribute.name] = _read(hints[attribute.name], value[key], root + key)
            elif attribute.default is MISSING and attribute.default_factory is MISSING:
                raise ValueError(f"{root}{key} is missing")
        return cls(**arguments)


@cache
def _fields_by_key(record_type: type) -> Mapping[str, Field[Any]]:
    """Return the fields of a dataclass by their keys in JSON; cached, as it runs on every line."""
    return {f.metadata.get("key", f.name): f for f in fields(record_type)}


def as_json(value: object) -> Any:
    """Return a value as types of strict JSON.

    Infinity of either sign becomes ``"infinite"``, NaN becomes null, and an object of any other
    type becomes its ``str``.
    """
    if is_dataclass(value):
        content: dict[str, object] = {}
        record_type: type = type(value)
        for key, attribute in _fields_by_key(record_type).items():
            json_value = attribute.metadata.get("write", as_json)(getattr(value, attribute.name))
            content |= json_value if "others" in attribute.metadata else {key: json_value}
        return content
    if isinstance(value, Mapping):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "infinite"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def hash_line(line: bytes) -> str:
    """Return the SHA-256 of a line without its line break; of ``b""`` if there is no line."""
    return hashlib.sha256(line).hexdigest()


def holds_own_hash(line: bytes) -> bool:
    """Return whether the hash at the end of a line is that of the line without it."""
    start, end = line[: -(64 + 2)], line[-(64 + 2) : -2]  # 64 hex digits and the closing '"}'
    before = start.removesuffix(f', "{HASH}": "'.encode())
    return before != start and hash_line(before + b"}") == end.decode(errors="replace")


# The lines that each thread has yet to write, by its id. A signal handler may add further ones.
_pending_lines: dict[int, list[tuple[Path, object]]] = {}
# The ids of the threads that are writing a line.
_writing_threads: set[int] = set()
# The files whose lock another process held for the whole waiting time.
_unlockable_files: set[str] = set()
LOCK_TRIES = 300
"""Number of attempts to lock a file, 10 ms apart."""


def append_line(path: Path, line: object) -> None:
    """Append a line to a file, and create the file and its folder if they are missing.

    The line holds its own hash and that of the previous line. If a killed fit left a part of a
    line, this part stays a line of its own. Processes that write to the same file wait for each
    other if the file system supports locks, for at most 3 seconds. A line from a signal handler,
    such as that of a checkpoint, is written after the line that it interrupts. A new file has mode
    0600, since its numbers are about one client's data.

    Args:
        path: the file.
        line: a record, which :func:`as_json` converts.

    Raises:
        OSError: the file cannot be written.
    """
    thread = threading.get_ident()
    lines = _pending_lines.setdefault(thread, [])
    lines.append((path, line))
    if thread in _writing_threads:
        return
    _writing_threads.add(thread)
    try:
        while lines:
            _append(*lines.pop(0))
    finally:
        _writing_threads.discard(thread)


def _append(path: Path, line: object) -> None:
    """Write one line with its two hashes to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab+") as file:
        _lock(file, path)
        last = _last_line(file)
        before = hash_line(last.removesuffix(b"\n"))
        text = json.dumps({**as_json(line), BEFORE: before}, allow_nan=False)
        text = f'{text[:-1]}, "{HASH}": "{hash_line(text.encode())}"}}'
        if last and not last.endswith(b"\n"):
            file.write(b"\n")
        file.write(f"{text}\n".encode())
        file.flush()
        if fcntl is not None:  # closing does not unlock a file that a forked process has open too
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: IO[bytes], path: Path) -> None:
    """Wait until a regular file can be locked.

    If another process holds the lock for too long, it warns once. Later lines then do not wait.
    """
    if fcntl is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    for _ in range(1 if str(path) in _unlockable_files else LOCK_TRIES):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # no locks here: the chain of hashes shows concurrent writes
            return None
    if str(path) not in _unlockable_files:
        _unlockable_files.add(str(path))
        warnings.warn(
            f"{path} is locked by another process, perhaps a stopped one: lines are added without "
            "waiting for it, and fedleak verify may find that two wrote at once",
            stacklevel=3,
        )


def closing_of(path: Path) -> tuple[int, str]:
    """Return the number of lines of a file, and the hash of the last; 0 if it is no file."""
    lines = split_lines(path.read_bytes()) if path.is_file() else []
    return len(lines), hash_line(lines[-1] if lines else b"")


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of a log without line breaks, also a last one that was cut off."""
    *lines, last = content.split(b"\n")
    return [*lines, last] if last else lines


def _last_line(file: IO[bytes]) -> bytes:
    """Return the last line of a file, with its line break if it has one."""
    start, end = file.seek(0, os.SEEK_END), b""
    while start and b"\n" not in end[:-1]:
        size = min(BLOCK, start)
        start = file.seek(start - size)
        end = file.read(size) + end
    return end[end.rfind(b"\n", 0, -1) + 1 :]


# ---- one field ----------------------------------------------------------------------------------


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the types of the fields of a record, a named tuple or a TypedDict, by their names."""
    return get_type_hints(kind, include_extras=True)


def _read(hint: Any, value: Any, path: str) -> Any:
    """Return a JSON value as the type of a field.

    Args:
        hint: the type.
        value: the value.
        path: its path in the line, for the error.

    Raises:
        ValueError: the value is not of this type.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _read_union(arguments, value, path)
    if kind is tuple:
        _expect(isinstance(value, list), path)
        return tuple(_read(arguments[0], item, path) for item in value)
    if kind is Annotated:
        return _read_annotated(*arguments, value=value, path=path)
    if kind is not None:
        _expect(isinstance(value, dict), path)
        return {k: _read(arguments[1], part, f"{path}/{k[:40]}") for k, part in value.items()}
    if hint in (Any, object):
        return value
    if issubclass(hint, Record):
        return hint.from_json(value, path)
    if issubclass(hint, tuple):  # a named one, which is a list in JSON
        hints = _hints(hint).values()
        _expect(isinstance(value, list) and len(value) == len(hints), path)
        return hint(*(_read(kind, part, path) for kind, part in zip(hints, value, strict=True)))
    return _read_annotated(hint, -MAX_NUMBER, MAX_NUMBER, value=value, path=path)


def _read_union(hints: Sequence[Any], value: Any, path: str) -> Any:
    """Return a JSON value as the first type of a union that accepts it."""
    if value is None and NoneType in hints:
        return None
    errors: list[ValueError] = []
    for hint in hints:
        try:
            return _read(hint, value, path)
        except ValueError as error:
            errors.append(error)
    raise max(errors, key=lambda error: len(str(error)))  # the longest path is the most precise


def _read_annotated(kind: type, *bounds: Any, value: Any, path: str) -> Any:
    """Return a JSON value as a plain type within bounds, or as an object with some checked keys.

    Args:
        kind: the type.
        bounds: the smallest and the largest number, then :data:`INFINITE` if infinity is allowed;
            for an object, a TypedDict of the keys that are checked.
        value: the JSON value.
        path: its path in the line, for the error.
    """
    if is_typeddict(bounds[0]):
        _expect(isinstance(value, dict), path)
        for name, hint in _hints(bounds[0]).items():
            if name in value:
                _read(hint, value[name], f"{path}/{name}")
        return value
    low, high, *words = bounds
    if words == [value]:
        return math.inf
    _expect(type(value) is kind or (kind is float and type(value) is int), path)
    _expect(kind in (str, bool) or (low <= value <= high and abs(value) < math.inf), path)
    return kind(value)


INFINITE = "infinite"
"""The word for infinity in JSON, which has no such number."""
Share = Annotated[float, 0, 1]
"""A number from 0 to 1."""
Size = Annotated[float, 0, MAX_NUMBER]
"""A finite number of 0 or above."""
Amount = Annotated[Size, INFINITE]
"""A number of 0 or above, or infinity."""
Limit = Annotated[float, -math.inf, math.inf, INFINITE]
"""A number, or infinity."""
Count = Annotated[int, 0, MAX_NUMBER]
"""An integer of 0 or above."""


class Releases(NamedTuple):
    """Releases (updates with the noise of differential privacy) of equal noise and sample rate.

    Attributes:
        noise_multiplier: standard deviation of the noise, divided by the clip norm.
        sample_rate: probability that a unit of privacy is in a release.
        number: number of releases.
    """

    noise_multiplier: Size
    sample_rate: Share
    number: Count


History = tuple[Releases, ...]
"""All releases of an account, in JSON a list of ``[noise multiplier, sample rate, number]``."""
