"""LeakageMonitor measures, RiskGate decides."""

from lightning_fedleak.callbacks.canary_scorer import CanaryScorer
from lightning_fedleak.callbacks.gate import GateEvent, RiskGate
from lightning_fedleak.callbacks.monitor import LeakageMonitor
from lightning_fedleak.looks.channels import Games
from lightning_fedleak.looks.gates import LeakageLimitExceeded

__all__ = [
    "CanaryScorer",
    "Games",
    "GateEvent",
    "LeakageLimitExceeded",
    "LeakageMonitor",
    "RiskGate",
]
