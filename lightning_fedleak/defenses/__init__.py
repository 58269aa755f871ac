"""Defences: what changes an update before it leaves the client."""

from lightning_fedleak.defenses.accounting.accounting import (
    Accountant,
    effective_noise_multiplier,
    joint_noise_multiplier,
    noise_multiplier_for,
)
from lightning_fedleak.defenses.accounting.budget import BudgetSpent
from lightning_fedleak.defenses.accounting.groups import group_epsilon
from lightning_fedleak.defenses.accounting.renyi_filter import RenyiFilter
from lightning_fedleak.defenses.activations.compression import ActivationCompression
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.defenses.base import (
    CanaryGradient,
    Defense,
    DefenseContext,
    DefenseError,
    Privacy,
)
from lightning_fedleak.defenses.dpsgd.adam import DPAdamBC
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.defenses.dpsgd.loss_graph import mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings, ReleaseSettings, Users
from lightning_fedleak.defenses.freeze import Freeze
from lightning_fedleak.defenses.gradient_noise import GradientNoise
from lightning_fedleak.defenses.token_ldp.token_ldp import LDPProtocol, TokenLDP
from lightning_fedleak.defenses.token_ldp.words import BatchForm

__all__ = [
    "DPSGD",
    "Accountant",
    "ActivationCompression",
    "ActivationNoise",
    "BatchForm",
    "BudgetSpent",
    "CanaryGradient",
    "ClipSettings",
    "DPAdamBC",
    "Defense",
    "DefenseContext",
    "DefenseError",
    "Freeze",
    "GradientNoise",
    "LDPProtocol",
    "Privacy",
    "ReleaseSettings",
    "RenyiFilter",
    "TokenLDP",
    "Users",
    "effective_noise_multiplier",
    "group_epsilon",
    "joint_noise_multiplier",
    "mean_of_sample_means",
    "noise_multiplier_for",
]
