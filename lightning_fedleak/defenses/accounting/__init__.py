"""What releases cost: accountants, filters, budgets, and a ledger on disk."""

from lightning_fedleak.defenses.accounting.account import Accountant as Accountant
from lightning_fedleak.defenses.accounting.account import Ledger as Ledger
from lightning_fedleak.defenses.accounting.account import RenyiFilter as RenyiFilter
from lightning_fedleak.defenses.accounting.accounting import AccountantKind as AccountantKind
from lightning_fedleak.defenses.accounting.accounting import check_delta_for as check_delta_for
from lightning_fedleak.defenses.accounting.accounting import (
    effective_noise_multiplier as effective_noise_multiplier,
)
from lightning_fedleak.defenses.accounting.accounting import (
    noise_multiplier_for as noise_multiplier_for,
)
from lightning_fedleak.defenses.accounting.budget import Account as Account
from lightning_fedleak.defenses.accounting.budget import Budget as Budget
from lightning_fedleak.defenses.accounting.budget import BudgetSpent as BudgetSpent
from lightning_fedleak.defenses.accounting.groups import group_epsilon as group_epsilon
from lightning_fedleak.defenses.accounting.quantile import ClipPath as ClipPath
from lightning_fedleak.defenses.accounting.renyi import SamplingScheme as SamplingScheme
