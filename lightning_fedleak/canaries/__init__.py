"""A user's own canary texts, in the training data or not by the flip of a coin."""

import importlib
import warnings

from lightning_fedleak.canaries.dataset import CanaryDataset, CanarySet, with_canaries
from lightning_fedleak.canaries.left_out import LeftOutRecord, TrainingRows, leave_out
from lightning_fedleak.canaries.record import Game, InclusionMismatch, InclusionRecord
from lightning_fedleak.canaries.texts import high_temperature_canaries, new_token_canaries

__all__ = [
    "CanaryDataset",
    "CanarySet",
    "Game",
    "InclusionMismatch",
    "InclusionRecord",
    "LeftOutRecord",
    "TrainingRows",
    "high_temperature_canaries",
    "leave_out",
    "new_token_canaries",
    "with_canaries",
]


def __getattr__(name: str) -> object:
    if name == "CanaryScorer":
        warnings.warn(
            "lightning_fedleak.canaries.CanaryScorer is lightning_fedleak.callbacks.CanaryScorer "
            "now; the old name works through 0.2",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module("lightning_fedleak.callbacks").CanaryScorer
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
