"""Attacks: what an adversary would see of a step in, a guess out."""

from lightning_fedleak.attacks.aligned import AlignedFlatChat
from lightning_fedleak.attacks.attention_membership import AttentionMembership
from lightning_fedleak.attacks.bag_of_words import BagOfWords
from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.bias_sign import BiasSign
from lightning_fedleak.attacks.calibration import PublicText, gradient_of
from lightning_fedleak.attacks.descent import DescentGuess
from lightning_fedleak.attacks.embedding_descent import EmbeddingDescent
from lightning_fedleak.attacks.fc_membership import FCMembership
from lightning_fedleak.attacks.flatchat import (
    FlatChat,
    FlatChatGuess,
    TypeCountRegressor,
)
from lightning_fedleak.attacks.flattening import flatten, rank_types, separate_clusters
from lightning_fedleak.attacks.inversion import InversionAttack, TextAttack, TextGuess
from lightning_fedleak.attacks.membership import MembershipAttack, MembershipGuess
from lightning_fedleak.attacks.mixture import Mixture, fit_two_gaussians
from lightning_fedleak.attacks.prefix_inversion import PrefixInversion
from lightning_fedleak.attacks.reveal_labels import (
    RevealLabels,
    RevealLabelsGuess,
)
from lightning_fedleak.attacks.token_relaxation import TokenRelaxation
from lightning_fedleak.attacks.trained_membership import TrainedMembership

__all__ = [
    "AlignedFlatChat",
    "Attack",
    "AttentionMembership",
    "BagOfWords",
    "BiasSign",
    "DescentGuess",
    "EmbeddingDescent",
    "FCMembership",
    "FlatChat",
    "FlatChatGuess",
    "Guess",
    "InversionAttack",
    "MembershipAttack",
    "MembershipGuess",
    "Mixture",
    "PrefixInversion",
    "PublicText",
    "Query",
    "RevealLabels",
    "RevealLabelsGuess",
    "RunFacts",
    "Surfaces",
    "TextAttack",
    "TextGuess",
    "TokenRelaxation",
    "TrainedMembership",
    "TypeCountRegressor",
    "UnusableObservation",
    "WordGuess",
    "fit_two_gaussians",
    "flatten",
    "gradient_of",
    "rank_types",
    "separate_clusters",
]
