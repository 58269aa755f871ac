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
    MembershipAttack,
    MembershipGuess,
    PassiveMembership,
)
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.membership.trained import TrainedMembership, TrainingSettings
from lightning_fedleak.attacks.public_text import PublicText
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
from lightning_fedleak.attacks.words.public_gradients import gradient_of
from lightning_fedleak.attacks.words.reveal_labels import RevealLabels, RevealLabelsGuess
from lightning_fedleak.attacks.words.subspace import SubspaceWords

__all__ = [
    "AlignedFlatChat",
    "Attack",
    "AttentionMembership",
    "AttentionSettings",
    "BagOfWords",
    "BeamFromWords",
    "BiasSign",
    "DescentGuess",
    "DescentSettings",
    "EmbeddingDescent",
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
    "TokenRelaxation",
    "TrainedMembership",
    "TrainingSettings",
    "TypeCountRegressor",
    "UnusableObservation",
    "WordGuess",
    "gradient_of",
    "rank_types",
]
