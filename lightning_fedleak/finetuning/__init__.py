"""A small pretrained model, private messages, and fine-tuning of any causal language model.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL, SourceError
    from lightning_fedleak.finetuning.lightning import CausalLMFineTuning, TextDataModule
    from lightning_fedleak.finetuning.texts import read_texts

_HOMES = {
    "assets": ("EMBEDDED_MESSAGES", "EMBEDDED_MODEL", "SourceError"),
    "lightning": ("CausalLMFineTuning", "TextDataModule"),
    "texts": ("read_texts",),
}

__all__ = [
    "EMBEDDED_MESSAGES",
    "EMBEDDED_MODEL",
    "CausalLMFineTuning",
    "SourceError",
    "TextDataModule",
    "read_texts",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
