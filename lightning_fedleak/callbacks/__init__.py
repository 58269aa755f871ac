"""LeakageMonitor measures, RiskGate decides."""

from lightning_fedleak.callbacks.canary_scorer import CanaryScorer as CanaryScorer
from lightning_fedleak.callbacks.gate import RiskGate as RiskGate
from lightning_fedleak.callbacks.monitor import LeakageMonitor as LeakageMonitor
from lightning_fedleak.callbacks.monitor import MonitorSettings as MonitorSettings
from lightning_fedleak.looks import Games as Games
from lightning_fedleak.looks import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.looks.gates import GateEvent as GateEvent
