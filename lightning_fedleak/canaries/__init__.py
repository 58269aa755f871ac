"""A user's own canary texts, in the training data or not by the flip of a coin."""

from lightning_fedleak.canaries.dataset import CanaryDataset, CanarySet, with_canaries
from lightning_fedleak.canaries.record import Game, InclusionMismatch, InclusionRecord
from lightning_fedleak.canaries.scorer import CanaryScorer
from lightning_fedleak.canaries.texts import high_temperature_canaries, new_token_canaries

__all__ = [
    "CanaryDataset",
    "CanaryScorer",
    "CanarySet",
    "Game",
    "InclusionMismatch",
    "InclusionRecord",
    "high_temperature_canaries",
    "new_token_canaries",
    "with_canaries",
]
