"""Layers of a module by name and by type, and the errors that list them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from lightning_fedleak.model.anatomy.parts import AnatomyError
from lightning_fedleak.model.anatomy.wrappers import find_path, leaf, matrix_shape, walk

Named = tuple[str, nn.Module]


def resolve_module(
    root: nn.Module, model: nn.Module | None, part: str | nn.Module | None, argument: str
) -> nn.Module | None:
    """Return the module that an argument names or is; None if the argument is None."""
    if part is None:
        return None
    if isinstance(part, nn.Module):
        if find_path(root, part) is None:
            raise AnatomyError(
                f"{argument}= ({type(part).__name__}) is no part of {type(root).__name__}; give a "
                "module inside it, or its name."
            )
        return part
    for place in (root, model):
        if place is not None:
            try:
                return place.get_submodule(part)
            except AttributeError:
                continue
    names = [n for n, _ in walk(root) if n.count(".") < 3 and n]
    raise AnatomyError(
        f"{argument}='{part}' is no module of {type(root).__name__}"
        + ("" if model is None or model is root else f" or of {type(model).__name__} inside it")
        + f". Its modules are: {join_names(names)}."
    )


def find_layers(
    root: nn.Module, types: tuple[type[nn.Module], ...], exclude: Collection[int] = ()
) -> list[Named]:
    """Return the layers of these types in use, in order of registration, with PEFT wrappers.

    Modules whose ids are in ``exclude`` are left out.
    """
    layers: dict[int, Named] = {}
    for name, module in walk(root):
        if isinstance(leaf(module), types):
            layers.setdefault(id(leaf(module)), (name, module))
    return [(n, m) for n, m in layers.values() if id(m) not in exclude]


def describe_layers(layers: Iterable[Named]) -> list[str]:
    """Return layers in words, for an error."""
    return [f"'{n}' ({type(leaf(m)).__name__}, {count_rows(m)} rows)" for n, m in layers]


def weight_shape(module: nn.Module, argument: str) -> tuple[int, int]:
    """Return rows and columns of the layer's weight matrix.

    Raises:
        AnatomyError: it has none; the message names the user's ``argument``.
    """
    shape = matrix_shape(module)
    if shape is None:
        raise AnatomyError(
            f"{argument}= ({type(module).__name__}) has no weight matrix; name a layer with "
            f"one: {argument}='path.to.layer'."
        )
    return shape


def count_rows(module: nn.Module, argument: str = "part") -> int:
    """Return the rows of the layer's weight matrix: the words of an embedding or a head."""
    return weight_shape(module, argument)[0]


def path_in(root: nn.Module, module: nn.Module, part: str) -> str:
    """Return the path of ``module``, a ``part`` of the model, in ``root``."""
    path = find_path(root, module)
    if path is None:
        raise AnatomyError(f"{part}= is not a module of this {type(root).__name__}")
    return path


def missing_part_error(
    root: nn.Module, part: str, candidates: list[str], *arguments: str
) -> AnatomyError:
    """Return the error for a missing part, with candidates and the arguments that name one."""
    settings = ", ".join(f"{a}='path.to.module'" for a in arguments)
    return AnatomyError(
        f"found no {part} in {type(root).__name__}; it has {join_names(candidates)}. Name it: "
        f"find_anatomy(module, {settings}), or pass the module itself."
    )


def join_names(items: list[str], most: int = 12) -> str:
    """Return the first items, and how many more there are, for the text of an error."""
    if not items:
        return "nothing"
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def outermost(modules: list[Named]) -> list[Named]:
    """Return the modules that are not inside another one of them."""
    nested = {id(m) for _, outer in modules for m in outer.modules() if m is not outer}
    return [(n, m) for n, m in modules if id(m) not in nested]
