"""The taps that take snapshots of a training step.

A *tap* is a set of hooks that record tensors of the user's training and change nothing.
"""

from lightning_fedleak.model.taps.activations import ActivationTap as ActivationTap
from lightning_fedleak.model.taps.activations import ChangedInPlace as ChangedInPlace
from lightning_fedleak.model.taps.activations import join_gradients as join_gradients
from lightning_fedleak.model.taps.calls import NOT_TESTED as NOT_TESTED
from lightning_fedleak.model.taps.calls import ModelCalls as ModelCalls
from lightning_fedleak.model.taps.calls import with_ids as with_ids
from lightning_fedleak.model.taps.control import control_crossing as control_crossing
from lightning_fedleak.model.taps.control import control_gradient as control_gradient
from lightning_fedleak.model.taps.control import control_states as control_states
from lightning_fedleak.model.taps.control import is_uneven as is_uneven
from lightning_fedleak.model.taps.control import one_text as one_text
from lightning_fedleak.model.taps.control import replace_word as replace_word
from lightning_fedleak.model.taps.control import shuffle_words as shuffle_words
from lightning_fedleak.model.taps.gradients import UpdateError as UpdateError
from lightning_fedleak.model.taps.gradients import before_real_step as before_real_step
from lightning_fedleak.model.taps.gradients import check_optimizer as check_optimizer
from lightning_fedleak.model.taps.gradients import real_optimizer as real_optimizer
from lightning_fedleak.model.taps.rounds import control_update as control_update
from lightning_fedleak.model.taps.rounds import plain_call as plain_call
from lightning_fedleak.model.taps.split import Crossed as Crossed
from lightning_fedleak.model.taps.split import SplitTap as SplitTap
from lightning_fedleak.model.taps.step import LocalRound as LocalRound
from lightning_fedleak.model.taps.step import ModelCall as ModelCall
from lightning_fedleak.model.taps.step import Step as Step
from lightning_fedleak.model.taps.step_tap import StepTap as StepTap
from lightning_fedleak.model.taps.tokens import MASKS as MASKS
from lightning_fedleak.model.taps.tokens import Completions as Completions
from lightning_fedleak.model.taps.tokens import Text as Text
from lightning_fedleak.model.taps.tokens import answer_groups as answer_groups
from lightning_fedleak.model.taps.tokens import candidate_log_probs as candidate_log_probs
from lightning_fedleak.model.taps.tokens import compressed_bytes as compressed_bytes
from lightning_fedleak.model.taps.tokens import label_places as label_places
from lightning_fedleak.model.taps.tokens import pool_digest as pool_digest
from lightning_fedleak.model.taps.tokens import rejected_places as rejected_places
from lightning_fedleak.model.taps.tokens import texts_in as texts_in
from lightning_fedleak.model.taps.tokens import token_log_probs as token_log_probs
from lightning_fedleak.model.taps.tokens import unmasked as unmasked
