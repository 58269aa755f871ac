"""Layers of a module by name and by type, and the errors that list them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_fedleak.anatomy.parts import AnatomyError
from lightning_fedleak.anatomy.wrappers import leaf, matrix_shape, path_of, walk

Named = tuple[str, nn.Module]


def given_module(
    root: nn.Module, model: nn.Module | None, part: str | nn.Module | None, argument: str
) -> nn.Module | None:
    """The module that the user named or gave; None where the argument is None."""
    if part is None:
        return None
    if isinstance(part, nn.Module):
        if path_of(root, part) is None:
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
        + f". Its modules are: {listed(names)}."
    )


def layers_of(root: nn.Module, types: tuple[type[nn.Module], ...]) -> list[Named]:
    """Layers of these types in use, in order of registration, each once, PEFT layers whole."""
    seen: set[int] = set()
    layers: list[Named] = []
    for name, module in walk(root):
        layer = leaf(module)
        if isinstance(layer, types) and id(layer) not in seen:
            seen.add(id(layer))
            layers.append((name, module))
    return layers


def listed_layers(
    root: nn.Module, types: tuple[type[nn.Module], ...], outside: Iterable[int] = ()
) -> list[str]:
    """For an error: layers of these types, but for those whose ids are ``outside``."""
    skip = set(outside)
    return [
        f"'{n}' ({type(leaf(m)).__name__}, {rows_of(m)} rows)"
        for n, m in layers_of(root, types)
        if id(m) not in skip
    ]


def shape_of(module: nn.Module, argument: str) -> tuple[int, int]:
    """Rows and columns of the layer's weight matrix.

    Raises:
        AnatomyError: it has none; the user's ``argument`` is named.
    """
    shape = matrix_shape(module)
    if shape is None:
        raise AnatomyError(
            f"{argument}= ({type(module).__name__}) has no weight matrix; name a layer with "
            f"one: {argument}='path.to.layer'."
        )
    return shape


def rows_of(module: nn.Module, argument: str = "part") -> int:
    """Rows of the layer's weight matrix: words of an embedding or a head."""
    return shape_of(module, argument)[0]


def path_in(root: nn.Module, module: nn.Module, part: str) -> str:
    """Where ``module`` hangs in ``root``.

    Raises:
        AnatomyError: nowhere; ``part`` says what was looked for.
    """
    path = path_of(root, module)
    if path is None:
        raise AnatomyError(f"the {part} ({type(module).__name__}) is not inside the module given.")
    return path


def missing_part(
    root: nn.Module, part: str, looked_for: str, found: list[str], *arguments: str
) -> AnatomyError:
    """The error for a part that was not found: what was, and which arguments name one."""
    named = ", ".join(f"{a}='path.to.module'" for a in arguments)
    return AnatomyError(
        f"found no {part} in {type(root).__name__}. Looked for: {looked_for}. "
        f"Found: {listed(found)}. Name it: find_anatomy(module, {named}), or give the module "
        "itself."
    )


def listed(items: list[str], most: int = 12) -> str:
    """The first items for an error's text, and how many more there are."""
    if not items:
        return "nothing"
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def outermost(modules: list[Named]) -> list[Named]:
    """Those that are not inside another of them."""
    inside = {id(m) for _, outer in modules for m in outer.modules() if m is not outer}
    return [(n, m) for n, m in modules if id(m) not in inside]
