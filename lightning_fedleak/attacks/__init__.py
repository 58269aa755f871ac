"""Attacks: what an adversary would see of a step in, a guess out."""

from lightning_fedleak.attacks.aligned import AlignedFlatChat
from lightning_fedleak.attacks.bag_of_words import BagOfWords
from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.bias_sign import BiasSign
from lightning_fedleak.attacks.calibration import PublicText, gradient_of
from lightning_fedleak.attacks.flatchat import (
    FlatChat,
    FlatChatGuess,
    TypeCountRegressor,
)
from lightning_fedleak.attacks.flattening import flatten, rank_types, separate_clusters
from lightning_fedleak.attacks.mixture import Mixture, fit_two_gaussians
from lightning_fedleak.attacks.reveal_labels import (
    RevealLabels,
    RevealLabelsGuess,
)

__all__ = [
    "AlignedFlatChat",
    "Attack",
    "BagOfWords",
    "BiasSign",
    "FlatChat",
    "FlatChatGuess",
    "Guess",
    "Mixture",
    "PublicText",
    "Query",
    "RevealLabels",
    "RevealLabelsGuess",
    "Surfaces",
    "TypeCountRegressor",
    "UnusableObservation",
    "WordGuess",
    "fit_two_gaussians",
    "flatten",
    "gradient_of",
    "rank_types",
    "separate_clusters",
]
