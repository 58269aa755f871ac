"""How good a guess was, against the truth that only the client has."""

from lightning_fedleak.metrics.functional import (
    Counts,
    Rate,
    precision_recall_f1,
    proportion,
    type_count_error,
    word_counts,
)
from lightning_fedleak.metrics.word_recovery import WordRecovery

__all__ = [
    "Counts",
    "Rate",
    "WordRecovery",
    "precision_recall_f1",
    "proportion",
    "type_count_error",
    "word_counts",
]
