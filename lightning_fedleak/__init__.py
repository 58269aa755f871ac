"""See, while a language model is being fine-tuned, what a federated client would give away.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lightning_fedleak.attacks import (
        AlignedFlatChat,
        AttentionMembership,
        BagOfWords,
        BeamFromWords,
        BiasSign,
        CraftedAdapterWords,
        EmbeddingDescent,
        FCMembership,
        FlatChat,
        GradientMatching,
        GradientMembership,
        PrefixInversion,
        PublicText,
        RevealLabels,
        SubspaceMembership,
        SubspaceTexts,
        SubspaceWords,
        TokenRelaxation,
        TrainedMembership,
    )
    from lightning_fedleak.callbacks import Games, LeakageLimitExceeded, LeakageMonitor, RiskGate
    from lightning_fedleak.canaries import with_canaries
    from lightning_fedleak.defenses import (
        DPSGD,
        ActivationCompression,
        ActivationNoise,
        Defense,
        DefenseError,
        DPAdamBC,
        Freeze,
        GradientCompression,
        GradientNoise,
        TokenLDP,
        mean_of_sample_means,
    )
    from lightning_fedleak.strategies import DefendedStrategy

_HOMES = {
    "attacks": (
        "AlignedFlatChat",
        "AttentionMembership",
        "BagOfWords",
        "BeamFromWords",
        "BiasSign",
        "CraftedAdapterWords",
        "EmbeddingDescent",
        "FCMembership",
        "FlatChat",
        "GradientMatching",
        "GradientMembership",
        "PrefixInversion",
        "PublicText",
        "RevealLabels",
        "SubspaceMembership",
        "SubspaceTexts",
        "SubspaceWords",
        "TokenRelaxation",
        "TrainedMembership",
    ),
    "callbacks": (
        "Games",
        "LeakageLimitExceeded",
        "LeakageMonitor",
        "RiskGate",
    ),
    "canaries": ("with_canaries",),
    "defenses": (
        "ActivationCompression",
        "ActivationNoise",
        "DPAdamBC",
        "DPSGD",
        "Defense",
        "DefenseError",
        "Freeze",
        "GradientCompression",
        "GradientNoise",
        "TokenLDP",
        "mean_of_sample_means",
    ),
    "strategies": ("DefendedStrategy",),
}

__all__ = [
    "DPSGD",
    "ActivationCompression",
    "ActivationNoise",
    "AlignedFlatChat",
    "AttentionMembership",
    "BagOfWords",
    "BeamFromWords",
    "BiasSign",
    "CraftedAdapterWords",
    "DPAdamBC",
    "DefendedStrategy",
    "Defense",
    "DefenseError",
    "EmbeddingDescent",
    "FCMembership",
    "FlatChat",
    "Freeze",
    "Games",
    "GradientCompression",
    "GradientMatching",
    "GradientMembership",
    "GradientNoise",
    "LeakageLimitExceeded",
    "LeakageMonitor",
    "PrefixInversion",
    "PublicText",
    "RevealLabels",
    "RiskGate",
    "SubspaceMembership",
    "SubspaceTexts",
    "SubspaceWords",
    "TokenLDP",
    "TokenRelaxation",
    "TrainedMembership",
    "__version__",
    "mean_of_sample_means",
    "with_canaries",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
