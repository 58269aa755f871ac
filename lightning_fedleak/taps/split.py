"""What crosses the split in a training step: hidden states, mask and positions, and token ids.

Read in the user's own forward; nothing is run anew.
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
from lightning_fedleak.taps.activations import ActivationTap, joined

GIVEN = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Crossed:
    """What crossed the split in one micro-batch.

    Attributes:
        batch: what the client's batch held, before any defence: the truth.
        local: by layer (B, L, d) hidden states before the defences, or why there are none.
        shared: the same as they left.
        attention_mask: (B, L) as the model was given it, or None.
        position_ids: the same.
    """

    batch: TokenBatch
    local: Mapping[int, Tensor | Exception]
    shared: Mapping[int, Tensor | Exception]
    attention_mask: Tensor | None
    position_ids: Tensor | None

    def states(self, stage: Stage, layer: int) -> Tensor:
        """Hidden states (B, L, d) at a stage.

        Raises:
            UnusableObservation: the layer was not passed once, or on other tokens.
            ChangedInPlace: the model has overwritten them.
        """
        found = (self.local if stage is Stage.LOCAL else self.shared)[layer]
        if isinstance(found, Exception):
            raise found
        return found


class SplitTap:
    """Reads the hidden states at some layers, before and after the defences that rewrite them.

    Must be made after the defences have put their hooks in: of one stage the hooks run before
    these, of the other behind them.

    The mask and the positions are those that the model itself was called with; where it was not
    called (a module that calls its parts), the batch's mask and the model's own positions.

    Args:
        anatomy: of the model.
        layers: whose hidden states.
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
        self._given: list[dict[str, Any]] = []
        self._names = _argument_names(anatomy.model)
        self._armed = False

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._armed and torch.is_grad_enabled():
                given = dict(zip(self._names, args, strict=False)) | kwargs
                self._given.append({name: given.get(name) for name in GIVEN})

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)

    def arm(self) -> None:
        """Starts a micro-batch."""
        self._behind.arm()
        self._before.arm()
        self._given = []
        self._armed = True

    def disarm(self) -> None:
        """The hooks return at once, and what they kept is let go."""
        self._behind.disarm()
        self._before.disarm()
        self._given = []
        self._armed = False

    def close(self) -> None:
        """Removes every hook."""
        self.disarm()
        self._behind.close()
        self._before.close()
        self._handle.remove()

    def take(self, batch: TokenBatch) -> Crossed:
        """What crossed since :meth:`arm`, and starts the next micro-batch."""
        shape = tuple(batch.input_ids.shape)
        try:
            mask, positions = self._sent_along(batch)
        except UnusableObservation as error:
            none: dict[int, Tensor | Exception] = dict.fromkeys(self._layers, error)
            return self._started_anew(Crossed(batch, none, none, None, None))
        shared = {layer: self._states(self._behind, layer, shape) for layer in self._layers}
        local = {
            layer: self._states(self._before, layer, shape) if layer in self._twice else found
            for layer, found in shared.items()
        }
        return self._started_anew(Crossed(batch, local, shared, mask, positions))

    def _started_anew(self, crossed: Crossed) -> Crossed:
        self.arm()
        return crossed

    def _states(self, tap: ActivationTap, layer: int, shape: tuple[int, ...]) -> Tensor | Exception:
        try:
            found = joined(tap.states(layer), shape[:1])
        except RuntimeError as error:
            return error
        if len(found) != 1:
            return UnusableObservation(
                f"layer {layer} was passed {len(found)} times in the training step of one batch: "
                "which of them crosses a split is unknown"
            )
        [states] = found
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

    def _sent_along(self, batch: TokenBatch) -> Sequence[Tensor | None]:
        if not self._given:
            return batch.attention_mask, None
        shape = batch.input_ids.shape
        found: list[Tensor | None] = []
        for name in GIVEN:
            given = [one[name] for one in self._given]
            pieces = [value for value in given if isinstance(value, Tensor) and value.dim()]
            whole = joined(pieces, shape[:1]) if len(pieces) == len(given) else ()
            value = whole[0] if len(whole) == 1 else given[-1]
            if isinstance(value, Tensor) and value.shape == (1, shape[1]):
                value = value.expand(shape)
            if value is not None and getattr(value, "shape", None) != shape:
                raise UnusableObservation(
                    f"the model was given {name} of another form than (B, L) = {tuple(shape)}"
                )
            found.append(value)
        return found


def _argument_names(model: nn.Module) -> list[str]:
    """Of ``forward``, in order: PEFT's wrappers have an order of their own, or hand all on."""
    own = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in own):
        own = inspect.signature(without_peft(model).forward).parameters.values()
    return [p.name for p in own]


class ModelIds:
    """Keeps the ``input_ids`` of every forward with gradient between :meth:`arm` and the next.

    Args:
        anatomy: of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._seen: list[Tensor | None] = []
        self._armed = False

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._armed and torch.is_grad_enabled():
                self._seen.append(argument_of(model, "input_ids", args, kwargs))

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)

    def arm(self, on: bool = True) -> None:
        """Forgets what was kept; keeps from now on, or (False) no longer."""
        self._seen = []
        self._armed = on

    def close(self) -> None:
        """Removes the hook."""
        self.arm(False)
        self._handle.remove()

    def written(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """The batches with the ids that the model was run on in place of their own.

        Raises:
            UnusableObservation: the model was not called once for each batch, or on other shapes.
        """
        known = [ids for ids in self._seen if ids is not None and ids.dim()]
        whole = joined(known, [len(batch.input_ids) for batch in batches])
        seen = whole if len(known) == len(self._seen) else self._seen
        found = [
            replace(batch, input_ids=ids)
            for batch, ids in zip(batches, seen, strict=False)
            if ids is not None and ids.shape == batch.input_ids.shape
        ]
        if len(seen) != len(batches) or len(found) != len(batches):
            raise UnusableObservation(
                "a defence replaces the batch, and which token ids the model was run on cannot be "
                f"told: it was called {len(self._seen)} times in {len(batches)} batches, and on "
                f"ids of the batch's shape in {len(found)} of them"
            )
        return found


def argument_of(
    model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """What a model is called with under this name, by keyword or by position."""
    if name in kwargs or not args:
        return kwargs.get(name)
    for module in (model, without_peft(model)):
        signature = inspect.signature(type(module).forward)
        if name in signature.parameters:
            found: Tensor | None = signature.bind_partial(module, *args).arguments.get(name)
            return found
    return None


__all__ = ["Crossed", "ModelIds", "SplitTap", "argument_of"]
