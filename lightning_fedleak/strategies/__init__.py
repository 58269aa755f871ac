"""The Lightning strategy in which defences act before data leaves the client."""

from lightning_fedleak.strategies.defended import DefendedStrategy as DefendedStrategy
