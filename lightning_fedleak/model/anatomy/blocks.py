"""The transformer blocks of a model, and its layers of hidden states.

Layers have numbers as in Hugging Face's ``hidden_states``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model.anatomy.named_layers import Named, outermost, path_in, resolve_module
from lightning_fedleak.model.anatomy.parts import Anatomy, AnatomyError
from lightning_fedleak.model.anatomy.wrappers import unwrap, walk, without_peft


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether the model's configuration calls it an encoder-decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def call_getter(model: nn.Module | None, getter: str) -> nn.Module | None:
    """Return the module that a getter such as ``get_decoder`` gives, None without one."""
    method = getattr(model, getter, None)
    try:
        part = method() if callable(method) else None
    except (NotImplementedError, AttributeError):
        return None
    return part if isinstance(part, nn.Module) else None


def find_side(model: nn.Module, side: str) -> nn.Module | None:
    """Return the ``encoder`` or ``decoder`` of an encoder-decoder, or None."""
    named = (m for n, m in walk(model) if n.rsplit(".", 1)[-1] == side)
    part = call_getter(model, f"get_{side}")
    return part if part is not None else next(named, None)


def block_lists(model: nn.Module) -> list[Named]:
    """Return the outermost lists of modules whose members have children, with their names.

    All members of an ``nn.Sequential``, which may be anything, must have one type.
    """
    lists: list[Named] = []
    for name, module in walk(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            blocks = [unwrap(b) for b in module]
            uniform = isinstance(module, nn.ModuleList) or len({type(b) for b in blocks}) == 1
            if uniform and all(any(True for _ in b.children()) for b in blocks):
                lists.append((name, module))
    return outermost(lists)


def find_blocks(
    root: nn.Module,
    model: nn.Module,
    name: str | None,
    decoder_only: bool,
    ends: tuple[nn.Module, nn.Module | None],
) -> list[Named]:
    """Return the transformer blocks with their names in ``root``: the named or the largest list.

    The search begins near the embedding, so that the blocks of an image encoder beside a language
    model are not confused with the model's.

    Args:
        root: module that the names are relative to.
        model: module that is searched.
        name: path of the list if the user named it.
        decoder_only: whether to search only the decoder of an encoder-decoder.
        ends: embedding and head; a list that holds one of them is the whole model, not its blocks.

    Returns:
        An empty list if there is no such list, or several of one length side by side (XLM has
        separate lists of attention and feed-forward layers), none of which holds whole blocks.

    Raises:
        AnatomyError: ``name`` is no list of modules.
    """
    blocks = resolve_module(root, model, name, "blocks")
    if blocks is None:
        decoder = find_side(model, "decoder") if decoder_only else None
        parts = [decoder] if decoder is not None else _holders(root, model, ends[0])
        blocks = next((c for p in parts if (c := _largest_list(p, ends)) is not None), None)
    elif not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise AnatomyError(
            f"blocks='{name}' ({type(blocks).__name__}) is no list; name a ModuleList or "
            "Sequential that holds the transformer blocks."
        )
    return [] if blocks is None else _members(blocks, path_in(root, blocks, "blocks"))


def _holders(root: nn.Module, model: nn.Module, embedding: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that hold the embedding, innermost first, and ``model``."""
    names = path_in(root, embedding, "embedding").split(".")
    holders = [root.get_submodule(".".join(names[:n])) for n in range(len(names) - 1, -1, -1)]
    model_ids = {id(m) for m in model.modules()}
    return [*(m for m in holders if id(m) in model_ids and m is not model), model]


def _largest_list(part: nn.Module, ends: tuple[nn.Module, nn.Module | None]) -> nn.Module | None:
    lists = [
        (name, module)
        for name, module in block_lists(part)
        if not any(m is end for end in ends for m in module.modules())
    ]
    if not lists:
        return None
    name, blocks = max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    siblings = [
        m for n, m in lists if m is not blocks and n.rpartition(".")[0] == name.rpartition(".")[0]
    ]
    lengths = [len(list(m.children())) for m in siblings]
    return None if len(list(blocks.children())) in lengths else blocks


def _members(blocks: nn.Module, prefix: str) -> list[Named]:
    """Return the members of a list by name, with the members of lists inside it (Funnel)."""
    members: list[Named] = []
    for name, module in blocks.named_children():
        path = f"{prefix}.{name}" if prefix else name
        members += _members(module, path) if isinstance(module, nn.ModuleList) else [(path, module)]
    return members


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

    def on_states(
        self,
        function: Callable[[Any], Tensor | None],
        *,
        first: bool = False,
        failed: Callable[[Exception], None] | None = None,
    ) -> RemovableHandle:
        """Call a function with the hidden states of every forward, until the handle is removed.

        Args:
            function: gets the states. What it returns replaces them; None leaves them.
            first: call it before the hooks that are there.
            failed: takes what is raised, and the states are left; None lets it end the forward.
        """

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                states = function(states_in(args, kwargs))
                return None if states is None else with_states_in(args, kwargs, states)
            except Exception as error:
                if failed is None:
                    raise
                return failed(error)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def behind(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            try:
                states = function(states_out(output))
                return None if states is None else with_states_out(output, states)
            except Exception as error:
                if failed is None:
                    raise
                return failed(error)

        if self.side == "input":
            return self.module.register_forward_pre_hook(before, prepend=first, with_kwargs=True)
        return self.module.register_forward_hook(behind, prepend=first)


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
        raise ValueError("no transformer blocks were found: name them, anatomy={'blocks': 'path'}")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= len(blocks):
        n = len(blocks)
        raise ValueError(f"layer={layer!r} is out of range: the model has {n} blocks, so 0 to {n}")
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
