"""The engine: when to look, what each family of attacks reads, and what becomes of the results.

It knows neither Lightning nor Flower: whoever trains is a :class:`Run`. What a face needs is here.
"""

from lightning_fedleak.looks.channels import Channel
from lightning_fedleak.looks.channels.base import family_of
from lightning_fedleak.looks.engine import Engine
from lightning_fedleak.looks.facts import optimizers_of
from lightning_fedleak.looks.gates import LeakageLimitExceeded, names_there_are, why_never_judged
from lightning_fedleak.looks.log import Destination, to_dataframe
from lightning_fedleak.looks.options import (
    Games,
    LookSettings,
    Memorization,
    Options,
    Selection,
    cadence_of,
    known_stages,
    selected,
)
from lightning_fedleak.looks.results import CHOOSE, WORST
from lightning_fedleak.looks.run import (
    AUTOCAST,
    Look,
    MaxOverhead,
    NothingShared,
    Outcome,
    Processes,
    Run,
    Series,
    Unknown,
    reason,
)
from lightning_fedleak.looks.tensorboard import BoardLogger
from lightning_fedleak.looks.threshold import Controls, Threshold
from lightning_fedleak.looks.weights import Memory
from lightning_fedleak.records import GateDecision

__all__ = [
    "AUTOCAST",
    "CHOOSE",
    "WORST",
    "BoardLogger",
    "Channel",
    "Controls",
    "Destination",
    "Engine",
    "Games",
    "GateDecision",
    "LeakageLimitExceeded",
    "Look",
    "LookSettings",
    "MaxOverhead",
    "Memorization",
    "Memory",
    "NothingShared",
    "Options",
    "Outcome",
    "Processes",
    "Run",
    "Selection",
    "Series",
    "Threshold",
    "Unknown",
    "cadence_of",
    "family_of",
    "known_stages",
    "names_there_are",
    "optimizers_of",
    "reason",
    "selected",
    "to_dataframe",
    "why_never_judged",
]
