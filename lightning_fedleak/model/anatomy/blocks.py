"""Find the transformer blocks of a model, and the places where its hidden states can be hooked.

The blocks are the entries of a ``ModuleList`` or ``Sequential``. Layers of hidden states have the
numbers of Hugging Face's ``hidden_states``: 0 is the input of the first block, k the output of
block k. A :class:`Place` is the input or output of one block.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model.anatomy.parts import (
    Anatomy,
    AnatomyError,
    find_path,
    leaf,
    matrix_shape,
    unwrap,
    walk,
    without_peft,
)
from lightning_fedleak.model.model_state import Hook
from lightning_fedleak.validate import check_integer

Named = tuple[str, nn.Module]  # a module with its path


def resolve_module(
    root: nn.Module, model: nn.Module | None, part: str | nn.Module | None, argument: str
) -> nn.Module | None:
    """Return the module that a user's argument names or is; None if the argument is None.

    Args:
        root: The module that the user passed.
        model: The language model in it, or None. Names may be paths in either of them.
        part: The argument's value.
        argument: The argument's name, for errors.

    Raises:
        AnatomyError: There is no such module.
    """
    if part is None:
        return None
    if isinstance(part, nn.Module):
        path_in(root, part, argument)
        return part
    for scope in (root, model):
        if scope is not None:
            try:
                return scope.get_submodule(part)
            except AttributeError:
                continue
    raise AnatomyError(
        f"{argument}='{part}' is no module of {type(root).__name__}; see named_modules"
    )


def find_layers(
    root: nn.Module, types: tuple[type[nn.Module], ...], exclude: Collection[int] = ()
) -> list[Named]:
    """Return the layers of these types, with their PEFT wrappers, in order of registration.

    Each layer is returned once. Modules whose ids are in ``exclude`` are omitted.
    """
    layers: dict[int, Named] = {}
    for name, module in walk(root):
        if isinstance(leaf(module), types):
            layers.setdefault(id(leaf(module)), (name, module))
    return [(n, m) for n, m in layers.values() if id(m) not in exclude]


def weight_shape(module: nn.Module, argument: str) -> tuple[int, int]:
    """Return rows and columns of the layer's weight matrix.

    Raises:
        AnatomyError: The layer has no matrix; the message names the user's ``argument``.
    """
    shape = matrix_shape(module)
    if shape is None:
        raise AnatomyError(
            f"{argument}= ({type(module).__name__}) has no weight matrix: name a layer with one"
        )
    return shape


def count_rows(module: nn.Module, argument: str = "part") -> int:
    """Return the number of rows of the layer's weight matrix: its tokens or classes."""
    return weight_shape(module, argument)[0]


def path_in(root: nn.Module, module: nn.Module, part: str) -> str:
    """Return the path of ``module`` in ``root``; ``part`` is the argument that an error names."""
    path = find_path(root, module)
    if path is None:
        raise AnatomyError(f"{part}= is not a module of this {type(root).__name__}")
    return path


def common_path(paths: Iterable[str]) -> list[str]:
    """Return the names with which all of these paths begin."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return [level[0] for level in takewhile(lambda level: len({*level}) == 1, levels)]


def missing_part_error(
    root: nn.Module, part: str, candidates: Sequence[Named], *arguments: str
) -> AnatomyError:
    """Return the error for a missing part; it lists up to 12 candidates and what to set."""
    names = ", ".join(f"'{name}' ({count_rows(layer)} rows)" for name, layer in candidates[:12])
    settings = ", ".join(f"'{a}': 'path.to.module'" for a in arguments)
    return AnatomyError(
        f"found no {part} in {type(root).__name__}; it has {names or 'nothing'}. Name it: "
        f"settings=WatchSettings(anatomy={{{settings}}})"
    )


def outermost(modules: list[Named]) -> list[Named]:
    """Return the modules that are not inside another module of the list."""
    nested = {id(m) for _, outer in modules for m in outer.modules() if m is not outer}
    return [(n, m) for n, m in modules if id(m) not in nested]


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether the model's configuration calls it an encoder-decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def call_getter(model: nn.Module | None, getter: str) -> nn.Module | None:
    """Return the module that a getter such as ``get_decoder`` returns; None if it has none."""
    method = getattr(model, getter, None)
    try:
        part = method() if callable(method) else None
    except (NotImplementedError, AttributeError):
        return None
    return part if isinstance(part, nn.Module) else None


def find_side(model: nn.Module, side: str) -> nn.Module | None:
    """Return the ``encoder`` or ``decoder`` of an encoder-decoder, or None."""
    matches = (m for n, m in walk(model) if n.rsplit(".", 1)[-1] == side)
    part = call_getter(model, f"get_{side}")
    return part if part is not None else next(matches, None)


def block_lists(model: nn.Module) -> list[Named]:
    """Return the outermost module lists that may be blocks, with their names.

    All members must have children. The members of an ``nn.Sequential``, which may hold any layers,
    must also have one type.
    """
    lists: list[Named] = []
    for name, module in walk(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            blocks = [unwrap(b) for b in module]
            may_be_blocks = isinstance(module, nn.ModuleList) or len({type(b) for b in blocks}) == 1
            if may_be_blocks and all(any(True for _ in b.children()) for b in blocks):
                lists.append((name, module))
    return outermost(lists)


def find_blocks(
    root: nn.Module,
    model: nn.Module,
    name: str | None,
    decoder_only: bool,
    ends: tuple[nn.Module, nn.Module | None],
) -> list[Named]:
    """Return the transformer blocks with their names in ``root``: the user's list or the largest.

    The search begins in the innermost module that holds the embedding, so that it does not find the
    blocks of an image encoder next to the language model.

    Args:
        root: module that the names are relative to.
        model: module that is searched.
        name: path of the list if the user named it.
        decoder_only: whether to search only the decoder of an encoder-decoder.
        ends: embedding and head. A list that holds one of them is the whole model, not its blocks.

    Returns:
        The blocks. Empty if there is no list, or if the largest list has a neighbour of equal
        length: XLM has separate lists of attention and feed-forward layers, and no whole blocks.

    Raises:
        AnatomyError: The user's ``name`` is not that of a list of modules.
    """
    blocks = resolve_module(root, model, name, "blocks")
    if blocks is None:
        decoder = find_side(model, "decoder") if decoder_only else None
        parts = [decoder] if decoder is not None else _holders(root, model, ends[0])
        blocks = next((c for p in parts if (c := _largest_list(p, ends)) is not None), None)
    elif not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise AnatomyError(f"blocks='{name}' is no ModuleList or Sequential of blocks")
    return [] if blocks is None else _members(blocks, path_in(root, blocks, "blocks"))


def _holders(root: nn.Module, model: nn.Module, embedding: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that hold the embedding, innermost first, and ``model``."""
    names = path_in(root, embedding, "embedding").split(".")
    holders = [root.get_submodule(".".join(names[:n])) for n in range(len(names) - 1, -1, -1)]
    model_ids = {id(m) for m in model.modules()}
    return [*(m for m in holders if id(m) in model_ids and m is not model), model]


