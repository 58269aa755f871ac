"""The row space of a shared gradient, and which inputs of a linear map span it.

The gradient of a linear map ``y = x W^T`` over N positions is ``D^T X``: every row of it is a
combination of the inputs. An adversary that knows the model can compute the input of every token,
and so ask which tokens were there.
"""

from lightning_fedleak.attacks.row_space.dictionary import (
    NotAdditive,
    build_dictionary,
    factor_rows,
    orthonormal,
)
from lightning_fedleak.attacks.row_space.explanation import (
    Capacity,
    ReadableInput,
    measure_capacity,
)
from lightning_fedleak.attacks.row_space.linear_maps import (
    NO_GRADIENT_YET,
    KnownInput,
    LinearMap,
    SharedInput,
    block_name,
    find_known_inputs,
    find_linear_maps,
    find_shared_inputs,
    in_decoder,
    input_rows,
    input_states,
    lone_token_maps,
    vocabulary_size,
)
from lightning_fedleak.attacks.row_space.pursuit import Atoms, PursuitResult, SharedRows, explain
from lightning_fedleak.attacks.row_space.whitening import (
    RIDGE,
    Whitening,
    fit_whitening,
    whitening_matrix,
)

__all__ = [
    "NO_GRADIENT_YET",
    "RIDGE",
    "Atoms",
    "Capacity",
    "KnownInput",
    "LinearMap",
    "NotAdditive",
    "PursuitResult",
    "ReadableInput",
    "SharedInput",
    "SharedRows",
    "Whitening",
    "block_name",
    "build_dictionary",
    "explain",
    "factor_rows",
    "find_known_inputs",
    "find_linear_maps",
    "find_shared_inputs",
    "fit_whitening",
    "in_decoder",
    "input_rows",
    "input_states",
    "lone_token_maps",
    "measure_capacity",
    "orthonormal",
    "vocabulary_size",
    "whitening_matrix",
]
