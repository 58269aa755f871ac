"""Strategies in which defences act where data leaves the client."""

from lightning_fedleak.optimizer_step import StepError
from lightning_fedleak.strategies.defended import DefendedStrategy
from lightning_fedleak.strategies.release import Client

__all__ = ["Client", "DefendedStrategy", "StepError"]
