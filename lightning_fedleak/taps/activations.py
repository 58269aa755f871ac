"""The tap that reads a layer's hidden states, and the loss's gradient in them, as training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.anatomy.parts import Anatomy
from lightning_fedleak.anatomy.text_layers import (
    Place,
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)
from lightning_fedleak.model_runs import reset_compiled


class ChangedInPlace(RuntimeError):
    """What a tap held was overwritten before it was read; ``ActivationTap(clone=True)`` helps."""


@dataclass
class _Record:
    """One pass through a layer in one micro-batch, with the versions its tensors were seen at."""

    of: ref[Tensor]
    states: Tensor | None
    states_version: int
    gradient: Tensor | None = None
    gradient_version: int = 0


class ActivationTap:
    """Reads hidden states in the user's own forward, and the loss's gradient in their backward.

    Nothing is computed anew, and training is bit-identical: the hooks return nothing, and a record
    aliases what autograd holds anyway (a copy with ``clone``). The tap may keep that memory alive
    until :meth:`disarm`, (B, L, d) twice for each layer and micro-batch.

    One record per layer and micro-batch, in the order of the forwards, also under gradient
    checkpointing: recomputations are left out, or taken in place of a first pass that ran without
    gradient (a block inside a reentrant checkpoint: then in the order of the backwards, and only
    if a gradient reaches it). A forward that runs without gradient is no training step and leaves
    no record. A block that is called several times in a forward (ALBERT) leaves as many.

    What ``torch.compile`` made of the model before would run on without the hooks. So torch forgets
    all that it has compiled in this process when a tap is made, and again at :meth:`close`. The
    hooks are kept out of the compiled graph, which breaks there: ``fullgraph=True`` cannot be used,
    and as operations are fused differently, the last bits of training may differ from those of the
    same run without a tap (armed or not makes no difference).

    A gradient is of the loss as the user calls ``backward`` on it: a mean over the batch makes it
    smaller by the batch size, Lightning's accumulation by the number of micro-batches.

    Args:
        anatomy: of the model.
        layers: whose hidden states, 0 for the input of the first block, k for the output of block
            k; of an encoder-decoder, of the encoder.
        states: whether to keep the hidden states.
        gradients: whether to keep the gradient of the loss in them.
        reach: also where nothing below the layer is trained, so that no gradient would reach it
            (layer 0 with frozen embeddings), go on with hidden states that ask for one. Backward
            then does the work down to there. Not with reentrant checkpoints, whose parameters would
            get gradients that they do not get without the tap; nor may a look begin or end between
            a checkpointed forward and its backward.
        clone: copy, for models that overwrite hidden states or their gradient in place.
        first: read before the hooks that are there already, in place of after them: hidden states
            as they are before a defence's hook rewrites them.

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
        clone: bool = False,
        first: bool = False,
    ) -> None:
        self._places = {layer: place_of(anatomy, layer) for layer in layers}
        self._keep_states = states
        self._keep_gradients = gradients
        self._reach = reach
        self._clone = clone
        self._first = first
        self._records: dict[int, list[_Record]] = {layer: [] for layer in layers}
        self._handles: list[RemovableHandle] = []
        self.armed = False
        for layer, place in self._places.items():
            self._handles.append(self._tap(layer, place))
        self._root = anatomy.root
        reset_compiled(self._root)

    def _tap(self, layer: int, place: Place) -> RemovableHandle:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            replaced = self._pass(layer, states_in(args, kwargs))
            return None if replaced is None else with_states_in(args, kwargs, replaced)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def leaving(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            replaced = self._pass(layer, states_out(output))
            return None if replaced is None else with_states_out(output, replaced)

        if place.side == "input":
            return place.module.register_forward_pre_hook(
                entering, prepend=self._first, with_kwargs=True
            )
        return place.module.register_forward_hook(leaving, prepend=self._first)

    def _pass(self, layer: int, states: Any) -> Tensor | None:
        """Records one pass; hidden states to go on with, or None for those that came."""
        if not self.armed or not torch.is_grad_enabled() or not isinstance(states, Tensor):
            return None
        replaced = None
        if self._reach and not states.requires_grad:
            states = replaced = states.detach().requires_grad_()
        kept = states.detach() if self._keep_states else None
        if kept is not None and self._clone:
            kept = kept.clone()
        record = _Record(ref(states), kept, _version(kept))
        records = self._records[layer]
        recomputed = torch._C._current_graph_task_id() != -1
        if not recomputed:
            records.append(record)
        elif any(r.of() is states for r in records):
            return replaced
        if states.requires_grad and (self._keep_gradients or recomputed):
            # A recomputation that only restores saved tensors never sees a gradient.
            def arrived(gradient: Tensor) -> None:
                if self._keep_gradients:
                    record.gradient = gradient.clone() if self._clone else gradient.detach()
                    record.gradient_version = _version(record.gradient)
                if recomputed:
                    records.append(record)

            states.register_hook(arrived)
        return replaced

    def arm(self) -> None:
        """Starts a look: forgets earlier records and lets the hooks record."""
        self._records = {layer: [] for layer in self._places}
        self.armed = True

    def disarm(self) -> None:
        """Ends a look: the hooks return at once, and what they kept is let go."""
        self.arm()
        self.armed = False

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Hidden states at ``layer``, (B, L, d) for each micro-batch since :meth:`arm`.

        Raises:
            ChangedInPlace: the model has overwritten them.
        """
        return tuple(
            _unchanged(r.states, r.states_version, f"hidden states at layer {layer}")
            for r in self._records[layer]
            if r.states is not None
        )

    def gradients(self, layer: int, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        """Gradient of the loss in the hidden states at ``layer``, (B, L, d) each.

        Args:
            layer: one of those tapped.
            scale: loss scale still in the gradients (fp16's GradScaler); divided out, in a copy.

        Returns:
            One for each micro-batch since :meth:`arm` that backward has come to.

        Raises:
            ChangedInPlace: they were overwritten.
        """
        gradients = (
            _unchanged(r.gradient, r.gradient_version, f"the gradient at layer {layer}")
            for r in self._records[layer]
            if r.gradient is not None
        )
        return tuple(g if scale == 1.0 else g / scale for g in gradients)

    def close(self) -> None:
        """Removes every hook and lets go of what they kept."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        reset_compiled(self._root)
        self.disarm()


def joined(found: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, ...]:
    """What was seen of batches that were run in pieces (logical batches), put together to batches.

    Args:
        found: of each piece, its rows first, in the order in which they were run.
        rows: of each batch.

    Returns:
        One for each batch; ``found`` as it is where its rows do not add up to those of the batches.
    """
    whole, rest = [], [*found]
    for count in rows:
        own: list[Tensor] = []
        while rest and sum(map(len, own)) < count:
            own.append(rest.pop(0))
        fits = sum(map(len, own)) == count and len({piece.shape[1:] for piece in own}) == 1
        if not fits:
            return (*found,)
        whole.append(torch.cat(own) if len(own) > 1 else own[0])
    return (*found,) if rest else (*whole,)


def _version(tensor: Tensor | None) -> int:
    """How often the tensor was written in place; inference tensors do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _unchanged(tensor: Tensor, version: int, what: str) -> Tensor:
    if _version(tensor) != version:
        raise ChangedInPlace(
            f"{what} were overwritten before they were read: give ActivationTap clone=True"
        )
    return tensor


__all__ = ["ActivationTap", "ChangedInPlace", "joined"]
