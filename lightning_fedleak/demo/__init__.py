"""A small pretrained model, private messages, and fine-tuning of any causal language model."""

from lightning_fedleak.demo.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL, SourceError
from lightning_fedleak.demo.data import TextDataModule
from lightning_fedleak.demo.module import CausalLMFineTuning
from lightning_fedleak.demo.texts import read_texts

__all__ = [
    "EMBEDDED_MESSAGES",
    "EMBEDDED_MODEL",
    "CausalLMFineTuning",
    "SourceError",
    "TextDataModule",
    "read_texts",
]
