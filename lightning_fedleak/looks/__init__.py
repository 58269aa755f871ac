"""The engine: when to look, what each family of attacks reads, and what becomes of the results.

It knows neither Lightning nor Flower: whoever trains is a :class:`Run`. What a face needs is here.
"""

from lightning_fedleak.defenses.dp_optimizers import declared as declared
from lightning_fedleak.looks.channels import Channel as Channel
from lightning_fedleak.looks.channels.base import family_of as family_of
from lightning_fedleak.looks.engine import Engine as Engine
from lightning_fedleak.looks.facts import optimizers_of as optimizers_of
from lightning_fedleak.looks.gates import LeakageLimitExceeded as LeakageLimitExceeded
from lightning_fedleak.looks.gates import announce as announce
from lightning_fedleak.looks.gates import check_threshold as check_threshold
from lightning_fedleak.looks.gates import is_worst as is_worst
from lightning_fedleak.looks.gates import names_there_are as names_there_are
from lightning_fedleak.looks.gates import why_never_judged as why_never_judged
from lightning_fedleak.looks.log import Destination as Destination
from lightning_fedleak.looks.log import to_dataframe as to_dataframe
from lightning_fedleak.looks.options import Games as Games
from lightning_fedleak.looks.options import LookSettings as LookSettings
from lightning_fedleak.looks.options import Memorization as Memorization
from lightning_fedleak.looks.options import Options as Options
from lightning_fedleak.looks.options import Selection as Selection
from lightning_fedleak.looks.options import cadence_of as cadence_of
from lightning_fedleak.looks.options import known_stages as known_stages
from lightning_fedleak.looks.options import options_of as options_of
from lightning_fedleak.looks.options import overhead_of as overhead_of
from lightning_fedleak.looks.options import selected as selected
from lightning_fedleak.looks.results import WORST as WORST
from lightning_fedleak.looks.run import AUTOCAST as AUTOCAST
from lightning_fedleak.looks.run import CHOOSE as CHOOSE
from lightning_fedleak.looks.run import BeforeDefense as BeforeDefense
from lightning_fedleak.looks.run import Look as Look
from lightning_fedleak.looks.run import NothingShared as NothingShared
from lightning_fedleak.looks.run import Outcome as Outcome
from lightning_fedleak.looks.run import Processes as Processes
from lightning_fedleak.looks.run import Run as Run
from lightning_fedleak.looks.run import Series as Series
from lightning_fedleak.looks.run import StageReached as StageReached
from lightning_fedleak.looks.run import Unknown as Unknown
from lightning_fedleak.looks.run import contained as contained
from lightning_fedleak.looks.run import reason as reason
from lightning_fedleak.looks.tensorboard import BoardLogger as BoardLogger
from lightning_fedleak.looks.threshold import GateActions as GateActions
from lightning_fedleak.looks.threshold import Threshold as Threshold
from lightning_fedleak.looks.weights import Memory as Memory
from lightning_fedleak.records import GateDecision as GateDecision
