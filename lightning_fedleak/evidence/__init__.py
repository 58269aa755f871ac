"""Checks by a third party: whether a run's logs, weights, report and repetition are consistent."""

from lightning_fedleak.evidence.chain import CONTRADICTED as CONTRADICTED
from lightning_fedleak.evidence.chain import HOLDS as HOLDS
from lightning_fedleak.evidence.chain import OPEN as OPEN
from lightning_fedleak.evidence.verification import match_weights as match_weights
from lightning_fedleak.evidence.verification import verify_run as verify_run
