"""Strategies in which defences act where data leaves the client."""

from lightning_fedleak.strategies.defended import DefendedStrategy
from lightning_fedleak.strategies.optimizer_step import (
    StepError,
    before_real_step,
    check_optimizer,
)
from lightning_fedleak.strategies.release import CHECKPOINT_KEY, Client

__all__ = [
    "CHECKPOINT_KEY",
    "Client",
    "DefendedStrategy",
    "StepError",
    "before_real_step",
    "check_optimizer",
]
