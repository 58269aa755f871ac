"""What somebody else can check of a run: its logs, its weights, who signed it."""

from lightning_fedleak.evidence.signing import sign_run as sign_run
from lightning_fedleak.evidence.verdict import CONTRADICTED as CONTRADICTED
from lightning_fedleak.evidence.verdict import HOLDS as HOLDS
from lightning_fedleak.evidence.verdict import OPEN as OPEN
from lightning_fedleak.evidence.verification import Verification as Verification
from lightning_fedleak.evidence.verification import verify_run as verify_run
