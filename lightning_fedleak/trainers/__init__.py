"""Leakage in a training loop of one's own, and under transformers' Trainer, and defences there.

What needs transformers' Trainer is loaded when it is first used, since that needs accelerate.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_fedleak.engine import Evidence as Evidence
from lightning_fedleak.engine import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine import Threshold as Threshold
from lightning_fedleak.engine import WatchSettings as WatchSettings
from lightning_fedleak.trainers.defended_loop import DefendedLoop as DefendedLoop
from lightning_fedleak.trainers.watch import Watch as Watch

if TYPE_CHECKING:
    from lightning_fedleak.trainers.defended_trainer import DefendedMixin as DefendedMixin
    from lightning_fedleak.trainers.defended_trainer import defended as defended
    from lightning_fedleak.trainers.transformers import LeakageCallback as LeakageCallback

_HOMES = {
    "LeakageCallback": "transformers",
    "DefendedMixin": "defended_trainer",
    "defended": "defended_trainer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
