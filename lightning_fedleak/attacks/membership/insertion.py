"""Insertion of crafted layers into a model, in the three placements of Vu et al. 2024, Fig. 3.

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
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model.anatomy import (
    Anatomy,
    Place,
    place_of,
    states_in,
    states_out,
    text_blocks,
    with_states_in,
    with_states_out,
    without_peft,
)
from lightning_fedleak.model.model_runs import is_compiled
from lightning_fedleak.model.taps import arguments_of
from lightning_fedleak.validate import check_choice, check_integer, check_number

Placement = Literal["sequential", "parallel", "embedding"]

CHILD_NAME = "fedleak_crafted"  # of the inserted layers in the model, in state_dict keys
MOST_PENDING = 64  # forwards that may wait for their backward; not tuned; more: more masks stored


def insert(
    anatomy: Anatomy,
    layer: int,
    crafted: nn.Module,
    placement: Placement = "sequential",
    *,
    scale: float = 1e-3,
    seed: int = 0,
    classes: int = 8,
) -> Inserted:
    """Insert crafted layers into the model, until the handle's :meth:`Inserted.remove`.

    They are registered in ``anatomy.model``, so optimizers and DDP wrappers that are built later,
    and ``state_dict``, hold ``bias``: insert before ``configure_optimizers``. The layers use the
    ``attention_mask`` that the model is called with, (B, L); without one no token is padding. All
    three placements read the hidden states at ``layer``:

    - ``"sequential"`` (Fig. 3 b): an adapter after block ``layer`` (after the embeddings for 0);
      what it adds enters block ``layer + 1``.
    - ``"parallel"`` (Fig. 3 c): beside block ``layer + 1``: reads that block's input and adds to
      that block's output.
    - ``"embedding"`` (Fig. 3 a): the model up to ``layer`` is a frozen embedding module, and the
      blocks above are cut off. The crafted layers are the first that are trained, followed by the
      server's linear layer on the mean over the real tokens. The model then returns ``logits``
      (B, ``classes``) and, if called with ``labels`` (B,), a ``loss`` (:class:`Classified`).

    Crafted layers of whole sentences (R = 1, granularity ``"full"``) are added at every real token,
    because models differ in the tokens that the loss depends on; the gradient is the sum over them.

    Hooks connect the layers. They run once for each forward under Hugging Face's gradient
    checkpointing, and as often as the block is computed inside other checkpoints. The model may be
    compiled later. ``hidden_states`` reads the model without the inserted layers. In an
    encoder-decoder the layers enter the encoder.

    Args:
        anatomy: of the model.
        layer: as in :func:`lightning_fedleak.model.model_runs.hidden_states`.
        crafted: as :meth:`MembershipAttack.craft` returns them: map hidden states (B, L, d) and a
            mask (B, L) or None to (B, R, K) with R = L or 1; only ``bias`` (K,) is trained. They
            are moved to the model's device.
        placement: one of the above.
        scale: factor of the output; with a smaller one the model's output changes less, and the
            gradient is smaller.
        seed: of the generator that draws w and the linear layer of ``"embedding"``.
        classes: of ``"embedding"``.

    Raises:
        ValueError: no such layer or placement, no block beside which to insert, a scale that is
            zero or not finite, fewer than 2 classes, or crafted layers that train anything but
            ``bias``.
        TypeError: the model is compiled or sharded already (insert first), or, for
            ``"embedding"``, something else has replaced its forward.
    """
    check_choice("placement", placement, get_args(Placement))
    check_number("scale", scale)
    if scale == 0:
        raise ValueError("scale must not be 0: the loss would not depend on the crafted layers")
    check_integer("classes", classes, at_least=2)
    place = place_of(anatomy, layer)
    if placement == "parallel":
        if layer == len(text_blocks(anatomy)):
            raise ValueError(
                f"layer={layer} is the output of the last block, so no block reads it and "
                "placement='parallel' has no place: use a lower layer, or placement='sequential'"
            )
        place = place_of(anatomy, layer + 1)
    trained = [n for n, p in crafted.named_parameters() if p.requires_grad]
    if any(n != "bias" for n in trained):
        raise ValueError(
            f"crafted layers train nothing but 'bias', but these train {trained}: freeze the rest "
            "(register_buffer)"
        )
    if is_compiled(anatomy.root):
        raise TypeError("the model is compiled already: insert first, then torch.compile")
    for module in anatomy.root.modules():
        if hasattr(module, "reshard") or "_fsdp_wrapped_module" in module._modules:
            raise TypeError("the model is sharded by FSDP already: insert first, then shard")
    return Inserted(anatomy, layer, crafted, placement, place, scale, seed, classes)


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
        delta: (B, L, d) gradient of the loss in the hidden states that the output is added to: at
            ``layer`` for ``"sequential"``, at ``layer + 1`` for ``"parallel"``. With the delta of
            a run without the inserted layers the result is exact to first order in ``scale``, with
            that of a run with them exact.
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
        crafted: as in :func:`insert`.
        direction: (d,).
        scale: of what is added.
    """

    def __init__(self, crafted: nn.Module, direction: Tensor, scale: float) -> None:
        super().__init__()
        self.crafted = crafted
        self.scale = scale
        self.register_buffer("direction", direction)
        self.direction: Tensor

    def forward(
        self, hidden: Tensor, mask: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """Return ``residual``, by default ``hidden``, plus the crafted output for ``hidden``.

        Args:
            hidden: (B, L, d).
            mask: (B, L) or None.
            residual: (B, L, d).
        """
        residual = hidden if residual is None else residual
        if hidden.shape[-1] != len(self.direction):
            raise ValueError(
                f"hidden states are {hidden.shape[-1]} wide, but {len(self.direction)} was expected"
            )
        z = self.crafted(hidden, mask)
        if z.dim() != 3 or z.shape[0] != len(hidden) or z.shape[1] not in (1, hidden.shape[1]):
            raise ValueError(
                f"crafted layers must give (B, R, K) with R = 1 or L for hidden states "
                f"{tuple(hidden.shape)}, got {tuple(z.shape)}"
            )
        added = z.sum(-1, keepdim=True)
        if z.shape[1] == 1:
            added = added.expand(-1, hidden.shape[1], -1)
            if mask is not None:
                added = added * (mask != 0)[..., None].to(added.dtype)
        step = self.scale * added * self.direction.to(added.dtype)
        result: Tensor = residual + step.to(residual.dtype)
        return result


class Classified(NamedTuple):
    """Output of a model with the placement ``"embedding"``.

    Attributes:
        loss: cross-entropy, a scalar; None without labels.
        logits: (B, classes).
    """

    loss: Tensor | None
    logits: Tensor


class EmbeddingModule(nn.Module):
    """Fig. 3 (a): crafted layers and a linear layer on top of a frozen model, cut off at a layer.

    It replaces the model's forward. Dropout depends on the model's mode; a dishonest server sets it
    to 0.

    Args:
        inside: the crafted layers.
        model: frozen meanwhile; runs without gradient up to the layer.
        place: of the layer.
        masks: the mask of the model's calls.
        classes: of the linear layer.
        seed: of its weights, normal with standard deviation ``1 / sqrt(d)``; trained.
    """

    def __init__(
        self,
        inside: CraftedInside,
        model: nn.Module,
        place: Place,
        masks: _Masks,
        classes: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.inside = inside
        d = len(inside.direction)
        generator = torch.Generator().manual_seed(seed + 1)
        weight = torch.randn((classes, d), generator=generator, dtype=torch.float64) / d**0.5
        self.top_weight = nn.Parameter(weight.to(inside.direction))
        self.top_bias = nn.Parameter(torch.zeros(classes).to(inside.direction))
        # Not registered as a child: this module is one of the model's own children.
        self._forward_and_masks = (model.forward, masks)
        self._cutting = False
        if place.side == "input":
            self._handle = place.module.register_forward_pre_hook(
                self._cut_before, with_kwargs=True
            )
        else:
            self._handle = place.module.register_forward_hook(self._cut_behind)

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Classified:
        """Return logits and loss for the model's arguments; ``labels`` are classes, (B,)."""
        forward, masks = self._forward_and_masks
        self._cutting = True
        try:
            with torch.no_grad():
                forward(*args, **kwargs)
        except _Cut as cut:
            hidden = cut.states
        else:
            raise RuntimeError("the model did not call the block at which it is cut off")
        finally:
            self._cutting = False
        mask = masks.matching(hidden)
        mixed = self.inside(hidden, mask).to(self.top_weight.dtype)
        if mask is None:
            pooled = mixed.mean(1)
        else:
            real = (mask != 0)[..., None].to(mixed.dtype)
            pooled = (mixed * real).sum(1) / real.sum(1).clamp(min=1)
        logits = nn.functional.linear(pooled, self.top_weight, self.top_bias)
        if labels is None:
            return Classified(None, logits)
        if labels.shape != logits.shape[:1]:
            raise ValueError(
                "with placement='embedding' the model classifies: labels must be "
                f"{tuple(logits.shape[:1])}, got {tuple(labels.shape)}"
            )
        return Classified(nn.functional.cross_entropy(logits, labels), logits)

    def _cut_before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
        if self._cutting:
            raise _Cut(states_in(args, kwargs))

    def _cut_behind(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._cutting:
            raise _Cut(states_out(output))

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


class _Cut(Exception):
    """Not an error: carries the hidden states out of the forward."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class _Masks:
    """The mask of the model's calls, for the crafted layers.

    A checkpoint computes a block again in backward, perhaps after other forwards. The mask is then
    found by the address of the block's input, which the checkpoint stores until its backward.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._handle = anatomy.model.register_forward_pre_hook(self._record_mask, with_kwargs=True)
        self._mask: Tensor | None = None
        self._by_input: OrderedDict[int, Tensor | None] = OrderedDict()

    def _record_mask(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> None:
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

    def matching(self, hidden: Tensor) -> Tensor | None:
        """Return the mask (B, L) of a block that is called with ``hidden``, (B, L, d)."""
        key = hidden.data_ptr()
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
        mask = self._by_input[key]
        if mask is None:
            return None
        # Prompt tuning puts virtual tokens before the text; generate() passes only the last token.
        virtual_tokens = hidden.shape[1] - mask.shape[1]
        return nn.functional.pad(mask, (virtual_tokens, 0))

    def close(self) -> None:
        self._handle.remove()
        self._by_input.clear()


def _peft_config(model: nn.Module) -> Any:
    configs = getattr(model, "peft_config", None)
    name = getattr(model, "active_adapter", None)
    return configs.get(name) if isinstance(configs, dict) else None


class Inserted:
    """Crafted layers in a model; a context that removes them at its end.

    Attributes:
        module: the child of the model that holds them: a :class:`CraftedInside`, for
            ``"embedding"`` inside an :class:`EmbeddingModule`.
        inside: the :class:`CraftedInside`.
        layer: whose hidden states are read.
        placement: where they are.
        scale: factor of the output.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        layer: int,
        crafted: nn.Module,
        placement: Placement,
        place: Place,
        scale: float,
        seed: int,
        classes: int,
    ) -> None:
        self._model = anatomy.model
        self.layer, self.placement, self.scale = layer, placement, scale
        if placement == "embedding" and "forward" in vars(self._model):
            raise TypeError(
                f"the forward of {type(self._model).__name__} is replaced already, so crafted "
                "layers cannot be placed on top of it"
            )
        config = getattr(without_peft(self._model), "config", None)
        width = getattr(config, "hidden_size", None) or anatomy.hidden_size
        bias = getattr(crafted, "bias", None)
        dtype = bias.dtype if isinstance(bias, Tensor) else next(self._model.parameters()).dtype
        direction = direction_of(width, seed).to(torch.promote_types(dtype, torch.float32))
        self.inside = CraftedInside(crafted, direction, scale)
        self._masks = _Masks(anatomy)
        self._handle: RemovableHandle | None = None
        self._frozen: list[nn.Parameter] = []
        self.module: CraftedInside | EmbeddingModule = self.inside
        self._hooks = _Hooks(self.inside, self._masks, placement)
        if placement == "embedding":
            self._frozen = [p for p in self._model.parameters() if p.requires_grad]
            top = EmbeddingModule(self.inside, self._model, place, self._masks, classes, seed)
            for parameter in self._frozen:
                parameter.requires_grad_(False)
            self._model.forward = top.forward
            self.module = top
        elif place.side == "input":
            self._handle = place.module.register_forward_pre_hook(
                self._hooks.add_to_input, with_kwargs=True
            )
        else:
            hook = self._hooks.add_to_output
            self._handle = place.module.register_forward_hook(hook, with_kwargs=True)
        self.module.to(anatomy.device).train(self._model.training)
        self._name = CHILD_NAME
        while self._name in self._model._modules:
            self._name += "_"
        self._model.add_module(self._name, self.module)

    @property
    def direction(self) -> Tensor:
        """Return the unit vector w, (d,), along which the output is added."""
        return self.inside.direction

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the rungs, (K,), which are trained; None for crafted layers without."""
        bias = getattr(self.inside.crafted, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None

    def remove(self) -> None:
        """Remove the layers, so that the model is as before; a second call does nothing."""
        if self._model._modules.get(self._name) is not self.module:
            return
        del self._model._modules[self._name]
        self._masks.close()
        if self._handle is not None:
            self._handle.remove()
        if isinstance(self.module, EmbeddingModule):
            self.module.close()
            del self._model.forward
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def __enter__(self) -> Inserted:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Hooks:
    """The hooks of the sequential and the parallel placement.

    They are methods, so that a copy of the model has hooks of its own.
    """

    def __init__(self, inside: CraftedInside, masks: _Masks, placement: Placement) -> None:
        self.inside, self.masks, self.placement = inside, masks, placement

    def add_to_input(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, object]]:
        hidden = states_in(args, kwargs)
        return with_states_in(args, kwargs, self.inside(hidden, self.masks.matching(hidden)))

    def add_to_output(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        hidden, residual = states_in(args, kwargs), states_out(output)
        mask = self.masks.matching(hidden)
        read = hidden if self.placement == "parallel" else residual
        return with_states_out(output, self.inside(read, mask, residual))
