"""Errors for missing optional packages, with the command that installs them as an extra.

This module imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

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
