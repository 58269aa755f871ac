"""Files that only their owner may read: modes, secrets, hashes, and recovered text."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor


def check_private(path: Path) -> None:
    """Raise an error for a file that another user may read or write; modes only on POSIX.

    Raises:
        ValueError: it is a link or no file, belongs to another user, or has another mode than 0600.
        OSError: its mode cannot be read.
    """
    status = os.lstat(path)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is a link, or no file"
    elif os.name == "posix" and status.st_uid != os.geteuid():
        problem = "it belongs to another user"
    elif os.name == "posix" and status.st_mode & 0o077:
        problem = f"others may use it (mode {stat.S_IMODE(status.st_mode):04o}, not 0600)"
    if problem:
        raise ValueError(problem)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, types, shapes and values of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


WRAPPERS = frozenset(
    ("base_model", "model", "module", "default", "modules_to_save", "_orig_mod", "_forward_module")
)
"""Parts of a parameter's name that depend on the wrappers of the model, or on its format."""


def plain_name(name: str) -> str:
    """Return a parameter's name without :data:`WRAPPERS`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def hash_weights(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the type and SHA-256 of each tensor by its name without :data:`WRAPPERS`.

    The same weights have the same hashes in a training loop, in a checkpoint of Lightning, and in
    the files of ``save_pretrained``, adapters too.
    """
    names = {name: plain_name(name) for name in tensors}
    counts, hashes = Counter(names.values()), {}
    for name, tensor in tensors.items():
        if counts[plain := names[name]] > 1:  # the name would be ambiguous
            continue
        hashes[plain] = f"{str(tensor.dtype).removeprefix('torch.')} {hash_tensors({'': tensor})}"
    return hashes


def digest_weights(hashes: Mapping[str, str]) -> str:
    """Return one hash of the hashes from :func:`hash_weights`, sorted by name."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def save_private(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file of mode 0600, whole or not at all, over an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    _write(path, save(dict(tensors), metadata), os.replace)


def load_private(path: Path) -> dict[str, Tensor]:
    """Return the tensors that :func:`save_private` wrote.

    Raises:
        ValueError: other users may access the file, or it holds no tensors.
        OSError: it cannot be read.
    """
    check_private(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"it holds no tensors: {error}") from error


def save_state(path: Path, state: object) -> None:
    """Write a state of plain values and tensors to a file of mode 0600, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, tensors))
    save_private(path, tensors, {"state": text})


def load_state(path: Path) -> Any:
    """Return the state that :func:`save_state` wrote to a file."""
    with safe_open(path, "pt") as file:

        def unpacked(value: Any) -> Any:
            if isinstance(value, dict) and "tensor" in value:
                return file.get_tensor(value["tensor"])
            if isinstance(value, dict):
                return {name: unpacked(item) for name, item in value["items"]}
            return [unpacked(item) for item in value] if isinstance(value, list) else value

        return unpacked(json.loads(file.metadata()["state"]))


def _packed(value: object, tensors: dict[str, Tensor]) -> object:
    """Return a state in JSON's types, and move its tensors to ``tensors``."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().clone().contiguous()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"items": [[name, _packed(item, tensors)] for name, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_packed(item, tensors) for item in value]
    return value


def write_secret(path: Path, content: Mapping[str, object], *, replace: bool = False) -> None:
    """Write plain values as JSON to a file of mode 0600, whole or not at all.

    Args:
        path: the path of the file.
        content: the values by name.
        replace: whether to overwrite an earlier file.

    Raises:
        FileExistsError: the file exists, and ``replace`` is False.
        OSError: it cannot be written.
    """
    _write(path, json.dumps(content, indent=1).encode(), os.replace if replace else os.link)


def write_lines(path: Path, lines: Iterable[object]) -> None:
    """Write or overwrite a file of mode 0600 with lines of JSON, whole or not at all.

    Args:
        path: the path of the file.
        lines: the plain values, one for each line.

    Raises:
        OSError: it cannot be written.
        TypeError: a line is no JSON.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    _write(path, text.encode(), os.replace)


def _write(path: Path, content: bytes, publish: Callable[[Path, Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_secret(path: Path, name: str) -> Any:
    """Return the values that :func:`write_secret` wrote.

    Args:
        path: the path of the file.
        name: the name of the secret, for the message.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: other users may read it.
        ValueError: it is no JSON.
    """
    with open(path, encoding="utf-8") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise PermissionError(
                f"{name} {path} has mode {mode:04o}, so that others may read it: chmod 600 {path}"
            )
        return json.load(file)


GAP = "[?]"
"""The text in place of a token that was not guessed."""


class RevealFiles:
    """Recovered text in local files of mode 0600, which are never logged and never uploaded.

    Args:
        folder: the folder of the files.
        rank: the rank of this process, a part of the files' names.
        tokenizer: the tokenizer that decodes token ids; None writes the ids.
    """

    def __init__(self, folder: Path, rank: int, tokenizer: Any | None) -> None:
        self._folder = folder
        self._rank = rank
        self._tokenizer = tokenizer

    def append(self, kind: str, lines: Iterable[str]) -> None:
        """Append lines to ``revealed_<kind>.rank<r>.txt``, which only its owner may read."""
        path = self._folder / f"revealed_{kind}.rank{self._rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever its mode was
            file.writelines(f"{line}\n" for line in lines)

    def each(self, ids: Sequence[int]) -> str:
        """Return the texts of single tokens."""
        if self._tokenizer is None:
            return " ".join(str(i) for i in ids)
        return " ".join(repr(self._tokenizer.decode([i])) for i in ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a token sequence; an id below 0 is a token that was not guessed."""
        if self._tokenizer is None:
            return " ".join(GAP if i < 0 else str(i) for i in ids)
        spans = [(is_gap, [*span]) for is_gap, span in groupby(ids, lambda i: i < 0)]
        texts = (GAP * len(span) if gap else self._tokenizer.decode(span) for gap, span in spans)
        return repr("".join(texts))
