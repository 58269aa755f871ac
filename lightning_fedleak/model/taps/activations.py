"""Record the hidden states of layers in training, and the gradient of the loss in them.

A client of split learning sends hidden states. From their gradient follows the gradient of layers
that a dishonest server could add to the model. :class:`ActivationTap` records both with hooks in
the user's own forward and backward, without a further run of the model. :func:`join_pieces` joins
the records of a batch that the model ran in several pieces.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_state import reset_compiled
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.model.taps.hooks import are_taps_paused, raise_kept, raised_when_read


class ChangedInPlace(RuntimeError):
    """A recorded tensor was overwritten before it was read."""


@dataclass
class _Record:
    """The tensors of one call of a layer in one micro-batch.

    Version counters of the tensors show whether the model overwrites them before they are read.

    Attributes:
        source: The hidden states in the user's graph.
        states: The same states without a graph, (B, L, d); None if they are not recorded.
        states_version: The version of ``states`` when they were recorded.
        gradient: The gradient of the states, (B, L, d); None before the backward.
        gradient_version: The version of ``gradient`` when it was recorded.
    """

    source: ref[Tensor]
    states: Tensor | None
    states_version: int
    gradient: Tensor | None = None
    gradient_version: int = 0


class ActivationTap:
    """Hooks that record hidden states in the user's forward, and their gradient in the backward.

    Nothing is computed again, and training is bit-identical: the hooks return nothing, and a record
    aliases autograd's tensors. The tap may keep that memory alive until :meth:`disarm`: twice
    (B, L, d) for each layer and micro-batch.

    There is one record per layer and micro-batch, in the order of the forwards, also under gradient
    checkpointing. A recomputation is recorded only if the first pass ran without gradient: a block
    inside a reentrant checkpoint, in the order of the backwards, if a gradient reaches it. A
    forward without gradient is no training step and leaves no record. A block that is called
    several times in a forward (ALBERT) leaves one record per call.

    A model compiled earlier by ``torch.compile`` would run without the hooks. So torch's compiled
    code of this process is reset when a tap is created, and again at :meth:`close`. The hooks stay
    outside of the compiled graph, which breaks at them: ``fullgraph=True`` cannot be used, and
    because operations are fused differently, the last bits of training may differ from those of the
    same run without a tap (armed or not makes no difference).

    A gradient is that of the loss on which the user calls ``backward``: a mean over the batch
    divides it by the batch size, Lightning's accumulation by the number of micro-batches.

    Args:
        anatomy: The parts of the model.
        layers: layers to record: 0 is the input of the first block, k the output of block k; of an
            encoder-decoder the encoder's.
        states: whether to record the hidden states.
        gradients: whether to record the gradient of the loss with respect to them.
        reach: whether to record the gradient also if nothing below the layer is trained (layer 0
            with frozen embeddings). The hidden states are then made to require a gradient, so that
            backward runs down to the layer. Do not use it with reentrant checkpoints, whose
            parameters would get gradients that they do not get without the tap. And do not begin or
            end a measurement between a checkpointed forward and its backward.
        first: whether to run before the hooks that the model already has, to record hidden states
            before a defence's hook rewrites them.

    Raises:
        ValueError: the model has no such layer.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        layers: Sequence[int],
        *,
        states: bool = True,
        gradients: bool = True,
        reach: bool = False,
        first: bool = False,
    ) -> None:
        self._places = {layer: place_of(anatomy, layer) for layer in layers}
        self._records_states = states
        self._records_gradients = gradients
        self._reach = reach
        self._records: dict[int, list[_Record]] = {layer: [] for layer in layers}
        self.armed = False
        self.error: Exception | None = None
        self._handles = [
            place.on_states(
                functools.partial(self._pass, layer), first=first, failed=self._store_error
            )
            for layer, place in self._places.items()
        ]
        self._root = anatomy.root
        reset_compiled(self._root)

    def _store_error(self, error: Exception) -> None:
        """Store the first exception of a hook."""
        self.error = self.error or error

    def _pass(self, layer: int, states: Any) -> Tensor | None:
        """Record one call of a layer; return new hidden states, or None if they stay."""
        if not self.armed or not torch.is_grad_enabled() or not isinstance(states, Tensor):
            return None
        if are_taps_paused():
            return None
        new_states = None
        if self._reach and not states.requires_grad:
            states = new_states = states.detach().requires_grad_()
        copy = states.detach() if self._records_states else None
        record = _Record(ref(states), copy, _version(copy))
        records = self._records[layer]
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint repeats the forward
        if not in_backward:
            records.append(record)
        elif any(r.source() is states for r in records):
            return new_states
        if states.requires_grad and (self._records_gradients or in_backward):
            # A recomputation that only restores saved tensors never sees a gradient.
            add = records.append if in_backward else None
            states.register_hook(functools.partial(self._record_gradient, record, add))
        return new_states

    @raised_when_read
    def _record_gradient(
        self, record: _Record, add: Callable[[_Record], None] | None, gradient: Tensor
    ) -> None:
        """Record the gradient of hidden states; ``add`` stores the record of a recomputation."""
        if self._records_gradients:
            record.gradient = gradient.detach()
            record.gradient_version = _version(record.gradient)
        if add is not None:
            add(record)

    def arm(self) -> None:
        """Start a measurement step: drop earlier records, and let the hooks record."""
        self._records = {layer: [] for layer in self._places}
        self.error = None
        self.armed = True

    def disarm(self) -> None:
        """End a measurement step: drop the records; the hooks return at once."""
        self.arm()
        self.armed = False

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return hidden states at ``layer``, (B, L, d) for each micro-batch since :meth:`arm`.

        Raises:
            ChangedInPlace: the model has overwritten them.
            Exception: an exception that a hook raised since :meth:`arm`.
        """
        raise_kept(self)
        return tuple(
            _unchanged(r.states, r.states_version, f"hidden states at layer {layer}")
            for r in self._records[layer]
            if r.states is not None
        )

    def gradients(self, layer: int, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        """Return the loss's gradients with respect to states at ``layer``, (B, L, d) each.

        Args:
            layer: one of the recorded layers.
            scale: loss scale that the gradients contain (GradScaler of float16). Copies of the
                gradients are divided by it.

        Returns:
            One for each micro-batch since :meth:`arm` that backward has reached.

        Raises:
            ChangedInPlace: the model has overwritten them.
            Exception: an exception that a hook raised since :meth:`arm`.
        """
        raise_kept(self)
        gradients = (
            _unchanged(r.gradient, r.gradient_version, f"the gradient at layer {layer}")
            for r in self._records[layer]
            if r.gradient is not None
        )
        return tuple(g if scale == 1.0 else g / scale for g in gradients)

    def close(self) -> None:
        """Remove every hook, and drop the records."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        reset_compiled(self._root)
        self.disarm()


