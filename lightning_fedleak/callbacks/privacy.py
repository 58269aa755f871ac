"""What a run's defences say their releases have cost, under the names of the logs."""

from __future__ import annotations

import lightning.pytorch as L

from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.strategies import DefendedStrategy

LOGGED = ("epsilon", "delta", "noise_multiplier")


def accounting_defenses(trainer: L.Trainer) -> tuple[Defense, ...]:
    """The defences of a run that account for what they release."""
    strategy = trainer.strategy
    given = strategy.defenses if isinstance(strategy, DefendedStrategy) else ()
    return tuple(d for d in given if type(d).privacy is not Defense.privacy)


def privacy_values(trainer: L.Trainer) -> dict[str, float]:
    """What the releases so far have cost.

    As ``privacy/epsilon``, ``privacy/delta`` and, where there is one, ``privacy/noise_multiplier``,
    or as ``privacy/<defence>/...`` where several defences account. None of it covers the logs of
    leakage themselves, nor what a gate decides in sight of them.
    """
    defenses = accounting_defenses(trainer)
    values: dict[str, float] = {}
    for defense in defenses:
        try:
            cost = defense.privacy
        except DefenseError:  # nothing was released yet
            continue
        if cost is not None:
            root = "privacy" if len(defenses) == 1 else f"privacy/{defense.name}"
            known = {name: getattr(cost, name) for name in LOGGED}
            values |= {f"{root}/{n}": float(v) for n, v in known.items() if v is not None}
    return values


def privacy_tags(trainer: L.Trainer) -> list[str]:
    """The logged names of every epsilon."""
    defenses = accounting_defenses(trainer)
    if len(defenses) == 1:
        return ["privacy/epsilon"]
    return [f"privacy/{defense.name}/epsilon" for defense in defenses]


__all__ = ["accounting_defenses", "privacy_tags", "privacy_values"]
