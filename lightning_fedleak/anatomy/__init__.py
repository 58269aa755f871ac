"""The embeddings, blocks, output head and trainable parameters of a model."""

from lightning_fedleak.anatomy.blocks import (
    Place,
    is_encoder_decoder,
    place_of,
    states_in,
    states_out,
    text_blocks,
    with_states_in,
    with_states_out,
)
from lightning_fedleak.anatomy.finding import find_anatomy
from lightning_fedleak.anatomy.parts import (
    EMBEDDING_WEIGHT,
    HEAD_BIAS,
    HEAD_WEIGHT,
    Anatomy,
    AnatomyError,
    Kind,
)
from lightning_fedleak.anatomy.wrappers import (
    find_path,
    leaf,
    matrix_shape,
    unwrap,
    walk,
    without_peft,
)

__all__ = [
    "EMBEDDING_WEIGHT",
    "HEAD_BIAS",
    "HEAD_WEIGHT",
    "Anatomy",
    "AnatomyError",
    "Kind",
    "Place",
    "find_anatomy",
    "find_path",
    "is_encoder_decoder",
    "leaf",
    "matrix_shape",
    "place_of",
    "states_in",
    "states_out",
    "text_blocks",
    "unwrap",
    "walk",
    "with_states_in",
    "with_states_out",
    "without_peft",
]
