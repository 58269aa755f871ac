"""Now :mod:`~lightning_fedleak.metrics.texts`; here for one release."""

from lightning_fedleak.metrics.texts import (
    RECONSTRUCTION_RATES,
    SentenceScores,
    TextReconstruction,
    reconstruction_rates,
    sentence_scores,
    token_hits,
)

__all__ = [
    "RECONSTRUCTION_RATES",
    "SentenceScores",
    "TextReconstruction",
    "reconstruction_rates",
    "sentence_scores",
    "token_hits",
]
