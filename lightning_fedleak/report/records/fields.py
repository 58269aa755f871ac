"""Dataclasses that are read from JSON, checked and written by the types of their fields.

A field is declared once: its type says what JSON may hold there, a default says that it may be
missing, and ``named`` gives the key where that is no name in Python.
"""

from __future__ import annotations

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
"""Key of each line that holds :func:`hash_line` of the line before it in its file."""
HASH = "hash"
"""Last key of each line: :func:`hash_line` of the line without it."""
BLOCK = 2**14
"""Bytes of a file's end that are read at once: more than most lines have."""
MAX_NUMBER = 2**53
"""Largest size of a number that is read: above it floats are not exact, and no run gets there.

Limits and the user's own metrics may be larger, such as the loss of a run that diverged.
"""

JsonObject = Mapping[str, Any]
"""An object of JSON whose keys no record names, such as the settings of an attack."""


def _expect(holds: bool, path: str) -> None:
    """Raise an error for the value at a path unless a condition on it holds."""
    if not holds:
        raise ValueError(path)


def named(key: str, **more: Any) -> Any:
    """Return a dataclass field that has another key in JSON than its name."""
    return field(metadata={"key": key}, **more)


OTHER_KEYS = {"others": True}
"""Metadata of a field that takes the keys which no other field of its record has."""


@dataclass(frozen=True)
class Record:
    """A part of a line. Subclasses are frozen dataclasses."""

    @classmethod
    def from_json(cls, value: Any, path: str = "") -> Self:
        """Return the record that an object of JSON holds.

        Args:
            value: the object.
            path: where in its line it is, for the error.

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
    """Return the fields of a dataclass by their keys in JSON; long logs ask for them often."""
    return {f.metadata.get("key", f.name): f for f in fields(record_type)}


def as_json(value: object) -> Any:
    """Return a value as strict JSON takes it.

    Infinity is the word ``infinite``, what is no number is null, and what JSON has no form for is
    its text.
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
    """Return the SHA-256 of a line without its end; of no bytes where no line is before."""
    return hashlib.sha256(line).hexdigest()


def holds_own_hash(line: bytes) -> bool:
    """Return whether the last key of a line is the hash of all that is before it."""
    start, end = line[: -(64 + 2)], line[-(64 + 2) : -2]
    before = start.removesuffix(f', "{HASH}": "'.encode())
    return before != start and hash_line(before + b"}") == end.decode(errors="replace")


_unwritten: dict[int, list[tuple[Path, object]]] = {}
"""Lines to write of each thread, by its id: several where a signal handler interrupts it."""
_writing: set[int] = set()
"""Threads that write a line now."""
_unlocked: set[str] = set()
"""Files that another process did not let go."""
LOCK_TRIES = 300
"""Times 10 ms for which another process is waited for."""


def append_line(path: Path, line: object) -> None:
    """Add a line to a file, whose folder is made where it is missing.

    The line holds its own hash, and that of the one before, whatever that is: a part of a line that
    a killed fit wrote stays a line of its own. Processes that write to one file wait for each
    other, where the file system can lock, but not for ever. What a signal handler adds, such as
    that of a checkpoint, comes after the line that it interrupts. A new file only its owner may
    read: its numbers are of one client's data.

    Raises:
        OSError: the file cannot be written.
    """
    thread = threading.get_ident()
    lines = _unwritten.setdefault(thread, [])
    lines.append((path, line))
    if thread in _writing:
        return
    _writing.add(thread)
    try:
        while lines:
            _append(*lines.pop(0))
    finally:
        _writing.discard(thread)


def _append(path: Path, line: object) -> None:
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
        if fcntl is not None:  # closing does not unlock where a fork has the file too
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: IO[bytes], path: Path) -> None:
    """Wait for other processes that write to a regular file; once in vain, no more."""
    if fcntl is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    for _ in range(1 if str(path) in _unlocked else LOCK_TRIES):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # without locks the chain shows that two wrote at once
            return None
    if str(path) not in _unlocked:
        _unlocked.add(str(path))
        warnings.warn(
            f"{path} is locked by another process, perhaps a stopped one: lines are added without "
            "waiting for it, and fedleak verify may find that two wrote at once",
            stacklevel=3,
        )


def closing_of(path: Path) -> tuple[int, str]:
    """Return how many lines a file has, and the hash of the last; none of no regular file."""
    lines = split_lines(path.read_bytes()) if path.is_file() else []
    return len(lines), hash_line(lines[-1] if lines else b"")


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of a log without their ends, a last one that was cut too."""
    *lines, last = content.split(b"\n")
    return [*lines, last] if last else lines


def _last_line(file: IO[bytes]) -> bytes:
    """Return the last line of a file, with its end where it has one."""
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


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a type is made of; long logs ask for it often."""
    return get_origin(hint), get_args(hint)


def _read(hint: Any, value: Any, path: str) -> Any:
    """Return what a value of JSON is as a field of a type.

    Raises:
        ValueError: it is not what the type says.
    """
    kind, arguments = _parts(hint)
    if kind in (Union, UnionType):
        return _read_one_of(arguments, value, path)
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
        return hint(*(_read(one, part, path) for one, part in zip(hints, value, strict=True)))
    return _read_annotated(hint, -MAX_NUMBER, MAX_NUMBER, value=value, path=path)


def _read_one_of(hints: Sequence[Any], value: Any, path: str) -> Any:
    """Return what a value is as the first of several types that it can be."""
    if value is None and NoneType in hints:
        return None
    odd: list[ValueError] = []
    for hint in hints:
        try:
            return _read(hint, value, path)
        except ValueError as error:
            odd.append(error)
    raise max(odd, key=lambda error: len(str(error)))  # the longest path is the most precise


def _read_annotated(kind: type, *bounds: Any, value: Any, path: str) -> Any:
    """Return a value of a plain type, or an object of which some keys are checked.

    Args:
        kind: the type.
        bounds: the least and the largest number, and :data:`INFINITE` where infinity may be too; of
            an object a TypedDict of the keys.
        value: The value of JSON.
        path: The path to it.
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
"""The word for infinity in JSON, which has no number for it."""
Share = Annotated[float, 0, 1]
"""A number from 0 to 1."""
Size = Annotated[float, 0, MAX_NUMBER]
"""A number of 0 or above."""
Amount = Annotated[Size, INFINITE]
"""A number of 0 or above, or infinity."""
Limit = Annotated[float, -math.inf, math.inf, INFINITE]
"""A number, or infinity."""
Count = Annotated[int, 0, MAX_NUMBER]
"""An integer of 0 or above."""


class Releases(NamedTuple):
    """Releases of one kind.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clip norm.
        sample_rate: chance of each unit to be in a release.
        number: how many there were.
    """

    noise_multiplier: Size
    sample_rate: Share
    number: Count


History = tuple[Releases, ...]
"""All releases of an account: ``[noise multiplier, sample rate, count]`` each."""
