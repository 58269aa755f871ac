"""The engine: when to look, what each family of attacks reads, and what becomes of the results.

It knows neither Lightning nor Flower: whoever trains is a :class:`Run`.
"""

import os

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_fedleak.looks.channels import Channel, Games
from lightning_fedleak.looks.gates import LeakageLimitExceeded
from lightning_fedleak.looks.run import Processes, Run
from lightning_fedleak.records import GateDecision

__all__ = ["Channel", "Games", "GateDecision", "LeakageLimitExceeded", "Processes", "Run"]

if getattr(rank_zero_only, "rank", None) is None:  # no Lightning has said which process speaks
    rank_zero_only.rank = int(os.environ.get("RANK", "0"))  # type: ignore[attr-defined]
