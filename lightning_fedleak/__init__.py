"""Measure how much a federated client would leak while a language model is fine-tuned.

The module of each public name is imported when the name is first used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_fedleak.extras import homes_of, lazy

__version__ = "0.3.0"

if TYPE_CHECKING:
    from lightning_fedleak.attacks import DISHONEST_SERVER as DISHONEST_SERVER
    from lightning_fedleak.attacks import AlignedFlatChat as AlignedFlatChat
    from lightning_fedleak.attacks import Attack as Attack
    from lightning_fedleak.attacks import AttentionMembership as AttentionMembership
    from lightning_fedleak.attacks import BagOfWords as BagOfWords
    from lightning_fedleak.attacks import BiasSign as BiasSign
    from lightning_fedleak.attacks import Capability as Capability
    from lightning_fedleak.attacks import Combined as Combined
    from lightning_fedleak.attacks import EmbeddingDescent as EmbeddingDescent
    from lightning_fedleak.attacks import Extraction as Extraction
    from lightning_fedleak.attacks import FCMembership as FCMembership
    from lightning_fedleak.attacks import FlatChat as FlatChat
    from lightning_fedleak.attacks import GradientMembership as GradientMembership
    from lightning_fedleak.attacks import PrefixInversion as PrefixInversion
    from lightning_fedleak.attacks import PublicText as PublicText
    from lightning_fedleak.attacks import SubspaceMembership as SubspaceMembership
    from lightning_fedleak.attacks import SubspaceTexts as SubspaceTexts
    from lightning_fedleak.attacks import SubspaceWords as SubspaceWords
    from lightning_fedleak.attacks import Surfaces as Surfaces
    from lightning_fedleak.attacks import ThreatModel as ThreatModel
    from lightning_fedleak.attacks import WordGuess as WordGuess
    from lightning_fedleak.attacks.memorization import Canaries as Canaries
    from lightning_fedleak.attacks.memorization import CombinedReference as CombinedReference
    from lightning_fedleak.attacks.memorization import Entities as Entities
    from lightning_fedleak.attacks.memorization import PolicyDrift as PolicyDrift
    from lightning_fedleak.attacks.memorization import PreferenceMargin as PreferenceMargin
    from lightning_fedleak.attacks.memorization import PromptRatio as PromptRatio
    from lightning_fedleak.attacks.memorization import RewardGain as RewardGain
    from lightning_fedleak.attacks.memorization import ShortAnswers as ShortAnswers
    from lightning_fedleak.callbacks import CanaryScorer as CanaryScorer
    from lightning_fedleak.callbacks import Games as Games
    from lightning_fedleak.callbacks import LeakageLimitExceeded as LeakageLimitExceeded
    from lightning_fedleak.callbacks import LeakageMonitor as LeakageMonitor
    from lightning_fedleak.callbacks import RiskGate as RiskGate
    from lightning_fedleak.callbacks import WatchSettings as WatchSettings
    from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES as EMBEDDED_MESSAGES
    from lightning_fedleak.cli.finetuning import EMBEDDED_MODEL as EMBEDDED_MODEL
    from lightning_fedleak.cli.finetuning import CausalLMFineTuning as CausalLMFineTuning
    from lightning_fedleak.cli.finetuning import TextDataModule as TextDataModule
    from lightning_fedleak.cli.finetuning import read_texts as read_texts
    from lightning_fedleak.defenses import DPSGD as DPSGD
    from lightning_fedleak.defenses import ActivationCompression as ActivationCompression
    from lightning_fedleak.defenses import ActivationNoise as ActivationNoise
    from lightning_fedleak.defenses import Defense as Defense
    from lightning_fedleak.defenses import DefenseError as DefenseError
    from lightning_fedleak.defenses import DPAdamBC as DPAdamBC
    from lightning_fedleak.defenses import Freeze as Freeze
    from lightning_fedleak.defenses import GradientCompression as GradientCompression
    from lightning_fedleak.defenses import GradientNoise as GradientNoise
    from lightning_fedleak.defenses import QuantileClip as QuantileClip
    from lightning_fedleak.defenses import TokenLDP as TokenLDP
    from lightning_fedleak.defenses import Users as Users
    from lightning_fedleak.defenses import mean_of_sample_means as mean_of_sample_means
    from lightning_fedleak.engine import Memorization as Memorization
    from lightning_fedleak.evaluation.auditing import PlantedGradients as PlantedGradients
    from lightning_fedleak.evaluation.auditing import PrivacyClaim as PrivacyClaim
    from lightning_fedleak.evaluation.auditing import PrivateTrainingCheck as PrivateTrainingCheck
    from lightning_fedleak.evaluation.auditing import audit_canaries as audit_canaries
    from lightning_fedleak.evaluation.canaries import leave_out as leave_out
    from lightning_fedleak.evaluation.canaries import new_token_canaries as new_token_canaries
    from lightning_fedleak.evaluation.canaries import sampled_canaries as sampled_canaries
    from lightning_fedleak.evaluation.canaries import with_canaries as with_canaries
    from lightning_fedleak.evaluation.canaries import with_entities as with_entities
    from lightning_fedleak.federation import ClientDP as ClientDP
    from lightning_fedleak.federation import OutgoingUpdates as OutgoingUpdates
    from lightning_fedleak.federation import RoundGate as RoundGate
    from lightning_fedleak.federation import RoundObserver as RoundObserver
    from lightning_fedleak.federation import TrainedOn as TrainedOn
    from lightning_fedleak.federation import difference as difference
    from lightning_fedleak.federation import trained_state as trained_state
    from lightning_fedleak.model.anatomy import HEAD_WEIGHT as HEAD_WEIGHT
    from lightning_fedleak.strategies import DefendedStrategy as DefendedStrategy
    from lightning_fedleak.trainers import DefendedLoop as DefendedLoop
    from lightning_fedleak.trainers import LeakageCallback as LeakageCallback
    from lightning_fedleak.trainers import Threshold as Threshold
    from lightning_fedleak.trainers import Watch as Watch
    from lightning_fedleak.trainers import defended as defended

# Without accelerate, an extra, ``import *`` has to work too.
_ACCELERATE = {*()} if find_spec("accelerate") else {"LeakageCallback", "defended"}
__all__ = ["__version__", *sorted({*homes_of(__name__)} - _ACCELERATE)]

__getattr__ = lazy(__name__)
