"""A small pretrained model, private messages, and fine-tuning of any causal language model."""

from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL, SourceError
from lightning_fedleak.finetuning.data import TextDataModule
from lightning_fedleak.finetuning.module import CausalLMFineTuning
from lightning_fedleak.finetuning.texts import read_texts

__all__ = [
    "EMBEDDED_MESSAGES",
    "EMBEDDED_MODEL",
    "CausalLMFineTuning",
    "SourceError",
    "TextDataModule",
    "read_texts",
]
