"""See, while a language model is being fine-tuned, what a federated client would give away.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_fedleak.attacks import (
        AlignedFlatChat,
        AttentionMembership,
        BagOfWords,
        BiasSign,
        FCMembership,
        FlatChat,
        PublicText,
        RevealLabels,
    )
    from lightning_fedleak.callbacks import LeakageLimitExceeded, LeakageMonitor, RiskGate
    from lightning_fedleak.defenses import Freeze, GradientNoise
    from lightning_fedleak.strategies import DefendedStrategy

_HOMES = {
    "attacks": (
        "AlignedFlatChat",
        "AttentionMembership",
        "BagOfWords",
        "BiasSign",
        "FCMembership",
        "FlatChat",
        "PublicText",
        "RevealLabels",
    ),
    "callbacks": ("LeakageLimitExceeded", "LeakageMonitor", "RiskGate"),
    "defenses": ("Freeze", "GradientNoise"),
    "strategies": ("DefendedStrategy",),
}

__all__ = [
    "AlignedFlatChat",
    "AttentionMembership",
    "BagOfWords",
    "BiasSign",
    "DefendedStrategy",
    "FCMembership",
    "FlatChat",
    "Freeze",
    "GradientNoise",
    "LeakageLimitExceeded",
    "LeakageMonitor",
    "PublicText",
    "RevealLabels",
    "RiskGate",
    "__version__",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
