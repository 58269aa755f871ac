"""What a checkpoint holds of the defences."""

from __future__ import annotations

from pathlib import Path

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.release import UpdateRelease
from lightning_fedleak.private_files import load_state, save_state

DEFENSES = "defenses.safetensors"
"""What a checkpoint holds of the defences: releases and account, no secret."""


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
