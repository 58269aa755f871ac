"""Insertion of crafted layers into a model, as an adapter after a block (Vu et al. 2024, Fig. 3 b).

The attacks compute the gradients of their layers in closed form; here the layers act in the model,
so that autograd gives the same gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import direction_of
from lightning_fedleak.model.anatomy import (
    Anatomy,
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
    without_peft,
)
from lightning_fedleak.model.taps import arguments_of

CHILD_NAME = "fedleak_crafted"  # of the inserted layers in the model, in state_dict keys


class CraftedInside(nn.Module):
    """Crafted layers and how their output is added; a child of the model they are inserted in.

    Args:
        crafted: as in :class:`Inserted`.
        direction: (d,).
        scale: of what is added.
    """

    def __init__(self, crafted: nn.Module, direction: Tensor, scale: float) -> None:
        super().__init__()
        self.crafted = crafted
        self.scale = scale
        self._mask: Tensor | None = None
        self.register_buffer("direction", direction)
        self.direction: Tensor

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, L, d) hidden states plus the crafted output for them."""
        z = self.crafted(hidden, mask)
        added = z.sum(-1, keepdim=True)
        if z.shape[1] == 1:
            added = added.expand(-1, hidden.shape[1], -1)
            if mask is not None:
                added = added * (mask != 0)[..., None].to(added.dtype)
        step = self.scale * added * self.direction.to(added.dtype)
        result: Tensor = hidden + step.to(hidden.dtype)
        return result

    def record_mask(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> None:
        """Store the mask that the model is called with."""
        mask = arguments_of(model, args, kwargs).get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) else None

    def add_to_input(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Add the output to what the first block reads."""
        return with_states_in(args, kwargs, self(states_in(args, kwargs), self._mask))

    def add_to_output(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add the output to what a block returns."""
        return with_states_out(output, self(states_out(output), self._mask))


class Inserted:
    """Insert crafted layers into the model, until :meth:`remove` or the end of the context.

    The layers read the hidden states after block ``layer`` (after the embeddings for 0); what they
    add enters the next block. They use the (B, L) ``attention_mask`` that the model is called with;
    without one no token is padding. ``hidden_states`` reads the model without them. In an
    encoder-decoder they enter the encoder.

    Crafted layers of whole sentences (R = 1, granularity ``"full"``) are added at every real token,
    because models differ in the tokens that the loss depends on; the gradient is the sum over them.

    Args:
        anatomy: of a model that is neither compiled, sharded nor under gradient checkpointing.
        layer: as in :func:`lightning_fedleak.model.model_runs.hidden_states`.
        crafted: of :func:`benchmarks.crafted_layers.craft`: they map hidden states (B, L, d) and a
            mask (B, L) or None to (B, R, K) with R = L or 1; only ``bias`` (K,) is trained. They
            are moved to the model's device.
        scale: factor of the output; with a smaller one the model's output changes less, and the
            gradient is smaller.

    Attributes:
        inside: the :class:`CraftedInside`, a child of the model.

    Raises:
        ValueError: no such layer.
    """

    def __init__(
        self, anatomy: Anatomy, layer: int, crafted: nn.Module, *, scale: float = 1e-3
    ) -> None:
        place = place_of(anatomy, layer)
        self._model = anatomy.model
        config = getattr(without_peft(self._model), "config", None)
        width = getattr(config, "hidden_size", None) or anatomy.hidden_size
        bias = getattr(crafted, "bias", None)
        dtype = bias.dtype if isinstance(bias, Tensor) else next(self._model.parameters()).dtype
        direction = direction_of(width).to(torch.promote_types(dtype, torch.float32))
        self.inside = inside = CraftedInside(crafted, direction, scale)
        inside.to(anatomy.device).train(self._model.training)
        self._handles = [
            self._model.register_forward_pre_hook(inside.record_mask, with_kwargs=True),
            place.module.register_forward_pre_hook(inside.add_to_input, with_kwargs=True)
            if place.side == "input"
            else place.module.register_forward_hook(inside.add_to_output),
        ]
        self._model.add_module(CHILD_NAME, inside)

    @property
    def bias(self) -> nn.Parameter:
        """Return the rungs, (K,), which are trained."""
        return self.inside.crafted.get_parameter("bias")

    def remove(self) -> None:
        """Remove the layers, so that the model is as before."""
        delattr(self._model, CHILD_NAME)
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Inserted:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
