"""What somebody else can check of a run: its logs, its weights, who signed it."""

from lightning_fedleak.evidence.signing import sign as sign
from lightning_fedleak.evidence.verification import Verification as Verification
from lightning_fedleak.evidence.verification import verify as verify
