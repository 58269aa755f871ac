"""Names of attacks that users write. Imports no library."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

GAME_ATTACKS = ("fc", "fc-full", "attention", "trained", "trained-full", "gradient", "subspace")
INVERT_ATTACKS = ("prefix", "sweeps", "descent", "paper", "relaxation")
SWEEP_ATTACKS = ("flatchat", "aligned_flatchat", "fc", "attention", "prefix", "descent")


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return the nearest of some names as the end of a clause; empty where none is near."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