def _largest_list(part: nn.Module, ends: tuple[nn.Module, nn.Module | None]) -> nn.Module | None:
    """Return the list with the most parameters; None if a neighbour of it has the same length."""
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
    """Return the members of a list with their paths, nested lists (Funnel) flattened."""
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
        side: ``"input"`` for layer 0, ``"output"`` for later layers.
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
            function: is called with the states. A tensor that it returns replaces them.
            first: whether to call it before the hooks that exist already.
            failed: is called with an exception of ``function``, and the states stay unchanged. If
                None, the exception ends the forward.
        """
        read: Callable[..., Any] = states_in if self.side == "input" else states_out
        write: Callable[..., Any] = with_states_in if self.side == "input" else with_states_out

        @Hook
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(_: nn.Module, args: tuple[Any, ...], *further: Any) -> Any:
            call_values = (args, *further) if self.side == "input" else further
            try:
                states = function(read(*call_values))
                return None if states is None else write(*call_values, states)
            except Exception as error:
                if failed is None:
                    raise
                return failed(error)

        if self.side == "input":
            return self.module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
        return self.module.register_forward_hook(hook, prepend=first)


def text_blocks(anatomy: Anatomy) -> tuple[Named, ...]:
    """Return names in ``anatomy.root`` and modules of the blocks that read ``input_ids``, in order.

    They are ``anatomy.blocks``, except in an encoder-decoder: there they are its encoder's blocks.
    """
    core = without_peft(anatomy.model)
    encoder = find_side(core, "encoder") if is_encoder_decoder(core) else None
    if encoder is None:
        return tuple(zip(anatomy.block_names, anatomy.blocks, strict=True))
    ends = (anatomy.embedding, anatomy.head)
    return tuple(find_blocks(anatomy.root, encoder, None, False, ends))


def place_of(anatomy: Anatomy, layer: int) -> Place:
    """Return the place of a layer's states: 0 is the input of block 1, k the output of block k.

    Raises:
        ValueError: The model has no blocks, or fewer than ``layer``.
    """
    blocks = text_blocks(anatomy)
    if not blocks:
        raise ValueError("no transformer blocks were found: name them, anatomy={'blocks': 'path'}")
    hint = f"the model has {len(blocks)} blocks"
    check_integer("layer", layer, at_least=0, at_most=len(blocks), hint=hint)
    name, module = blocks[max(0, layer - 1)]
    if layer == 0:
        return Place(f"{name}.input", unwrap(module), "input")
    return Place(name, unwrap(module), "output")


def states_in(args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Return the hidden states in a block's arguments: the first one, or ``hidden_states``."""
    return args[0] if args else kwargs.get("hidden_states")


def states_out(output: Any) -> Any:
    """Return the hidden states in a block's output: itself, or the first of a tuple."""
    return output[0] if isinstance(output, tuple | list) else output


def with_states_in(
    args: tuple[Any, ...], kwargs: dict[str, object], states: Tensor
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return a block's arguments with their hidden states replaced by ``states``."""
    if args:
        return (states, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": states}


def with_states_out(output: Any, states: Tensor) -> Any:
    """Return a block's output with its hidden states replaced by ``states``."""
    if isinstance(output, tuple | list):
        return type(output)([states, *output[1:]])
    return states


def last_states_in(output: Any) -> Any:
    """Return the last hidden states in the output of a backbone, (B, L, d)."""
    states = getattr(output, "last_hidden_state", output)
    return states[0] if isinstance(states, tuple) else states


def backbone_of(anatomy: Anatomy) -> nn.Module | None:
    """Return the module whose output is the head's input; None if there is none.

    It is the innermost module that holds the embedding and all blocks. The result is None if that
    module holds the head too, or cannot be called.
    """
    path = common_path([anatomy.embedding_name, *anatomy.block_names])
    module = anatomy.root.get_submodule(".".join(path))
    runs = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleDict)
    holds_head = any(part is anatomy.head for part in module.modules())
    return module if anatomy.blocks and runs and not holds_head else None
