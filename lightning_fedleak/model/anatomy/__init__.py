"""The embeddings, blocks, output head and trainable parameters of a model: its anatomy.

:func:`find_anatomy` finds them in any module, and returns an :class:`Anatomy`.
"""

from lightning_fedleak.model.anatomy.blocks import Place as Place
from lightning_fedleak.model.anatomy.blocks import backbone_of as backbone_of
from lightning_fedleak.model.anatomy.blocks import is_encoder_decoder as is_encoder_decoder
from lightning_fedleak.model.anatomy.blocks import last_states_in as last_states_in
from lightning_fedleak.model.anatomy.blocks import place_of as place_of
from lightning_fedleak.model.anatomy.blocks import states_in as states_in
from lightning_fedleak.model.anatomy.blocks import states_out as states_out
from lightning_fedleak.model.anatomy.blocks import text_blocks as text_blocks
from lightning_fedleak.model.anatomy.blocks import with_states_out as with_states_out
from lightning_fedleak.model.anatomy.finding import find_anatomy as find_anatomy
from lightning_fedleak.model.anatomy.parts import EMBEDDING_WEIGHT as EMBEDDING_WEIGHT
from lightning_fedleak.model.anatomy.parts import HEAD_BIAS as HEAD_BIAS
from lightning_fedleak.model.anatomy.parts import HEAD_WEIGHT as HEAD_WEIGHT
from lightning_fedleak.model.anatomy.parts import Anatomy as Anatomy
from lightning_fedleak.model.anatomy.parts import AnatomyError as AnatomyError
from lightning_fedleak.model.anatomy.parts import Kind as Kind
from lightning_fedleak.model.anatomy.parts import accepts as accepts
from lightning_fedleak.model.anatomy.parts import cache_argument as cache_argument
from lightning_fedleak.model.anatomy.parts import find_path as find_path
from lightning_fedleak.model.anatomy.parts import has_cache as has_cache
from lightning_fedleak.model.anatomy.parts import head_adapter as head_adapter
from lightning_fedleak.model.anatomy.parts import head_surface as head_surface
from lightning_fedleak.model.anatomy.parts import ids_argument as ids_argument
from lightning_fedleak.model.anatomy.parts import leaf as leaf
from lightning_fedleak.model.anatomy.parts import matrix_shape as matrix_shape
from lightning_fedleak.model.anatomy.parts import mixed_precision as mixed_precision
from lightning_fedleak.model.anatomy.parts import placeholder_ids as placeholder_ids
from lightning_fedleak.model.anatomy.parts import special_ids as special_ids
from lightning_fedleak.model.anatomy.parts import taking_ids as taking_ids
from lightning_fedleak.model.anatomy.parts import unwrap as unwrap
from lightning_fedleak.model.anatomy.parts import walk as walk
from lightning_fedleak.model.anatomy.parts import where_whole as where_whole
from lightning_fedleak.model.anatomy.parts import without_peft as without_peft
