"""How good a guess was, against the truth that only the client has."""

from lightning_fedleak.metrics.betting import MeanTest
from lightning_fedleak.metrics.membership import MembershipInference, membership_rates
from lightning_fedleak.metrics.rates import (
    Counts,
    Rate,
    precision_recall_f1,
    proportion,
    type_count_error,
    word_counts,
)
from lightning_fedleak.metrics.texts import TextReconstruction, reconstruction_rates
from lightning_fedleak.metrics.words import WordRecovery

__all__ = [
    "Counts",
    "MeanTest",
    "MembershipInference",
    "Rate",
    "TextReconstruction",
    "WordRecovery",
    "membership_rates",
    "precision_recall_f1",
    "proportion",
    "reconstruction_rates",
    "type_count_error",
    "word_counts",
]
