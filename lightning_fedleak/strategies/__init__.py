"""Strategies in which defences act where data leaves the client."""

from lightning_fedleak.strategies.defended import DefendedStrategy as DefendedStrategy
from lightning_fedleak.strategies.release import Client as Client
from lightning_fedleak.taps import StepError as StepError
