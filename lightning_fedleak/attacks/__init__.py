"""Attacks: what an adversary would see of a step in, a guess out."""

from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.attention_layers import AttentionSettings
from lightning_fedleak.attacks.membership.base import (
    CRAFTED,
    MembershipAttack,
    MembershipGuess,
    PassiveMembership,
)
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.membership.trained import TrainedMembership, TrainingSettings
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.attacks.public_text import (
    MissingText,
    PublicText,
    TextSource,
    frequent_tokens,
    share_samples,
)
from lightning_fedleak.attacks.texts.base import InversionAttack, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.beam_from_words import BeamFromWords
from lightning_fedleak.attacks.texts.descent import DescentGuess, DescentSettings
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.attacks.texts.gradient_matching import GradientMatching, MatchingSettings
from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion, PrefixSettings
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.attacks.texts.token_relaxation import TokenRelaxation
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.direct import BagOfWords, BiasSign
from lightning_fedleak.attacks.words.flatchat import (
    FlatChat,
    FlatChatGuess,
    MixtureSettings,
    TypeCountRegressor,
    rank_types,
)
from lightning_fedleak.attacks.words.public_gradients import (
    gradient_of,
    gradient_through_blocks,
    nonzero_starts,
)
from lightning_fedleak.attacks.words.reveal_labels import RevealLabels, RevealLabelsGuess
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.threats import (
    DISHONEST_SERVER,
    HONEST_BUT_CURIOUS,
    Capability,
    ThreatModel,
    ThreatModelError,
    require,
)

__all__ = [
    "CRAFTED",
    "DISHONEST_SERVER",
    "HONEST_BUT_CURIOUS",
    "AlignedFlatChat",
    "Attack",
    "AttentionMembership",
    "AttentionSettings",
    "BagOfWords",
    "BeamFromWords",
    "BiasSign",
    "Capability",
    "Combined",
    "DescentGuess",
    "DescentSettings",
    "EmbeddingDescent",
    "Extraction",
    "FCMembership",
    "FlatChat",
    "FlatChatGuess",
    "GradientMatching",
    "GradientMembership",
    "Guess",
    "InversionAttack",
    "MatchingSettings",
    "MembershipAttack",
    "MembershipGuess",
    "MissingText",
    "MixtureSettings",
    "PassiveMembership",
    "PrefixInversion",
    "PrefixSettings",
    "PublicText",
    "Query",
    "RevealLabels",
    "RevealLabelsGuess",
    "RunFacts",
    "SubspaceMembership",
    "SubspaceTexts",
    "SubspaceWords",
    "Surfaces",
    "TextAttack",
    "TextGuess",
    "TextSource",
    "ThreatModel",
    "ThreatModelError",
    "TokenRelaxation",
    "TrainedMembership",
    "TrainingSettings",
    "TypeCountRegressor",
    "UnusableObservation",
    "WordGuess",
    "frequent_tokens",
    "gradient_of",
    "gradient_through_blocks",
    "nonzero_starts",
    "rank_types",
    "require",
    "share_samples",
]
