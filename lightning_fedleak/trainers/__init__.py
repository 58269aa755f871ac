"""Leakage in a training loop of one's own, and under transformers' Trainer, and defences there.

What needs transformers' Trainer is loaded when it is first used, since that needs accelerate.
"""

from typing import TYPE_CHECKING

from lightning_fedleak.engine import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine import Threshold as Threshold
from lightning_fedleak.engine import WatchSettings as WatchSettings
from lightning_fedleak.lazy_names import lazy
from lightning_fedleak.trainers.defended_loop import DefendedLoop as DefendedLoop
from lightning_fedleak.trainers.watch import Watch as Watch

if TYPE_CHECKING:
    from lightning_fedleak.trainers.defended_trainer import DefendedMixin as DefendedMixin
    from lightning_fedleak.trainers.defended_trainer import defended as defended
    from lightning_fedleak.trainers.transformers import LeakageCallback as LeakageCallback

__getattr__ = lazy(__name__)
