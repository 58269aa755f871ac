"""Checks of a run by somebody else: whether its logs, weights and repetition fit together."""

from lightning_fedleak.evidence.chain import CONTRADICTED as CONTRADICTED
from lightning_fedleak.evidence.chain import HOLDS as HOLDS
from lightning_fedleak.evidence.chain import OPEN as OPEN
from lightning_fedleak.evidence.verification import verify_run as verify_run
