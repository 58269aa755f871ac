"""LeakageMonitor measures, RiskGate decides."""

from lightning_fedleak.callbacks.channels import Games
from lightning_fedleak.callbacks.gate import RiskGate
from lightning_fedleak.callbacks.gate_event import GateEvent, LeakageLimitExceeded
from lightning_fedleak.callbacks.monitor import LeakageMonitor

__all__ = ["Games", "GateEvent", "LeakageLimitExceeded", "LeakageMonitor", "RiskGate"]
