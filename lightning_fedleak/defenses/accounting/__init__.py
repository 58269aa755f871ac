"""What releases cost: accountants, filters, budgets, and a ledger on disk."""

from lightning_fedleak.defenses.accounting.accounting import (
    Accountant,
    AccountantKind,
    effective_noise_multiplier,
    joint_noise_multiplier,
    noise_multiplier_for,
)
from lightning_fedleak.defenses.accounting.budget import Budget, BudgetSpent
from lightning_fedleak.defenses.accounting.groups import group_epsilon
from lightning_fedleak.defenses.accounting.ledger import Ledger
from lightning_fedleak.defenses.accounting.renyi import SamplingScheme
from lightning_fedleak.defenses.accounting.renyi_filter import RenyiFilter

__all__ = [
    "Accountant",
    "AccountantKind",
    "Budget",
    "BudgetSpent",
    "Ledger",
    "RenyiFilter",
    "SamplingScheme",
    "effective_noise_multiplier",
    "group_epsilon",
    "joint_noise_multiplier",
    "noise_multiplier_for",
]
