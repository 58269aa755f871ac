"""Arguments of a face by name, the rare ones grouped."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_fedleak.engine import WatchSettings

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""Arguments of a Trainer that writes and prints nothing."""


def grouped(
    arguments: Mapping[str, Any], kind: type[WatchSettings] = WatchSettings, **defaults: Any
) -> dict[str, Any]:
    """Return the arguments of a face, with the rare ones among them in its ``settings``."""
    given = {**defaults, **arguments}
    names = {one.name for one in fields(kind)} & given.keys()
    settings = kind(**{name: given.pop(name) for name in names})
    return {**given, "settings": settings}
