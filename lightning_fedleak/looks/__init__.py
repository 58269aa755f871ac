"""The engine: when to look, what each family of attacks reads, and what becomes of the results.

It knows neither Lightning nor Flower: whoever trains is a :class:`Run`.
"""

from lightning_fedleak.looks.channels import Channel, Games
from lightning_fedleak.looks.gates import LeakageLimitExceeded
from lightning_fedleak.looks.run import Processes, Run
from lightning_fedleak.records import GateDecision

__all__ = ["Channel", "Games", "GateDecision", "LeakageLimitExceeded", "Processes", "Run"]
