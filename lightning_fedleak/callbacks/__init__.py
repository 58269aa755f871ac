"""LeakageMonitor measures, RiskGate decides."""

from lightning_fedleak.callbacks.canary_scorer import CanaryScorer
from lightning_fedleak.callbacks.gate import RiskGate
from lightning_fedleak.callbacks.monitor import LeakageMonitor, MonitorSettings
from lightning_fedleak.looks import Games, LeakageLimitExceeded
from lightning_fedleak.looks.gates import GateEvent

__all__ = [
    "CanaryScorer",
    "Games",
    "GateEvent",
    "LeakageLimitExceeded",
    "LeakageMonitor",
    "MonitorSettings",
    "RiskGate",
]
