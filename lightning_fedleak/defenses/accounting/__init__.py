"""The privacy cost of noised updates: accountants, filters, budgets, and a ledger on disk."""

from lightning_fedleak.defenses.accounting.account import Accountant as Accountant
from lightning_fedleak.defenses.accounting.account import RenyiFilter as RenyiFilter
from lightning_fedleak.defenses.accounting.accounting import AccountantKind as AccountantKind
from lightning_fedleak.defenses.accounting.accounting import SamplingScheme as SamplingScheme
from lightning_fedleak.defenses.accounting.accounting import check_delta_for as check_delta_for
from lightning_fedleak.defenses.accounting.budget import Account as Account
from lightning_fedleak.defenses.accounting.budget import Budget as Budget
