"""Is this text there: adversaries that put layers of their own into the model."""

from lightning_fedleak.attacks.membership.base import (
    CRAFTED,
    Granularity,
    MembershipAttack,
    MembershipGuess,
    last_real,
    sentence_rows,
)

__all__ = [
    "CRAFTED",
    "Granularity",
    "MembershipAttack",
    "MembershipGuess",
    "last_real",
    "sentence_rows",
]