def join_pieces(pieces: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Join the tensors of batches, each of which ran through the model in several pieces.

    Args:
        pieces: tensors of the pieces, rows first, in the order in which they ran.
        rows: The number of rows of each batch.

    Returns:
        One tensor for each batch; or ``pieces``, if their rows do not add up to the batches' rows.
    """
    joined, remaining = [], [*pieces]
    for count in rows:
        parts: list[Tensor] = []
        while remaining and sum(map(len, parts)) < count:
            parts.append(remaining.pop(0))
        fits = sum(map(len, parts)) == count and len({piece.shape[1:] for piece in parts}) == 1
        if not fits:
            return (*pieces,)
        joined.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return (*pieces,) if remaining else (*joined,)


def join_gradients(
    pieces: Sequence[Tensor], batches: Sequence[TokenBatch], layer: int
) -> tuple[Tensor, ...]:
    """Return the (B, L, d) gradient of each batch, joined from the pieces of the model's calls.

    Raises:
        UnusableObservation: the gradients do not have the shapes of these batches.
    """
    gradients = join_pieces(pieces, [len(batch.input_ids) for batch in batches])
    if len(gradients) != len(batches):
        raise UnusableObservation(f"layer {layer} had no gradient in some batch (torch.compile?)")
    for batch, gradient in zip(batches, gradients, strict=True):
        if gradient.shape[:2] != batch.input_ids.shape:
            raise UnusableObservation(f"layer {layer} ran on other tokens than the batch's")
    return gradients


def _version(tensor: Tensor | None) -> int:
    """Return how often the tensor was written in place; 0 for inference tensors."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _unchanged(tensor: Tensor, version: int, name: str) -> Tensor:
    """Return a recorded tensor; raise an error if it was overwritten since then."""
    if _version(tensor) != version:
        raise ChangedInPlace(f"the model overwrote {name} in place before they were read")
    return tensor
