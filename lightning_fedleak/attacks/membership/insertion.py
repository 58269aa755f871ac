"""Insertion of crafted layers into a model, as an adapter after a block (Vu et al. 2024, Fig. 3 b).

The server has to *choose the architecture*. A real LoRA adapter has neither a ReLU nor a bias, and
a Houlsby adapter one ReLU between two trained matrices: neither can be set to fire on one text
only, so these attacks do not reach a client who fixes the trained modules itself.

The output of the crafted layers, z (B, R, K), is added to the residual stream along one fixed unit
direction w: ``h <- h + scale * sum_k z_k w``. So the gradient of the loss at every z_k is
``scale * <dL/dh, w>`` for every rung (:func:`upstream_of`). w is random, not constant: a constant
lies in the null space of LayerNorm.

Only the rungs' biases are trained. The first layer W_1, which holds the target, and the second
layer's weights W_2 are frozen. The paper trains them too, but the attack reads only the gradient of
b_2. With the others frozen the shared update is smaller than that of any adapter, the target does
not drift during training, and under per-sample clipping no other part of the crafted layers takes a
share of the norm. A client can notice an adapter whose matrices are not trained. If they were
trained, W_2's gradient would show the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy import (
    Anatomy,
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
    without_peft,
)
from lightning_fedleak.model.model_runs import is_compiled
from lightning_fedleak.model.taps import arguments_of
from lightning_fedleak.validate import check_number

CHILD_NAME = "fedleak_crafted"  # of the inserted layers in the model, in state_dict keys
MOST_PENDING = 64  # forwards that may wait for their backward; not tuned; more: more masks stored


def upstream_of(
    delta: Tensor,
    direction: Tensor,
    scale: float,
    *,
    whole_sentence: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the loss at the crafted layers' output, the same for all rungs.

    Args:
        delta: (B, L, d) gradient of the loss in the hidden states at ``layer``. With that of a run
            without the inserted layers the result is exact to first order in ``scale``, with that
            of a run with them exact.
        direction: (d,), :attr:`Inserted.direction`.
        scale: :attr:`Inserted.scale`.
        whole_sentence: for granularity ``"full"``, whose output is added at every real token.
        mask: (B, L), 0 where padded; read for ``whole_sentence`` only.

    Returns:
        (B, L), or (B, 1) with ``whole_sentence``; at least in float32.
    """
    dtype = torch.promote_types(delta.dtype, torch.float32)
    upstream = scale * (delta.to(dtype) * direction.to(delta.device, dtype)).sum(-1)
    if not whole_sentence:
        return upstream
    if mask is not None:
        upstream = upstream * (mask.to(upstream.device) != 0)
    return upstream.sum(1, keepdim=True)


