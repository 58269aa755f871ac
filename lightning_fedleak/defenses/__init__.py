"""Defences: what changes an update before it leaves the client."""

from lightning_fedleak.defenses.accounting import (
    Accountant,
    effective_noise_multiplier,
    noise_multiplier_for,
)
from lightning_fedleak.defenses.activation_compression import ActivationCompression
from lightning_fedleak.defenses.activation_noise import ActivationNoise
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError
from lightning_fedleak.defenses.canary import CanaryGradient
from lightning_fedleak.defenses.dpsgd import DPSGD, BudgetSpent
from lightning_fedleak.defenses.freeze import Freeze
from lightning_fedleak.defenses.gradient_noise import GradientNoise
from lightning_fedleak.defenses.losses import mean_of_sample_means
from lightning_fedleak.defenses.privacy import Privacy
from lightning_fedleak.defenses.renyi_filter import RenyiFilter
from lightning_fedleak.defenses.token_ldp import TokenLDP

__all__ = [
    "DPSGD",
    "Accountant",
    "ActivationCompression",
    "ActivationNoise",
    "BudgetSpent",
    "CanaryGradient",
    "Defense",
    "DefenseContext",
    "DefenseError",
    "Freeze",
    "GradientNoise",
    "Privacy",
    "RenyiFilter",
    "TokenLDP",
    "effective_noise_multiplier",
    "mean_of_sample_means",
    "noise_multiplier_for",
]
