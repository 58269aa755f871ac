"""Leakage in a training loop of one's own, and under transformers' Trainer."""

from lightning_fedleak.looks import LeakageLimitExceeded, Threshold
from lightning_fedleak.trainers.loop import WatchSettings
from lightning_fedleak.trainers.watch import Watch

__all__ = ["LeakageLimitExceeded", "Threshold", "Watch", "WatchSettings"]
