"""Callbacks of a Lightning Trainer: LeakageMonitor measures leakage, RiskGate acts on it.

CanaryScorer scores inserted texts for a privacy audit.
"""

from lightning_fedleak.callbacks.canary_scorer import CanaryScorer as CanaryScorer
from lightning_fedleak.callbacks.gate import RiskGate as RiskGate
from lightning_fedleak.callbacks.monitor import LeakageMonitor as LeakageMonitor
from lightning_fedleak.engine import Games as Games
from lightning_fedleak.engine import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine import WatchSettings as WatchSettings
from lightning_fedleak.engine.gates import GateEvent as GateEvent
