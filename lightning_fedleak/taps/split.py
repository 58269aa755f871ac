"""The tap that records what crosses the split in a training step.

These are hidden states, mask, positions and token ids, recorded in the user's forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.wrappers import without_peft
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import virtual_tokens
from lightning_fedleak.snapshots import Stage, UnusableObservation
from lightning_fedleak.taps.activations import ActivationTap, join_pieces

ARGUMENTS = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Crossed:
    """The tensors that crossed the split in one micro-batch.

    Attributes:
        batch: the client's batch before any defence: the truth.
        local: by layer (B, L, d) hidden states before the defences, or why there are none.
        shared: by layer the hidden states that left the client.
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
            UnusableObservation: the layer was not passed once, or on other tokens.
            ChangedInPlace: the model has overwritten them.
        """
        states = (self.local if stage is Stage.LOCAL else self.shared)[layer]
        if isinstance(states, Exception):
            raise states
        return states


class SplitTap:
    """Hooks that record hidden states before and after the defences that rewrite them.

    The tap is created after the defences have registered their hooks, so that its hooks run before
    and after theirs.

    The mask and the positions are those that the model itself received; where it was not called (a
    module that calls its parts), the batch's mask and the model's own positions.

    Args:
        anatomy: of the model.
        layers: layers to record.
        defended: layers whose hidden states a defence rewrites.
    """

    def __init__(
        self, anatomy: Anatomy, layers: Collection[int], defended: Collection[int]
    ) -> None:
        self._layers = sorted(set(layers))
        self._virtual = virtual_tokens(anatomy)
        self._behind = ActivationTap(anatomy, self._layers, gradients=False)
        both = sorted(set(layers) & set(defended))
        self._before = ActivationTap(anatomy, both, gradients=False, first=True)
        self._twice = frozenset(both)
        self._arguments: list[dict[str, Any]] = []
        self._armed = False

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._armed and torch.is_grad_enabled():
                self._arguments.append(
                    {name: argument_of(model, name, args, kwargs) for name in ARGUMENTS}
                )

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)

    def arm(self) -> None:
        """Start a micro-batch."""
        self._behind.arm()
        self._before.arm()
        self._arguments = []
        self._armed = True

    def disarm(self) -> None:
        """Drop the records, and let the hooks return at once."""
        self._behind.disarm()
        self._before.disarm()
        self._arguments = []
        self._armed = False

    def close(self) -> None:
        """Remove every hook."""
        self.disarm()
        self._behind.close()
        self._before.close()
        self._handle.remove()

    def take(self, batch: TokenBatch) -> Crossed:
        """Return what crossed since :meth:`arm`, and start the next micro-batch."""
        shape = tuple(batch.input_ids.shape)
        try:
            mask, positions = self._mask_and_positions(batch)
        except UnusableObservation as error:
            none: dict[int, Tensor | Exception] = dict.fromkeys(self._layers, error)
            self.arm()
            return Crossed(batch, none, none, None, None)
        shared = {layer: self._states(self._behind, layer, shape) for layer in self._layers}
        local = {
            layer: self._states(self._before, layer, shape) if layer in self._twice else hidden
            for layer, hidden in shared.items()
        }
        self.arm()
        return Crossed(batch, local, shared, mask, positions)

    def _states(self, tap: ActivationTap, layer: int, shape: tuple[int, ...]) -> Tensor | Exception:
        try:
            passes = join_pieces(tap.states(layer), shape[:1])
        except RuntimeError as error:
            return error
        if len(passes) != 1:
            return UnusableObservation(
                f"layer {layer} was passed {len(passes)} times in the training step of one batch: "
                "which of them crosses a split is unknown"
            )
        [states] = passes
        batch, length = shape
        if states.dim() != 3 or states.shape[:2] not in (
            (batch, length),
            (batch, length + self._virtual),
        ):
            return UnusableObservation(
                f"hidden states at layer {layer} are {tuple(states.shape)}, the batch holds {shape}"
                " tokens"
            )
        return states[:, -length:]

    def _mask_and_positions(self, batch: TokenBatch) -> Sequence[Tensor | None]:
        if not self._arguments:
            return batch.attention_mask, None
        shape = batch.input_ids.shape
        results: list[Tensor | None] = []
        for name in ARGUMENTS:
            arguments = [one[name] for one in self._arguments]
            pieces = [value for value in arguments if isinstance(value, Tensor) and value.dim()]
            whole = join_pieces(pieces, shape[:1]) if len(pieces) == len(arguments) else ()
            value = whole[0] if len(whole) == 1 else arguments[-1]
            if isinstance(value, Tensor) and value.shape == (1, shape[1]):
                value = value.expand(shape)
            if value is not None and getattr(value, "shape", None) != shape:
                raise UnusableObservation(
                    f"the model received {name} of another form than (B, L) = {tuple(shape)}"
                )
            results.append(value)
        return results


class ModelIds:
    """A hook that records the ``input_ids`` of each forward with gradient since :meth:`arm`.

    Args:
        anatomy: of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._ids: list[Tensor | None] = []
        self._armed = False

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            if self._armed and torch.is_grad_enabled():
                self._ids.append(argument_of(model, "input_ids", args, kwargs))

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)

    def arm(self, active: bool = True) -> None:
        """Drop the records, and record from here on, or (False) no longer."""
        self._ids = []
        self._armed = active

    def close(self) -> None:
        """Remove the hook."""
        self.arm(False)
        self._handle.remove()

    def written(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Return the batches with the ids that the model ran on.

        Raises:
            UnusableObservation: the model was not called once for each batch, or on other shapes.
        """
        pieces = [ids for ids in self._ids if ids is not None and ids.dim()]
        whole = join_pieces(pieces, [len(batch.input_ids) for batch in batches])
        ids_of_batches = whole if len(pieces) == len(self._ids) else self._ids
        written = [
            replace(batch, input_ids=ids)
            for batch, ids in zip(batches, ids_of_batches, strict=False)
            if ids is not None and ids.shape == batch.input_ids.shape
        ]
        if len(ids_of_batches) != len(batches) or len(written) != len(batches):
            raise UnusableObservation(
                "a defence replaces the batch, and which token ids the model was run on is not "
                f"visible: it was called {len(self._ids)} times in {len(batches)} batches, and on "
                f"ids of the batch's shape in {len(written)} of them"
            )
        return written


def argument_of(
    model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the model's argument of this name, passed by keyword or by position."""
    if name in kwargs or not args:
        return kwargs.get(name)
    for module in (model, without_peft(model)):
        signature = inspect.signature(type(module).forward)
        if name in signature.parameters:
            argument: Tensor | None = signature.bind_partial(module, *args).arguments.get(name)
            return argument
    return None
