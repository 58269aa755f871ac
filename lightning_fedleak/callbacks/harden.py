"""What a gate does instead of stopping a run: it turns the run's defences up."""

from __future__ import annotations

import lightning.pytorch as L

from lightning_fedleak.defenses import DPSGD, Defense
from lightning_fedleak.strategies import DefendedStrategy

_DPSGD_MEND = (
    " DPSGD can be only with accountant='filter' (with target_epsilon and target_delta, and "
    "most_notches above 0): other accountants do not cover noise that is chosen in the run."
)


def defenses_to_harden(trainer: L.Trainer) -> tuple[Defense, ...]:
    """The defences of a run that can be made stronger while it goes on.

    Raises:
        ValueError: there is none.
    """
    strategy = trainer.strategy
    given = strategy.defenses if isinstance(strategy, DefendedStrategy) else ()
    found = tuple(defense for defense in given if defense.can_harden)
    if not found:
        names = ", ".join(d.name for d in given) or "no defence"
        raise ValueError(
            f"RiskGate(action='harden') has nothing to turn up: this run has {names}. Give the "
            "Trainer strategy=DefendedStrategy('auto', defenses=[...]) with one that can be made "
            "stronger: GradientNoise or ActivationNoise with sigma above 0, or "
            "Freeze(..., when='hardened')." + _DPSGD_MEND * any(isinstance(d, DPSGD) for d in given)
        )
    return found


def harden(defenses: tuple[Defense, ...]) -> list[str]:
    """Turns every defence up by one notch.

    Returns:
        What changed; empty where all are as strong as they get.
    """
    changes = (defense.harden() for defense in defenses)
    return [change for change in changes if change is not None]


__all__ = ["defenses_to_harden", "harden"]
