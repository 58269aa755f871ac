"""Strategies in which defences act where data leaves the client."""

from lightning_fedleak.strategies.defended import DefendedStrategy
from lightning_fedleak.strategies.release import Client
from lightning_fedleak.taps.gradients import StepError

__all__ = ["Client", "DefendedStrategy", "StepError"]