def direction_of(width: int, seed: int = 0) -> Tensor:
    """Return the unit vector w, (width,), float64, drawn from its own generator."""
    normal = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit: Tensor = normal / normal.norm()
    return unit


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
        self._by_input: OrderedDict[int, Tensor | None] = OrderedDict()
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

    # Hooks are methods, so that a copy of the model has hooks of its own.

    def record_mask(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> None:
        """Store the mask that the model is called with."""
        call = arguments_of(model, args, kwargs)
        mask = call.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise ValueError(
                f"crafted layers need an attention_mask (B, L), got {tuple(mask.shape)}"
            )
        if mask is None and hasattr(_peft_config(model), "num_virtual_tokens"):
            ids = call.get("input_ids")
            mask = torch.ones_like(ids) if isinstance(ids, Tensor) else None
        self._mask = mask if isinstance(mask, Tensor) else None

    def _mask_of(self, states: Tensor) -> Tensor | None:
        """Return the mask of the model's call in which a block reads ``states``.

        A checkpoint computes a block again in backward, perhaps after other forwards. The mask is
        then the one stored under the address of the block's input, which the checkpoint keeps until
        its backward.
        """
        key = states.data_ptr()
        if torch._C._current_graph_task_id() == -1:
            self._by_input.pop(key, None)
            self._by_input[key] = self._mask
            if len(self._by_input) > MOST_PENDING:
                self._by_input.popitem(last=False)
        elif key not in self._by_input:
            raise RuntimeError(
                "a checkpoint computes a block again whose first pass was forgotten (more than "
                f"{MOST_PENDING} forwards before their backward?)"
            )
        return self._by_input[key]

    def _with_crafted(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            # Prompt tuning puts virtual tokens before the text.
            mask = nn.functional.pad(mask, (hidden.shape[1] - mask.shape[1], 0))
        result: Tensor = self(hidden, mask)
        return result

    def add_to_input(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Add the output to what the first block reads."""
        hidden = states_in(args, kwargs)
        return with_states_in(args, kwargs, self._with_crafted(hidden, self._mask_of(hidden)))

    def add_to_output(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object], output: Any
    ) -> Any:
        """Add the output to what a block returns."""
        mask = self._mask_of(states_in(args, kwargs))
        return with_states_out(output, self._with_crafted(states_out(output), mask))


def _peft_config(model: nn.Module) -> Any:
    configs = getattr(model, "peft_config", None)
    name = getattr(model, "active_adapter", None)
    return configs.get(name) if isinstance(configs, dict) else None


class Inserted:
    """Insert crafted layers into the model, until :meth:`remove` or the end of the context.

    They are registered in ``anatomy.model``, so optimizers and DDP wrappers that are built later,
    and ``state_dict``, hold ``bias``: insert before ``configure_optimizers``. The layers read the
    hidden states after block ``layer`` (after the embeddings for 0); what they add enters the next
    block. They use the ``attention_mask`` that the model is called with, (B, L); without one no
    token is padding.

    Crafted layers of whole sentences (R = 1, granularity ``"full"``) are added at every real token,
    because models differ in the tokens that the loss depends on; the gradient is the sum over them.

    Hooks connect the layers. The model may be compiled later. ``hidden_states`` reads the model
    without the inserted layers. In an encoder-decoder the layers enter the encoder.

    Args:
        anatomy: of the model.
        layer: as in :func:`lightning_fedleak.model.model_runs.hidden_states`.
        crafted: as :meth:`MembershipAttack.craft` returns them: map hidden states (B, L, d) and a
            mask (B, L) or None to (B, R, K) with R = L or 1; only ``bias`` (K,) is trained. They
            are moved to the model's device.
        scale: factor of the output; with a smaller one the model's output changes less, and the
            gradient is smaller.
        seed: of the generator that draws w.

    Attributes:
        inside: the :class:`CraftedInside`, a child of the model.

    Raises:
        ValueError: no such layer, or a scale that is zero or not finite.
        TypeError: the model is compiled or sharded already (insert first).
    """

    def __init__(
        self,
        anatomy: Anatomy,
        layer: int,
        crafted: nn.Module,
        *,
        scale: float = 1e-3,
        seed: int = 0,
    ) -> None:
        check_number("scale", abs(scale), above=0)
        place = place_of(anatomy, layer)
        if is_compiled(anatomy.root):
            raise TypeError("the model is compiled already: insert first, then torch.compile")
        for module in anatomy.root.modules():
            if hasattr(module, "reshard") or "_fsdp_wrapped_module" in module._modules:
                raise TypeError("the model is sharded by FSDP already: insert first, then shard")
        self._model = anatomy.model
        config = getattr(without_peft(self._model), "config", None)
        width = getattr(config, "hidden_size", None) or anatomy.hidden_size
        bias = getattr(crafted, "bias", None)
        dtype = bias.dtype if isinstance(bias, Tensor) else next(self._model.parameters()).dtype
        direction = direction_of(width, seed).to(torch.promote_types(dtype, torch.float32))
        self.inside = inside = CraftedInside(crafted, direction, scale)
        inside.to(anatomy.device).train(self._model.training)
        add, module = inside.add_to_output, place.module
        self._handles = [
            self._model.register_forward_pre_hook(inside.record_mask, with_kwargs=True),
            module.register_forward_pre_hook(inside.add_to_input, with_kwargs=True)
            if place.side == "input"
            else module.register_forward_hook(add, with_kwargs=True),
        ]
        self._name = CHILD_NAME
        while self._name in self._model._modules:
            self._name += "_"
        self._model.add_module(self._name, inside)

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the rungs, (K,), which are trained; None for crafted layers without."""
        bias = getattr(self.inside.crafted, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    def remove(self) -> None:
        """Remove the layers, so that the model is as before; a second call does nothing."""
        if self._model._modules.get(self._name) is self.inside:
            del self._model._modules[self._name]
        for handle in self._handles:
            handle.remove()
        self.inside._by_input.clear()

    def __enter__(self) -> Inserted:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
