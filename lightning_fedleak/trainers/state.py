"""A state in a file of safetensors, with JSON for what is no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.release import UpdateRelease
from lightning_fedleak.private_files import save_private

DEFENSES = "defenses.safetensors"
"""What a checkpoint holds of the defences: releases and account, no secret."""


def save_state(path: Path, state: object) -> None:
    """Write a state of plain values and tensors to a file of mode 0600."""
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
                return {name: unpacked(one) for name, one in value["items"]}
            return [unpacked(one) for one in value] if isinstance(value, list) else value

        return unpacked(json.loads(file.metadata()["state"]))


def _packed(value: object, tensors: dict[str, Tensor]) -> object:
    """Return a state in JSON's types, with its tensors put aside."""
    if isinstance(value, Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().clone().contiguous()
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        return {"items": [[name, _packed(one, tensors)] for name, one in value.items()]}
    if isinstance(value, list | tuple):
        return [_packed(one, tensors) for one in value]
    return value


def save_defenses(release: UpdateRelease, folder: Path, rank: int) -> None:
    """Write the defences' states into a checkpoint's folder, in the first process alone."""
    if rank == 0:
        save_state(folder / DEFENSES, release.state_dict())


def load_defenses(release: UpdateRelease, folder: Path) -> None:
    """Give the defences what :func:`save_defenses` wrote.

    Raises:
        DefenseError: the folder holds no states.
    """
    path = folder / DEFENSES
    if not path.exists():
        raise DefenseError(
            f"{release.owner}: {folder} has no {DEFENSES}, so what was released before it is not "
            "known. Go on from a checkpoint that a defended run saved whole, or begin a new run "
            "from its weights."
        )
    release.load_state_dict(load_state(path))
