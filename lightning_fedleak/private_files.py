"""Files of tensors that only their user may write: checks of the mode, and hashes of contents."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def check_private(path: Path) -> None:
    """Raise an error for a file that somebody else may read or write; modes only on POSIX.

    Raises:
        ValueError: it is a link or no file, belongs to another user, or has another mode than 0600.
        OSError: its mode cannot be read.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a link, or no file")
    if os.name != "posix":
        return
    if status.st_uid != os.geteuid():
        raise ValueError("it belongs to another user")
    if status.st_mode & 0o077:
        raise ValueError(f"others may use it (mode {stat.S_IMODE(status.st_mode):04o}, not 0600)")


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, types, shapes and values of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
