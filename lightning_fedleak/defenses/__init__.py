"""Defences: what changes an update before it leaves the client."""

from lightning_fedleak.defenses.accounting.account import Accountant as Accountant
from lightning_fedleak.defenses.accounting.account import RenyiFilter as RenyiFilter
from lightning_fedleak.defenses.accounting.budget import BudgetSpent as BudgetSpent
from lightning_fedleak.defenses.activations import ActivationCompression as ActivationCompression
from lightning_fedleak.defenses.activations import ActivationNoise as ActivationNoise
from lightning_fedleak.defenses.adam import DPAdamBC as DPAdamBC
from lightning_fedleak.defenses.base import CanaryGradient as CanaryGradient
from lightning_fedleak.defenses.base import Defense as Defense
from lightning_fedleak.defenses.base import DefenseContext as DefenseContext
from lightning_fedleak.defenses.base import DefenseError as DefenseError
from lightning_fedleak.defenses.base import Privacy as Privacy
from lightning_fedleak.defenses.base import refuse as refuse
from lightning_fedleak.defenses.dpsgd.clipped_sum import QuantileClip as QuantileClip
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD as DPSGD
from lightning_fedleak.defenses.dpsgd.loss_graph import mean_of_sample_means as mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings as ClipSettings
from lightning_fedleak.defenses.dpsgd.settings import ReleaseSettings as ReleaseSettings
from lightning_fedleak.defenses.dpsgd.settings import Users as Users
from lightning_fedleak.defenses.freeze import Freeze as Freeze
from lightning_fedleak.defenses.gradient_compression import (
    GradientCompression as GradientCompression,
)
from lightning_fedleak.defenses.noise import GradientNoise as GradientNoise
from lightning_fedleak.defenses.token_ldp.token_ldp import TokenLDP as TokenLDP
from lightning_fedleak.defenses.token_ldp.words import BatchForm as BatchForm
