"""Imports that may be absent or late: errors for missing optional packages, and lazy names.

This module imports the standard library only.

With :func:`lazy` a package imports the module of a name when it is first used (PEP 562). It lists
its names as imports under ``if TYPE_CHECKING:``, which run only in type checkers, and sets
``__getattr__ = lazy(__name__)``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


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


NAME = "lightning-fedleak"


@contextmanager
def require_package(extra: str, what: str, error: type[Exception] = ImportError) -> Iterator[None]:
    """Raise an error with an install command if an import in the block fails.

    Args:
        extra: The name of the extra in ``pyproject.toml`` that has the package.
        what: The feature that needs the package, for the message.
        error: The class of the error.

    Raises:
        ImportError: An import failed. It is of the class ``error``.
    """
    try:
        yield
    except ImportError as cause:
        raise error(f"{what}: {install(extra)}") from cause


def install(extra: str) -> str:
    """Return the pip command that installs an extra.

    If the package was installed from a folder, an archive or a repository, pip has recorded this
    origin (PEP 610), and the command names it.

    Args:
        extra: The name of the extra in ``pyproject.toml``.
    """
    try:
        package = distribution(NAME)
    except PackageNotFoundError:  # not installed: run from its source folder
        return f"pip install '.[{extra}]' in the folder that holds lightning_fedleak"
    record = package.read_text("direct_url.json")
    if record is None:
        return f"pip install '{NAME}[{extra}]'"
    origin = json.loads(record)
    url = origin["url"]
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install '{NAME}[{extra}] @ {url}'"
