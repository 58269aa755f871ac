"""The taps that take snapshots of a training step."""

from lightning_fedleak.taps.activations import ActivationTap as ActivationTap
from lightning_fedleak.taps.activations import ChangedInPlace as ChangedInPlace
from lightning_fedleak.taps.activations import join_pieces as join_pieces
from lightning_fedleak.taps.calls import NOT_TESTED as NOT_TESTED
from lightning_fedleak.taps.calls import ModelCalls as ModelCalls
from lightning_fedleak.taps.calls import PackedRows as PackedRows
from lightning_fedleak.taps.calls import arguments_of as arguments_of
from lightning_fedleak.taps.calls import with_ids as with_ids
from lightning_fedleak.taps.gradients import EmbeddingNoise as EmbeddingNoise
from lightning_fedleak.taps.gradients import GradientTap as GradientTap
from lightning_fedleak.taps.gradients import StepError as StepError
from lightning_fedleak.taps.gradients import TiedHeadTap as TiedHeadTap
from lightning_fedleak.taps.gradients import UpdateError as UpdateError
from lightning_fedleak.taps.gradients import UpdateTap as UpdateTap
from lightning_fedleak.taps.gradients import before_real_step as before_real_step
from lightning_fedleak.taps.gradients import check_optimizer as check_optimizer
from lightning_fedleak.taps.gradients import loss_terms as loss_terms
from lightning_fedleak.taps.gradients import real_optimizer as real_optimizer
from lightning_fedleak.taps.split import Crossed as Crossed
from lightning_fedleak.taps.split import SplitTap as SplitTap
from lightning_fedleak.taps.tokens import Text as Text
from lightning_fedleak.taps.tokens import ask_tokens as ask_tokens
from lightning_fedleak.taps.tokens import compressed_bytes as compressed_bytes
from lightning_fedleak.taps.tokens import pool_digest as pool_digest
from lightning_fedleak.taps.tokens import texts_in as texts_in
