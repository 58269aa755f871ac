"""The embeddings, blocks, output head and trainable parameters of a model."""

from lightning_fedleak.anatomy.finding import find_anatomy
from lightning_fedleak.anatomy.parts import (
    EMBEDDING_WEIGHT,
    HEAD_BIAS,
    HEAD_WEIGHT,
    Anatomy,
    AnatomyError,
    Kind,
)

__all__ = [
    "EMBEDDING_WEIGHT",
    "HEAD_BIAS",
    "HEAD_WEIGHT",
    "Anatomy",
    "AnatomyError",
    "Kind",
    "find_anatomy",
]
