"""The row space of a shared gradient, and which inputs of a linear map span it.

The gradient of a linear map ``y = x W^T`` over N positions is ``D^T X``, with the inputs X (N, d)
and the output gradients D: every row of it is a combination of the inputs. An adversary that knows
the model can compute the input vector of each token of the vocabulary, its atom, and find the
tokens whose atoms span the rows.

:mod:`linear_maps` finds the maps and their inputs, :mod:`dictionary` computes the atoms, and
:mod:`atoms` prepares them for comparisons. :mod:`shared_rows` scales the gradients' rows to units
of their noise. :mod:`pursuit` chooses the atoms that explain the rows, :mod:`certificate` checks
them, and :mod:`explanation` combines all of this for one input.
"""

from lightning_fedleak.attacks.row_space.atoms import RIDGE as RIDGE
from lightning_fedleak.attacks.row_space.atoms import Atoms as Atoms
from lightning_fedleak.attacks.row_space.atoms import Whitening as Whitening
from lightning_fedleak.attacks.row_space.atoms import fit_whitening as fit_whitening
from lightning_fedleak.attacks.row_space.atoms import select_densest as select_densest
from lightning_fedleak.attacks.row_space.atoms import whitening_matrix as whitening_matrix
from lightning_fedleak.attacks.row_space.dictionary import NotAdditive as NotAdditive
from lightning_fedleak.attacks.row_space.dictionary import build_dictionary as build_dictionary
from lightning_fedleak.attacks.row_space.dictionary import factor_rows as factor_rows
from lightning_fedleak.attacks.row_space.dictionary import orthonormal as orthonormal
from lightning_fedleak.attacks.row_space.explanation import ReadableInput as ReadableInput
from lightning_fedleak.attacks.row_space.explanation import measure_capacity as measure_capacity
from lightning_fedleak.attacks.row_space.explanation import predict_capacity as predict_capacity
from lightning_fedleak.attacks.row_space.linear_maps import KnownInput as KnownInput
from lightning_fedleak.attacks.row_space.linear_maps import LinearMap as LinearMap
from lightning_fedleak.attacks.row_space.linear_maps import PerMaps as PerMaps
from lightning_fedleak.attacks.row_space.linear_maps import SharedInput as SharedInput
from lightning_fedleak.attacks.row_space.linear_maps import adalora_factors as adalora_factors
from lightning_fedleak.attacks.row_space.linear_maps import block_name as block_name
from lightning_fedleak.attacks.row_space.linear_maps import find_known_inputs as find_known_inputs
from lightning_fedleak.attacks.row_space.linear_maps import find_linear_maps as find_linear_maps
from lightning_fedleak.attacks.row_space.linear_maps import find_shared_inputs as find_shared_inputs
from lightning_fedleak.attacks.row_space.linear_maps import first_in_blocks as first_in_blocks
from lightning_fedleak.attacks.row_space.linear_maps import in_decoder as in_decoder
from lightning_fedleak.attacks.row_space.linear_maps import input_rows as input_rows
from lightning_fedleak.attacks.row_space.linear_maps import input_states as input_states
from lightning_fedleak.attacks.row_space.linear_maps import lone_token_maps as lone_token_maps
from lightning_fedleak.attacks.row_space.linear_maps import nonzero_gradients as nonzero_gradients
from lightning_fedleak.attacks.row_space.linear_maps import refuse_zeros as refuse_zeros
from lightning_fedleak.attacks.row_space.linear_maps import vocabulary_size as vocabulary_size
from lightning_fedleak.attacks.row_space.pursuit import PursuitResult as PursuitResult
from lightning_fedleak.attacks.row_space.pursuit import explain as explain
from lightning_fedleak.attacks.row_space.pursuit import pursuit_seconds as pursuit_seconds
from lightning_fedleak.attacks.row_space.shared_rows import SharedRows as SharedRows
