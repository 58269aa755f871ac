"""Attacks on the trained weights: what a released model gives away of its training texts."""

from lightning_fedleak.attacks.memorization.extraction import Canaries, Extraction, ExtractionGuess
from lightning_fedleak.attacks.memorization.scores import (
    Combined,
    ErrorZone,
    Loss,
    LossRatio,
    MemorizationAttack,
    MemorizationGuess,
    MinK,
    Windows,
    Zlib,
)

__all__ = [
    "Canaries",
    "Combined",
    "ErrorZone",
    "Extraction",
    "ExtractionGuess",
    "Loss",
    "LossRatio",
    "MemorizationAttack",
    "MemorizationGuess",
    "MinK",
    "Windows",
    "Zlib",
]
