"""What a client remembers, from round to round, of the models that it was sent.

A client's rounds may run in several processes, and a process may end. What the first model said of
the client's texts, and which of them left in an update, is then in files that only the client's
user may read.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from lightning_fedleak.engine import Memory
from lightning_fedleak.private_files import read_secret, write_secret

FILE = "memorization_rounds.json"
"""Beside the base's answers, in the client's folder."""


def recall(folder: Path, federation: str) -> tuple[int, Memory] | None:
    """Return the round that a client wrote last, and its state; None: nothing of this federation.

    Raises:
        PermissionError: others may read the file.
        ValueError: it is no JSON.
    """
    try:
        content = read_secret(folder / FILE, "the client's memory")
    except FileNotFoundError:
        return None
    if content["federation"] != federation:
        return None
    return content["round"], content["state"]


def remember(folder: Path, federation: str, round_: int, state: Memory) -> Memory:
    """Write down a client's state after a round, and return it as :func:`recall` does."""
    plain = {
        name: {n: v.tolist() if isinstance(v, Tensor) else v for n, v in part.items()}
        for name, part in state.items()
    }
    content = {"federation": federation, "round": round_, "state": plain}
    write_secret(folder / FILE, content, replace=True)
    written: Memory = json.loads(json.dumps(plain))
    return written
