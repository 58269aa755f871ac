"""Attacks that ask whether a text is in the batch: with crafted layers, or passively."""

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
