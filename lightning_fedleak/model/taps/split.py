"""Record the tensors that a client of split learning sends in a training step.

The model is split at a layer: the client runs the blocks below it, and sends the hidden states of
the layer, the mask and the positions to the server. A *tap* is a set of hooks that record tensors
of the user's training and change nothing. :class:`SplitTap` records the hidden states at two
*stages* of the user's forward: ``local``, before the client's defences rewrite them (by noise, say,
in a hook of their own), and ``shared``, as the server gets them. Layers have the numbers of Hugging
Face's ``hidden_states``: 0 is the input of the first block, k the output of block k.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.model_runs import virtual_tokens
from lightning_fedleak.model.snapshots import Stage, UnusableObservation
from lightning_fedleak.model.taps.activations import ActivationTap, join_pieces
from lightning_fedleak.model.taps.calls import ModelCalls

# Arguments of the model that the client sends besides the hidden states.
ARGUMENTS = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Crossed:
    """The tensors that crossed the split in one micro-batch.

    If the batch packs several documents into a row, the tensors have a row for each document.

    Attributes:
        batch: the client's batch before any defence, the ground truth.
        local: the hidden states (B, L, d) by layer before the defences, or the error because of
            which they are unknown.
        shared: the hidden states (B, L, d) by layer that the client sent, or the error.
        attention_mask: (B, L), as the model received it, or None.
        position_ids: (B, L), as the model received them, or None.
    """

    batch: TokenBatch
    local: Mapping[int, Tensor | Exception]
    shared: Mapping[int, Tensor | Exception]
    attention_mask: Tensor | None
    position_ids: Tensor | None

    def states(self, stage: Stage, layer: int) -> Tensor:
        """Return hidden states (B, L, d) at a stage.

        Raises:
            UnusableObservation: the layer was not called exactly once on the batch's tokens.
            ChangedInPlace: the model has overwritten them.
        """
        states = (self.local if stage is Stage.LOCAL else self.shared)[layer]
        if isinstance(states, Exception):
            raise states
        return states


class SplitTap:
    """Hooks that record hidden states before and after the defences that rewrite them.

    Create the tap after the defences have registered their hooks: some of its hooks then run before
    the defences' hooks, and the others after them.

    The mask and the positions are those that the model received. If only its parts were called, the
    mask is the batch's, and the positions are None.

    Args:
        anatomy: The parts of the model.
        layers: The layers to record.
        defended: The layers whose hidden states a defence rewrites.
    """

    def __init__(
        self, anatomy: Anatomy, layers: Collection[int], defended: Collection[int]
    ) -> None:
        self._layers = sorted(set(layers))
        self._n_virtual = virtual_tokens(anatomy)
        self._defended = sorted(set(layers) & set(defended))
        self._before = ActivationTap(anatomy, self._defended, gradients=False, first=True)
        self._after = ActivationTap(anatomy, self._layers, gradients=False)
        self._calls = ModelCalls(anatomy)
        self._taps = self._before, self._after, self._calls

    def arm(self) -> None:
        """Start a micro-batch."""
        for tap in self._taps:
            tap.arm()

    def disarm(self) -> None:
        """Drop the records, and record no more."""
        self._after.disarm()
        self._before.disarm()
        self._calls.arm(False)

    def close(self) -> None:
        """Remove every hook."""
        for tap in self._taps:
            tap.close()

    def take(self, batch: TokenBatch) -> Crossed:
        """Return the tensors that were sent since :meth:`arm`, and start the next micro-batch."""
        shape = tuple(batch.input_ids.shape)
        try:
            documents = batch.by_document()
            mask, positions = documents.attention_mask, documents.position_ids
            if documents is batch:
                mask, positions = self._mask_and_positions(batch)
        except (BatchError, UnusableObservation) as error:
            errors: dict[int, Tensor | Exception] = dict.fromkeys(self._layers, error)
            self.arm()
            return Crossed(batch, errors, errors, None, None)
        shared = {layer: self._states(self._after, layer, shape) for layer in self._layers}
        local = shared | {n: self._states(self._before, n, shape) for n in self._defended}
        self.arm()
        local, shared = (
            {n: batch.per_document(s) if isinstance(s, Tensor) else s for n, s in states.items()}
            for states in (local, shared)
        )
        return Crossed(batch, local, shared, mask, positions)

    def _states(self, tap: ActivationTap, layer: int, shape: tuple[int, ...]) -> Tensor | Exception:
        """Return the hidden states (B, L, d) of a batch of ``shape`` (B, L), or an error."""
        try:
            passes = join_pieces(tap.states(layer), shape[:1])
        except RuntimeError as error:
            return error
        if len(passes) != 1:
            return UnusableObservation(
                f"layer {layer} was passed {len(passes)} times in the training step of one batch: "
                "which of them the client sends is unknown"
            )
        [states] = passes
        batch, length = shape
        if states.dim() != 3 or states.shape[:2] not in (
            (batch, length),
            (batch, length + self._n_virtual),
        ):
            return UnusableObservation(
                f"hidden states at layer {layer} are {tuple(states.shape)}, the batch holds {shape}"
                " tokens"
            )
        return states[:, -length:]

    def _mask_and_positions(self, batch: TokenBatch) -> Sequence[Tensor | None]:
        """Return the mask and the positions (B, L) that the model received, or None if it did not.

        Several calls on parts of the batch are joined. If their arguments do not make exactly one
        batch (repeated calls, or positions (1, L)), those of the last call count.

        Raises:
            UnusableObservation: an argument has another shape than (B, L) and (1, L).
        """
        if not self._calls.calls:
            return batch.attention_mask, None
        shape = batch.input_ids.shape
        results: list[Tensor | None] = []
        for name in ARGUMENTS:
            arguments = [call.get(name) for call in self._calls.calls]
            pieces = [value for value in arguments if isinstance(value, Tensor) and value.dim()]
            whole = join_pieces(pieces, shape[:1]) if len(pieces) == len(arguments) else ()
            value = whole[0] if len(whole) == 1 else arguments[-1]
            if isinstance(value, Tensor) and value.shape == (1, shape[1]):
                value = value.expand(shape)
            if value is not None and getattr(value, "shape", None) != shape:
                raise UnusableObservation(f"the model's {name} is not of shape {tuple(shape)}")
            results.append(value if isinstance(value, Tensor) else None)
        return results
