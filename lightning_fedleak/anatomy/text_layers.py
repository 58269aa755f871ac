"""Layers of hidden states by number, as in Hugging Face's ``hidden_states``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.anatomy.blocks import find_blocks, find_side, is_encoder_decoder
from lightning_fedleak.anatomy.named_layers import Named
from lightning_fedleak.anatomy.parts import Anatomy
from lightning_fedleak.anatomy.wrappers import unwrap, without_peft


@dataclass(frozen=True)
class Place:
    """The input or output of a block: the hidden states of a layer.

    Attributes:
        name: path of the block in ``anatomy.root``, with the suffix ``.input`` for layer 0.
        module: the block, without a torch.compile wrapper.
        side: ``"input"`` for layer 0, ``"output"`` for the others.
    """

    name: str
    module: nn.Module
    side: Literal["input", "output"]

    def change_states(self, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Replace the hidden states by what a function returns, until the handle is removed."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_states_in(args, kwargs, change(states_in(args, kwargs)))

        def behind(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            return with_states_out(output, change(states_out(output)))

        if self.side == "input":
            return self.module.register_forward_pre_hook(before, with_kwargs=True)
        return self.module.register_forward_hook(behind)


def text_blocks(anatomy: Anatomy) -> tuple[Named, ...]:
    """Return names in ``anatomy.root`` and modules of the blocks that read ``input_ids``, in order.

    They are ``anatomy.blocks``, but for an encoder-decoder the blocks of its encoder.
    """
    core = without_peft(anatomy.model)
    encoder = find_side(core, "encoder") if is_encoder_decoder(core) else None
    if encoder is None:
        return tuple(zip(anatomy.block_names, anatomy.blocks, strict=True))
    ends = (anatomy.embedding, anatomy.head)
    return tuple(find_blocks(anatomy.root, encoder, None, False, ends))


def place_of(anatomy: Anatomy, layer: int) -> Place:
    """Return the place of a layer's hidden states: 0 the input of block 1, k the output of block k.

    Raises:
        ValueError: the model has no blocks, or no such layer.
    """
    blocks = text_blocks(anatomy)
    if not blocks:
        raise ValueError(
            "no transformer blocks were found in the model, so that it has no layers to "
            "read; name them with anatomy={'blocks': 'path.to.blocks'}"
        )
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= len(blocks):
        raise ValueError(
            f"layer={layer!r} is out of range: the model has {len(blocks)} blocks, so 0 to "
            f"{len(blocks)}"
        )
    name, module = blocks[max(0, layer - 1)]
    if layer == 0:
        return Place(f"{name}.input", unwrap(module), "input")
    return Place(name, unwrap(module), "output")


def states_in(args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Return the hidden states among a block's arguments: the first, or ``hidden_states``."""
    return args[0] if args else kwargs.get("hidden_states")


def states_out(output: Any) -> Any:
    """Return the hidden states in a block's output: itself, or the first of a tuple."""
    return output[0] if isinstance(output, tuple | list) else output


def with_states_in(
    args: tuple[Any, ...], kwargs: dict[str, object], states: Tensor
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return a block's arguments with other hidden states."""
    if args:
        return (states, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": states}


def with_states_out(output: Any, states: Tensor) -> Any:
    """Return a block's output with other hidden states."""
    if isinstance(output, tuple | list):
        return type(output)([states, *output[1:]])
    return states
