"""What an adversary sees, knows and may do; checked before an attack runs.

An attack declares a :class:`ThreatModel`: the capabilities its adversary cannot do without.
:func:`require` compares them at setup with those that hold in the user's run, so that no attack is
run whose result would be meaningless.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Capability(Enum):
    """One thing an adversary sees, knows or may do. The value is the sentence shown to users."""

    SEES_HEAD_GRADIENT = "sees the gradient of the output head's weight"
    SEES_HEAD_BIAS_GRADIENT = "sees the gradient of the output head's bias"
    SEES_EMBEDDING_GRADIENT = "sees the gradient of the input embeddings"
    SEES_ACTIVATIONS = "sees the activations at the split layer"
    KNOWS_MODEL = "knows the model's current weights"
    KNOWS_BOTTOM_MODEL = "knows the weights below the split layer"
    KNOWS_PUBLIC_TEXT = "has public text to calibrate on"
    CHOOSES_WEIGHTS = "chooses the weights it sends to clients (a dishonest server)"
    CHOOSES_ARCHITECTURE = "chooses the modules that clients train (a dishonest server)"
    KNOWS_TARGET_TEXT = "holds the candidate texts whose membership it asks about"


HONEST_BUT_CURIOUS = frozenset({Capability.KNOWS_MODEL, Capability.KNOWS_PUBLIC_TEXT})
"""A server that keeps to the protocol and looks at what it is sent (besides what it sees there)."""

DISHONEST_SERVER = HONEST_BUT_CURIOUS | {
    Capability.CHOOSES_WEIGHTS,
    Capability.CHOOSES_ARCHITECTURE,
    Capability.KNOWS_TARGET_TEXT,
}
"""A server that puts layers of its own into the model to ask for texts that it holds."""


@dataclass(frozen=True)
class ThreatModel:
    """What an attack's adversary needs.

    Attributes:
        needs: capabilities without which the attack cannot run.
        summary: one sentence for reports: who the adversary is.
    """

    needs: frozenset[Capability]
    summary: str

    @classmethod
    def create(cls, summary: str, *needs: Capability) -> ThreatModel:
        """Builds a threat model from its capabilities."""
        return cls(frozenset(needs), summary)


class ThreatModelError(ValueError):
    """The adversary of an attack lacks a capability in this setting."""


def missing(threat_model: ThreatModel, held: Iterable[Capability]) -> tuple[Capability, ...]:
    """The capabilities that ``threat_model`` needs and ``held`` lacks, in declaration order."""
    lacking = threat_model.needs - frozenset(held)
    return tuple(c for c in Capability if c in lacking)


def require(attack: str, threat_model: ThreatModel, held: Iterable[Capability]) -> None:
    """Refuses an attack whose adversary lacks a capability.

    Raises:
        ThreatModelError: naming the attack and every capability that is missing.
    """
    lacking = missing(threat_model, held)
    if lacking:
        listed = "; ".join(c.value for c in lacking)
        raise ThreatModelError(
            f"attack '{attack}' cannot run in this setting. Its adversary "
            f"({threat_model.summary}) must be one that: {listed}."
        )
