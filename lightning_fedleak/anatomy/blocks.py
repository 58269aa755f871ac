"""The transformer blocks of a model."""

from __future__ import annotations

from torch import nn

from lightning_fedleak.anatomy.named_layers import Named, given_module, outermost, path_in
from lightning_fedleak.anatomy.parts import AnatomyError
from lightning_fedleak.anatomy.wrappers import unwrap, walk


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model's configuration calls it an encoder-decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def side_of(model: nn.Module, side: str) -> nn.Module | None:
    """``"encoder"`` or ``"decoder"`` of an encoder-decoder model."""
    ask = getattr(model, f"get_{side}", None)
    try:
        answer = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        answer = None
    if isinstance(answer, nn.Module):
        return answer
    return next((m for n, m in walk(model) if n.rsplit(".", 1)[-1] == side), None)


def block_lists(model: nn.Module) -> list[Named]:
    """Lists of modules that have children of their own, with names; no list inside another.

    Of an ``nn.Sequential``, which may be anything, all members must be of one type.
    """
    lists: list[Named] = []
    for name, module in walk(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            blocks = [unwrap(b) for b in module]
            alike = isinstance(module, nn.ModuleList) or len({type(b) for b in blocks}) == 1
            if alike and all(any(True for _ in b.children()) for b in blocks):
                lists.append((name, module))
    return outermost(lists)


def find_blocks(
    root: nn.Module,
    model: nn.Module,
    name: str | None,
    decoder_only: bool,
    ends: tuple[nn.Module, nn.Module | None],
) -> list[Named]:
    """Transformer blocks with their names in ``root``: the list named, or the largest list.

    Looked for is first near the embedding, so that the blocks of an image encoder beside a language
    model are not taken for its own.

    Args:
        root: module that the names are relative to.
        model: where to look.
        name: path of the list if the user gave it.
        decoder_only: look in the decoder of an encoder-decoder.
        ends: embedding and head; a list that holds one of them is the whole model, not its blocks.

    Returns:
        Nothing where there is no such list, or several of one length side by side (XLM keeps
        attention and feed-forward layers apart), none of which holds whole blocks.

    Raises:
        AnatomyError: ``name`` is no list of modules.
    """
    chosen = given_module(root, model, name, "blocks")
    if chosen is None:
        decoder = side_of(model, "decoder") if decoder_only else None
        places = [decoder] if decoder is not None else _around(root, model, ends[0])
        chosen = next((c for p in places if (c := _largest_list(p, ends)) is not None), None)
    elif not isinstance(chosen, nn.ModuleList | nn.Sequential):
        raise AnatomyError(
            f"blocks='{name}' ({type(chosen).__name__}) is no list; name a ModuleList or "
            "Sequential that holds the transformer blocks."
        )
    return [] if chosen is None else _members(chosen, path_in(root, chosen, "blocks"))


def _around(root: nn.Module, model: nn.Module, embedding: nn.Module) -> list[nn.Module]:
    """Modules of ``model`` that hold the embedding, innermost first, and ``model``."""
    names = path_in(root, embedding, "embedding").split(".")
    holders = [root.get_submodule(".".join(names[:n])) for n in range(len(names) - 1, -1, -1)]
    inside = {id(m) for m in model.modules()}
    return [*(m for m in holders if id(m) in inside and m is not model), model]


def _largest_list(place: nn.Module, ends: tuple[nn.Module, nn.Module | None]) -> nn.Module | None:
    lists = [
        (name, module)
        for name, module in block_lists(place)
        if not any(m is end for end in ends for m in module.modules())
    ]
    if not lists:
        return None
    name, chosen = max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    beside = [
        m for n, m in lists if m is not chosen and n.rpartition(".")[0] == name.rpartition(".")[0]
    ]
    lengths = [len(list(m.children())) for m in beside]
    return None if len(list(chosen.children())) in lengths else chosen


def _members(blocks: nn.Module, prefix: str) -> list[Named]:
    """Members of a list by name, those of lists inside it in its place (Funnel)."""
    members: list[Named] = []
    for name, module in blocks.named_children():
        path = f"{prefix}.{name}" if prefix else name
        members += _members(module, path) if isinstance(module, nn.ModuleList) else [(path, module)]
    return members
