"""Files that only their owner may read (mode 0600), and hashes of tensors.

Tensors and states are written as safetensors, secrets and lines as JSON. Each of these files is
written completely or not at all. :class:`RevealFiles` appends recovered text to files.
"""

import errno
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
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor


def check_private(path: Path) -> None:
    """Raise an error for a file that another user may access.

    Owner and mode are checked on POSIX only.

    Raises:
        ValueError: The file is a link or no regular file, belongs to another user, or gives
            permissions to other users.
        OSError: Its mode cannot be read.
    """
    status = os.lstat(path)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is a link, or not a file"
    elif os.name == "posix" and status.st_uid != os.geteuid():
        problem = "it belongs to another user"
    elif os.name == "posix" and status.st_mode & 0o077:
        problem = f"other users may access it (mode {stat.S_IMODE(status.st_mode):04o}, not 0600)"
    if problem:
        raise ValueError(problem)


MAX_BYTES = 1 << 30
"""The most bytes of a file that somebody else wrote: the logs of 300,000 looks."""


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file that somebody else may have made.

    An archive may hold links to any file of its reader, so that a link is not followed. The size is
    counted, because a system file may state the size 0 and never end.

    Raises:
        OSError: It is a link, a folder, a device or a pipe, has more than :data:`MAX_BYTES`, or
            cannot be read.
    """
    flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    with os.fdopen(os.open(path, os.O_RDONLY | sum(flags)), "rb") as file:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        # None if a system file has nothing yet.
        content = (file.read(MAX_BYTES + 1) or b"") if is_regular else b""
    if not is_regular or len(content) > MAX_BYTES:
        why = f"it is no regular file of at most {MAX_BYTES} bytes"
        raise OSError(errno.EINVAL, why, str(path))
    return content


def file_name(name: object) -> str:
    """Return the name of a client, which a client may choose, as a part of a file's name.

    Different names give different parts. No part leads to another folder or is too long.
    """
    quoted = quote(str(name), safe=" ", errors="surrogatepass")
    digest = hashlib.sha256(quoted.encode()).hexdigest()
    return quoted if len(quoted) <= 100 else f"{quoted[:64]}~{digest}"


_KEY = secrets.token_bytes(32)  # of this process; nothing writes or sends it


def name_content(content: bytes) -> str:
    """Return 16 hexadecimal digits that are the same for the same content within this process.

    They may be published: a guess of private content cannot be tested without the key.
    """
    return hashlib.blake2b(content, key=_KEY, digest_size=8).hexdigest()


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
"""Parts of a parameter's name that a model's wrapper or a file format may add."""


def plain_name(name: str) -> str:
    """Return a parameter's name without :data:`WRAPPERS`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def hash_weights(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the type and SHA-256 of each tensor by its name without :data:`WRAPPERS`.

    The same weights have the same hashes in a training loop, in a checkpoint of Lightning, and in
    the files of ``save_pretrained``, also those of adapters. Tensors with equal names are skipped.
    """
    names = {name: plain_name(name) for name in tensors}
    counts, hashes = Counter(names.values()), {}
    for name, tensor in tensors.items():
        if counts[plain := names[name]] > 1:  # the name would be ambiguous
            continue
        hashes[plain] = f"{str(tensor.dtype).removeprefix('torch.')} {hash_tensors({'': tensor})}"
    return hashes


def digest_weights(hashes: Mapping[str, str]) -> str:
    """Return one hash of all hashes from :func:`hash_weights`."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def save_private(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write or overwrite a safetensors file of mode 0600, completely or not at all.

    Args:
        path: The path of the file.
        tensors: The tensors by name.
        metadata: Texts by name for the header of the file.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(path, save(dict(tensors), metadata))


def load_private(path: Path) -> dict[str, Tensor]:
    """Return the tensors that :func:`save_private` wrote.

    Raises:
        ValueError: Other users may access the file, or it holds no tensors.
        OSError: It cannot be read.
    """
    check_private(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"it holds no tensors: {error}") from error


