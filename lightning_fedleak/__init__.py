"""See, while a language model is being fine-tuned, what a federated client would leak.

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedleak.lazy_names import lazy

__version__ = "0.3.0"

if TYPE_CHECKING:
    from lightning_fedleak.attacks import AlignedFlatChat as AlignedFlatChat
    from lightning_fedleak.attacks import AttentionMembership as AttentionMembership
    from lightning_fedleak.attacks import BagOfWords as BagOfWords
    from lightning_fedleak.attacks import BiasSign as BiasSign
    from lightning_fedleak.attacks import EmbeddingDescent as EmbeddingDescent
    from lightning_fedleak.attacks import FCMembership as FCMembership
    from lightning_fedleak.attacks import FlatChat as FlatChat
    from lightning_fedleak.attacks import GradientMembership as GradientMembership
    from lightning_fedleak.attacks import PrefixInversion as PrefixInversion
    from lightning_fedleak.attacks import PublicText as PublicText
    from lightning_fedleak.attacks import RevealLabels as RevealLabels
    from lightning_fedleak.attacks import SubspaceMembership as SubspaceMembership
    from lightning_fedleak.attacks import SubspaceTexts as SubspaceTexts
    from lightning_fedleak.attacks import SubspaceWords as SubspaceWords
    from lightning_fedleak.callbacks import Games as Games
    from lightning_fedleak.callbacks import LeakageLimitExceeded as LeakageLimitExceeded
    from lightning_fedleak.callbacks import LeakageMonitor as LeakageMonitor
    from lightning_fedleak.callbacks import RiskGate as RiskGate
    from lightning_fedleak.defenses import DPSGD as DPSGD
    from lightning_fedleak.defenses import ActivationCompression as ActivationCompression
    from lightning_fedleak.defenses import ActivationNoise as ActivationNoise
    from lightning_fedleak.defenses import Defense as Defense
    from lightning_fedleak.defenses import DefenseError as DefenseError
    from lightning_fedleak.defenses import DPAdamBC as DPAdamBC
    from lightning_fedleak.defenses import Freeze as Freeze
    from lightning_fedleak.defenses import GradientCompression as GradientCompression
    from lightning_fedleak.defenses import GradientNoise as GradientNoise
    from lightning_fedleak.defenses import TokenLDP as TokenLDP
    from lightning_fedleak.defenses import mean_of_sample_means as mean_of_sample_means
    from lightning_fedleak.evaluation.canaries import with_canaries as with_canaries
    from lightning_fedleak.strategies import DefendedStrategy as DefendedStrategy

_HOMES = {
    "attacks": (
        "AlignedFlatChat",
        "AttentionMembership",
        "BagOfWords",
        "BiasSign",
        "EmbeddingDescent",
        "FCMembership",
        "FlatChat",
        "GradientMembership",
        "PrefixInversion",
        "PublicText",
        "RevealLabels",
        "SubspaceMembership",
        "SubspaceTexts",
        "SubspaceWords",
    ),
    "callbacks": ("Games", "LeakageLimitExceeded", "LeakageMonitor", "RiskGate"),
    "evaluation.canaries": ("with_canaries",),
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

__all__ = ["__version__", *sorted(name for names in _HOMES.values() for name in names)]


__getattr__ = lazy(__name__, _HOMES)
