"""The engine: it decides when to measure leakage, runs the attacks, and scores and logs results.

It depends neither on Lightning nor on Flower: an integration describes its training to it as a
:class:`Run`. Integrations import the names below.
"""

from lightning_fedleak.defenses.dp_optimizers import declared as declared
from lightning_fedleak.engine.channels import StepChannel as StepChannel
from lightning_fedleak.engine.channels.base import family_of as family_of
from lightning_fedleak.engine.gates import GateEvent as GateEvent
from lightning_fedleak.engine.gates import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.engine.gates import announce as announce
from lightning_fedleak.engine.gates import names_there_are as names_there_are
from lightning_fedleak.engine.gates import why_never_judged as why_never_judged
from lightning_fedleak.engine.lifecycle import Engine as Engine
from lightning_fedleak.engine.log import Destination as Destination
from lightning_fedleak.engine.log import chosen_metrics as chosen_metrics
from lightning_fedleak.engine.log import to_dataframe as to_dataframe
from lightning_fedleak.engine.loggers import BoardLogger as BoardLogger
from lightning_fedleak.engine.options import Games as Games
from lightning_fedleak.engine.options import Memorization as Memorization
from lightning_fedleak.engine.options import Options as Options
from lightning_fedleak.engine.options import WatchSettings as WatchSettings
from lightning_fedleak.engine.options import cadence_of as cadence_of
from lightning_fedleak.engine.options import parts_of as parts_of
from lightning_fedleak.engine.options import selected as selected
from lightning_fedleak.engine.outcomes import CHOOSE as CHOOSE
from lightning_fedleak.engine.outcomes import Unknown as Unknown
from lightning_fedleak.engine.record import optimizers_of as optimizers_of
from lightning_fedleak.engine.results import WORST as WORST
from lightning_fedleak.engine.run import AUTOCAST as AUTOCAST
from lightning_fedleak.engine.run import BeforeDefense as BeforeDefense
from lightning_fedleak.engine.run import Look as Look
from lightning_fedleak.engine.run import Run as Run
from lightning_fedleak.engine.run import StageReached as StageReached
from lightning_fedleak.engine.run import contained as contained
from lightning_fedleak.engine.run import reason as reason
from lightning_fedleak.engine.threshold import GateActions as GateActions
from lightning_fedleak.engine.threshold import Threshold as Threshold
from lightning_fedleak.report.records import GateLine as GateLine
