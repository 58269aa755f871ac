"""A small pretrained model, private messages, and fine-tuning of any causal language model.

The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fedleak.finetuning.assets import (
        EMBEDDED_MESSAGES,
        EMBEDDED_MODEL,
        TRAINING,
        SourceError,
        quiet_logs,
    )
    from lightning_fedleak.finetuning.data import PadRight, TokenRows, load_tokenizer
    from lightning_fedleak.finetuning.lightning import CausalLMFineTuning, TextDataModule
    from lightning_fedleak.finetuning.module import load_model
    from lightning_fedleak.finetuning.texts import read_labelled, read_texts

_HOMES = {
    "assets": ("EMBEDDED_MESSAGES", "EMBEDDED_MODEL", "TRAINING", "SourceError", "quiet_logs"),
    "data": ("PadRight", "TokenRows", "load_tokenizer"),
    "lightning": ("CausalLMFineTuning", "TextDataModule"),
    "module": ("load_model",),
    "texts": ("read_labelled", "read_texts"),
}

__all__ = [
    "EMBEDDED_MESSAGES",
    "EMBEDDED_MODEL",
    "TRAINING",
    "CausalLMFineTuning",
    "PadRight",
    "SourceError",
    "TextDataModule",
    "TokenRows",
    "load_model",
    "load_tokenizer",
    "quiet_logs",
    "read_labelled",
    "read_texts",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
