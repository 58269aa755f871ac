"""LeakageMonitor measures, RiskGate decides."""

from lightning_fedleak.callbacks.channels import Games
from lightning_fedleak.callbacks.gate import GateEvent, LeakageLimitExceeded, RiskGate
from lightning_fedleak.callbacks.monitor import LeakageMonitor

__all__ = ["Games", "GateEvent", "LeakageLimitExceeded", "LeakageMonitor", "RiskGate"]
