"""Strategies in which defences act where data leaves the client."""

from lightning_fedleak.strategies.defended import DefendedStrategy as DefendedStrategy
