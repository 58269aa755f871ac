"""How good a guess was, against the truth that only the client has."""

from lightning_fedleak.evaluation.metrics.membership import (
    MembershipInference as MembershipInference,
)
from lightning_fedleak.evaluation.metrics.membership import membership_rates as membership_rates
from lightning_fedleak.evaluation.metrics.rates import Counts as Counts
from lightning_fedleak.evaluation.metrics.rates import Rate as Rate
from lightning_fedleak.evaluation.metrics.rates import WordRecovery as WordRecovery
from lightning_fedleak.evaluation.metrics.rates import precision_recall_f1 as precision_recall_f1
from lightning_fedleak.evaluation.metrics.rates import proportion as proportion
from lightning_fedleak.evaluation.metrics.rates import word_counts as word_counts
from lightning_fedleak.evaluation.metrics.texts import TextReconstruction as TextReconstruction
from lightning_fedleak.evaluation.metrics.texts import reconstruction_rates as reconstruction_rates