def save_state(path: Path, state: object) -> None:
    """Write a state to a safetensors file of mode 0600, completely or not at all.

    Args:
        path: The path of the file.
        state: Tensors and plain values, in nested mappings, lists and tuples.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_pack(state, tensors))
    save_private(path, tensors, {"state": text})


def load_state(path: Path) -> Any:
    """Return the state that :func:`save_state` wrote to a file, with lists for tuples."""
    with safe_open(path, "pt") as file:

        def unpack(value: Any) -> Any:
            if isinstance(value, dict) and "tensor" in value:
                return file.get_tensor(value["tensor"])
            if isinstance(value, dict):
                return {name: unpack(item) for name, item in value["items"]}
            return [unpack(item) for item in value] if isinstance(value, list) else value

        return unpack(json.loads(file.metadata()["state"]))


def _pack(value: object, tensors: dict[str, Tensor]) -> object:
    """Return a state as JSON types with references to its tensors, which are added to ``tensors``.

    A mapping becomes ``{"items": [[key, value], ...]}``, because its keys need not be strings.
    A tensor becomes ``{"tensor": name}``.
    """
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().clone().contiguous()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"items": [[name, _pack(item, tensors)] for name, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors) for item in value]
    return value


def write_secret(path: Path, content: Mapping[str, object], *, replace: bool = False) -> None:
    """Write plain values as JSON to a file of mode 0600, completely or not at all.

    Args:
        path: The path of the file.
        content: The values by name.
        replace: Whether to overwrite an earlier file.

    Raises:
        FileExistsError: The file exists, and ``replace`` is False.
        OSError: It cannot be written.
    """
    write_whole(path, json.dumps(content, indent=1).encode(), os.replace if replace else os.link)


def write_lines(path: Path, lines: Iterable[object]) -> None:
    """Write or overwrite a file of mode 0600 with lines of JSON, completely or not at all.

    Args:
        path: The path of the file.
        lines: The plain values of each line.

    Raises:
        OSError: The file cannot be written.
        TypeError: A line cannot be written as JSON.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(path, text.encode())


def write_whole(
    path: Path, content: bytes, publish: Callable[[Path, Path], object] = os.replace
) -> None:
    """Write a file of mode 0600, completely or not at all.

    It is written under a temporary name in the same folder, then gets its final name.

    Args:
        path: The path of the file, whose folder is created if it is missing.
        content: The content.
        publish: The function that gives the file its name: ``os.replace`` overwrites an earlier
            file, ``os.link`` raises an error if there is one.
    """
    if path.exists() and not path.is_file():  # a device such as /dev/null would be replaced
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_secret(path: Path, name: str) -> Any:
    """Return the values that :func:`write_secret` wrote.

    Args:
        path: The path of the file.
        name: The name of the secret, for the message.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: Other users may access it.
        ValueError: It is not JSON.
    """
    with open(path, encoding="utf-8") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise PermissionError(
                f"{name} {path} has mode {mode:04o}, so that others may read it: chmod 600 {path}"
            )
        return json.load(file)


GAP = "[?]"
"""The text that stands for a token that an attack did not recover."""


class RevealFiles:
    """Writes recovered text to local files of mode 0600, which are never logged or uploaded.

    Args:
        folder: The folder of the files.
        rank: The rank of this process, a part of the files' names.
        tokenizer: The tokenizer that decodes token ids; None to write the ids.
    """

    def __init__(self, folder: Path, rank: int, tokenizer: Any | None) -> None:
        self._folder = folder
        self._rank = rank
        self._tokenizer = tokenizer

    def append(self, kind: str, lines: Iterable[str]) -> None:
        """Append lines to ``revealed_<kind>.rank<r>.txt``, which only its owner may read.

        Args:
            kind: The kind of text, such as ``"words"``.
            lines: The lines, without line breaks.
        """
        path = self._folder / f"revealed_{kind}.rank{self._rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # an earlier file may have another mode
            file.writelines(f"{line}\n" for line in lines)

    def each(self, ids: Sequence[int]) -> str:
        """Return the texts of tokens, each decoded separately; their ids without a tokenizer."""
        if self._tokenizer is None:
            return " ".join(str(i) for i in ids)
        return " ".join(repr(self._tokenizer.decode([i])) for i in ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a token sequence; an id below 0 is a token that was not recovered."""
        if self._tokenizer is None:
            return " ".join(GAP if i < 0 else str(i) for i in ids)
        spans = [(is_gap, [*span]) for is_gap, span in groupby(ids, lambda i: i < 0)]
        texts = (GAP * len(span) if gap else self._tokenizer.decode(span) for gap, span in spans)
        return repr("".join(texts))
