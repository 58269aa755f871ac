"""Leakage in a training loop of one's own, and under transformers' Trainer.

``LeakageCallback`` is loaded when it is first used, since transformers' Trainer needs accelerate.
"""

from typing import TYPE_CHECKING

from lightning_fedleak.engine import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine import Threshold as Threshold
from lightning_fedleak.engine import WatchSettings as WatchSettings
from lightning_fedleak.trainers.watch import Watch as Watch

if TYPE_CHECKING:
    from lightning_fedleak.trainers.transformers import LeakageCallback as LeakageCallback


def __getattr__(name: str) -> object:
    if name != "LeakageCallback":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from lightning_fedleak.trainers import transformers

    return transformers.LeakageCallback
