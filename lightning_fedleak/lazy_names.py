"""Lazy imports: a package imports the module of a name when the name is first used (PEP 562).

The package lists its names as imports under ``if TYPE_CHECKING:``, which run only in type checkers,
and sets ``__getattr__ = lazy(__name__)``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import linecache
import sys
from collections.abc import Callable, Mapping


@functools.cache
def homes_of(package: str) -> Mapping[str, str]:
    """Return the module of each name that a package imports under ``if TYPE_CHECKING:``.

    The imports are found in the package's source, so that no second list of names is needed.

    Args:
        package: The name of the package, which must be in ``sys.modules``.
    """
    module = sys.modules[package]
    tree = ast.parse("".join(linecache.getlines(str(module.__file__), vars(module))))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy(package: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package, which imports the module of a requested name.

    Args:
        package: The name of the package, which imports its names under ``if TYPE_CHECKING:``.
    """
    homes = homes_of(package)

    def load(name: str) -> object:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        import difflib  # needed for errors only

        close = difflib.get_close_matches(name, homes, n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise AttributeError(f"module '{package}' has no attribute '{name}'{hint}")

    return load
