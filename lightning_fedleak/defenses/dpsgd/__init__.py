"""DP-SGD: each sample's gradient clipped, noise on their sum, and what that costs."""

from lightning_fedleak.defenses.accounting.budget import BudgetSpent
from lightning_fedleak.defenses.base import Privacy
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings, ReleaseSettings, Users

__all__ = ["DPSGD", "BudgetSpent", "ClipSettings", "Privacy", "ReleaseSettings", "Users"]
