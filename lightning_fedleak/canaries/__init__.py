"""A user's own canary texts, in the training data or not by the flip of a coin."""

from lightning_fedleak.canaries.dataset import CanaryDataset, CanarySet, with_canaries
from lightning_fedleak.canaries.record import Game, InclusionMismatch, InclusionRecord

__all__ = [
    "CanaryDataset",
    "CanarySet",
    "Game",
    "InclusionMismatch",
    "InclusionRecord",
    "with_canaries",
]
