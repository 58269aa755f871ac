"""Names of attacks and defences that users write. Imports no library."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lightning_fedleak.cli.finetuning import SourceError

GAME_ATTACKS = ("fc", "fc-full", "attention", "trained", "trained-full", "gradient", "subspace")
INVERT_ATTACKS = ("prefix", "sweeps", "descent", "paper", "relaxation")
GRADIENT_ATTACKS = ("subspace", "dlg", "tag", "lamp", "film")
SWEEP_ATTACKS = ("flatchat", "aligned_flatchat", "fc", "attention", "prefix", "descent")
DEFENSE_NAMES = (
    *("none", "activation_compression", "activation_noise", "dpsgd", "freeze"),
    *("gradient_compression", "gradient_noise"),
    *("token_ldp", "grr", "rappor", "the", "dbitflip"),  # mechanisms of token_ldp
)


class SpecError(SourceError):
    """A defence in words that names no defence, or settings that it does not take."""


def check_defense(text: str) -> None:
    """Raise an error unless the text begins with the name of a defence.

    Args:
        text: ``name`` or ``name:setting=value``.

    Raises:
        SpecError: names the defences, and the one that is spelled alike.
    """
    name = text.strip().partition(":")[0]
    if name not in DEFENSE_NAMES:
        raise SpecError(
            f"there is no defence '{name}'{did_you_mean(name, DEFENSE_NAMES)}. These exist: "
            f"{', '.join(DEFENSE_NAMES)}"
        )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return the nearest of some names as the end of a clause; empty where none is near."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
