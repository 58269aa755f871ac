"""Measures leakage, or applies defences, in the user's own loop or in transformers' Trainer.

The classes for transformers' Trainer are imported when they are first used, because they need
accelerate.
"""

from typing import TYPE_CHECKING

from lightning_fedleak.engine import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine import Threshold as Threshold
from lightning_fedleak.engine import WatchSettings as WatchSettings
from lightning_fedleak.extras import lazy
from lightning_fedleak.trainers.defended_loop import DefendedLoop as DefendedLoop
from lightning_fedleak.trainers.watch import Watch as Watch

if TYPE_CHECKING:
    from lightning_fedleak.trainers.defended_trainer import DefendedMixin as DefendedMixin
    from lightning_fedleak.trainers.defended_trainer import defended as defended
    from lightning_fedleak.trainers.transformers import LeakageCallback as LeakageCallback

__getattr__ = lazy(__name__)
