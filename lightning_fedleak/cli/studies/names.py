"""Names in the options of the command line. It imports no library, so it loads quickly."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

INVERT_ATTACKS = ("prefix", "sweeps", "descent", "paper")
"""The values of ``--attack`` of ``fedleak invert``."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" with the most similar name; empty if none is similar."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
