"""DP-SGD: each sample's gradient clipped, noise on their sum, and what that costs."""

from lightning_fedleak.defenses.accounting.budget import BudgetSpent as BudgetSpent
from lightning_fedleak.defenses.base import Privacy as Privacy
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD as DPSGD
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings as ClipSettings
from lightning_fedleak.defenses.dpsgd.settings import ReleaseSettings as ReleaseSettings
from lightning_fedleak.defenses.dpsgd.settings import Users as Users
