"""How to install an extra of this package, as it was installed itself. Imports nothing heavy."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

NAME = "lightning-fedleak"


def install(extra: str) -> str:
    """The command that adds an extra.

    A package that came from a folder, an archive or a repository, and not from an index, has noted
    where from (PEP 610); the command names that place.

    Args:
        extra: of ``pyproject.toml``.
    """
    try:
        own = distribution(NAME)
    except PackageNotFoundError:  # run from its folder
        return f"pip install '.[{extra}]' in the folder that holds lightning_fedleak"
    noted = own.read_text("direct_url.json")
    if noted is None:
        return f"pip install '{NAME}[{extra}]'"
    origin = json.loads(noted)
    url = origin["url"]
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install '{NAME}[{extra}] @ {url}'"
