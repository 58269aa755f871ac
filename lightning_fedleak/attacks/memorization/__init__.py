"""Attacks on the trained weights: what a released model leaks about its training texts."""

from lightning_fedleak.attacks.memorization.extraction import Canaries as Canaries
from lightning_fedleak.attacks.memorization.extraction import Entities as Entities
from lightning_fedleak.attacks.memorization.extraction import EntityGuess as EntityGuess
from lightning_fedleak.attacks.memorization.extraction import Extraction as Extraction
from lightning_fedleak.attacks.memorization.extraction import ExtractionGuess as ExtractionGuess
from lightning_fedleak.attacks.memorization.references import CombinedReference as CombinedReference
from lightning_fedleak.attacks.memorization.scores import MAX_GAIN as MAX_GAIN
from lightning_fedleak.attacks.memorization.scores import Combined as Combined
from lightning_fedleak.attacks.memorization.scores import ErrorZone as ErrorZone
from lightning_fedleak.attacks.memorization.scores import Loss as Loss
from lightning_fedleak.attacks.memorization.scores import LossRatio as LossRatio
from lightning_fedleak.attacks.memorization.scores import MemorizationAttack as MemorizationAttack
from lightning_fedleak.attacks.memorization.scores import MemorizationGuess as MemorizationGuess
from lightning_fedleak.attacks.memorization.scores import MinK as MinK
from lightning_fedleak.attacks.memorization.scores import PolicyDrift as PolicyDrift
from lightning_fedleak.attacks.memorization.scores import PreferenceMargin as PreferenceMargin
from lightning_fedleak.attacks.memorization.scores import PromptAttack as PromptAttack
from lightning_fedleak.attacks.memorization.scores import PromptRatio as PromptRatio
from lightning_fedleak.attacks.memorization.scores import RewardGain as RewardGain
from lightning_fedleak.attacks.memorization.scores import ShortAnswers as ShortAnswers
from lightning_fedleak.attacks.memorization.scores import Windows as Windows
from lightning_fedleak.attacks.memorization.scores import Zlib as Zlib
from lightning_fedleak.attacks.memorization.scores import blind_scores as blind_scores
from lightning_fedleak.attacks.memorization.scores import gain_beyond as gain_beyond
