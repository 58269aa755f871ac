"""The command that installs an extra of this package. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

NAME = "lightning-fedleak"


@contextmanager
def require_package(extra: str, what: str, error: type[Exception] = ImportError) -> Iterator[None]:
    """Raise an error if an import in the block fails: what needs it, and what installs it."""
    try:
        yield
    except ImportError as cause:
        raise error(f"{what}: {install(extra)}") from cause


def install(extra: str) -> str:
    """Return the command that adds an extra.

    A package that was installed from a folder, an archive or a repository records its origin
    (PEP 610), which the command then names.

    Args:
        extra: the name of the extra in ``pyproject.toml``.
    """
    try:
        package = distribution(NAME)
    except PackageNotFoundError:  # run from its folder
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
