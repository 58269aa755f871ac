"""Capabilities of an adversary, which are checked before an attack runs.

An attack declares a :class:`ThreatModel`: the capabilities that its adversary needs. At setup,
:func:`require` compares them with the capabilities that the adversary has in the user's run. So an
attack never runs in a setting in which its result has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Capability(Enum):
    """A capability of an adversary. Its value is the phrase for messages.

    Examples:
        >>> from lightning_fedleak import Capability
        >>> Capability.KNOWS_MODEL.value
        "knows the model's current weights"
    """

    SEES_HEAD_GRADIENT = "sees the gradient of the output head's weight"
    SEES_HEAD_BIAS_GRADIENT = "sees the gradient of the output head's bias"
    SEES_EMBEDDING_GRADIENT = "sees the gradient of the input embeddings"
    SEES_ACTIVATIONS = "sees the activations at the split layer"
    KNOWS_MODEL = "knows the model's current weights"
    KNOWS_BOTTOM_MODEL = "knows the weights below the split layer"
    KNOWS_PUBLIC_TEXT = "has public text to calibrate on"
    CHOOSES_WEIGHTS = "chooses the weights it sends to clients (a dishonest server)"
    CHOOSES_ARCHITECTURE = "chooses the modules that clients train (a dishonest server)"
    KNOWS_TARGET_TEXT = "holds the candidate texts whose membership it infers"
    HAS_RELEASED_MODEL = "gets the trained model, and has its public base"


HONEST_BUT_CURIOUS = frozenset({Capability.KNOWS_MODEL, Capability.KNOWS_PUBLIC_TEXT})
"""A server that follows the protocol. An attack adds capabilities for the data it receives."""

DISHONEST_SERVER = HONEST_BUT_CURIOUS | {
    Capability.CHOOSES_WEIGHTS,
    Capability.CHOOSES_ARCHITECTURE,
    Capability.KNOWS_TARGET_TEXT,
}
"""A server that adds layers to the model to test whether a client trains on candidate texts."""


@dataclass(frozen=True)
class ThreatModel:
    """The adversary of an attack.

    Examples:
        >>> from lightning_fedleak import Capability, ThreatModel
        >>> ThreatModel.create("a curious server", Capability.SEES_HEAD_GRADIENT).summary
        'a curious server'

    Attributes:
        needs: The capabilities that the attack needs.
        summary: A description of the adversary, for reports.
    """

    needs: frozenset[Capability]
    summary: str

    @classmethod
    def create(cls, summary: str, *needs: Capability) -> ThreatModel:
        """Return a threat model with these capabilities."""
        return cls(frozenset(needs), summary)


def require(attack: str, threat_model: ThreatModel, capabilities: Iterable[Capability]) -> None:
    """Raise an error unless the adversary has all capabilities that an attack needs.

    Args:
        attack: The name of the attack.
        threat_model: The attack's threat model.
        capabilities: The capabilities of the adversary in the user's run.

    Raises:
        ValueError: A capability is missing. The message names the attack and all missing ones.
    """
    missing = threat_model.needs - frozenset(capabilities)
    if missing:
        names = "; ".join(c.value for c in Capability if c in missing)  # in the order of the enum
        raise ValueError(
            f"attack '{attack}' is of an adversary ({threat_model.summary}) that: {names}"
        )
