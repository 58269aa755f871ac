"""The transformer blocks of a model."""

from __future__ import annotations

from torch import nn

from lightning_fedleak.anatomy.layers import Named, given_module, outermost, path_in
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


def block_lists(model: nn.Module) -> list[nn.Module]:
    """Lists of modules that have children of their own; no list inside another.

    Of an ``nn.Sequential``, which may be anything, all members must be of one type.
    """
    lists: list[Named] = []
    for name, module in walk(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            blocks = [unwrap(b) for b in module]
            alike = isinstance(module, nn.ModuleList) or len({type(b) for b in blocks}) == 1
            if alike and all(any(True for _ in b.children()) for b in blocks):
                lists.append((name, module))
    return [m for _, m in outermost(lists)]


def find_blocks(
    root: nn.Module,
    model: nn.Module,
    name: str | None,
    decoder_only: bool,
    ends: tuple[nn.Module, nn.Module | None],
) -> list[Named]:
    """Transformer blocks with their names in ``root``: the largest list, or the one named.

    Args:
        root: module that the names are relative to.
        model: where to look.
        name: path of the list if the user gave it.
        decoder_only: look in the decoder of an encoder-decoder.
        ends: embedding and head; a list that holds one of them is the whole model, not its blocks.

    Raises:
        AnatomyError: ``name`` is no list of modules.
    """
    chosen = given_module(root, model, name, "blocks")
    if chosen is None:
        decoder = side_of(model, "decoder") if decoder_only else None
        lists = [
            module
            for module in block_lists(model if decoder is None else decoder)
            if not any(m is end for end in ends for m in module.modules())
        ]
        if not lists:
            return []
        chosen = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    elif not isinstance(chosen, nn.ModuleList | nn.Sequential):
        raise AnatomyError(
            f"blocks='{name}' ({type(chosen).__name__}) is no list; name a ModuleList or "
            "Sequential that holds the transformer blocks."
        )
    prefix = path_in(root, chosen, "blocks")
    return [(f"{prefix}.{n}" if prefix else n, m) for n, m in chosen.named_children()]
