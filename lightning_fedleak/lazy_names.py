"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazy(
    package: str, homes: Mapping[str, Sequence[str]], root: str | None = None
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, which imports the module of a name.

    Args:
        package: the name of the package.
        homes: the names by their module.
        root: the package of the modules; by default ``package``.
    """

    def load(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(f"{root or package}.{home}"), name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return load
