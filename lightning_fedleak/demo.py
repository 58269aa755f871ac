"""What was here is in :mod:`lightning_fedleak.finetuning`; these names stay for one release."""

from lightning_fedleak.finetuning import (
    EMBEDDED_MESSAGES,
    EMBEDDED_MODEL,
    CausalLMFineTuning,
    SourceError,
    TextDataModule,
    read_texts,
)

__all__ = [
    "EMBEDDED_MESSAGES",
    "EMBEDDED_MODEL",
    "CausalLMFineTuning",
    "SourceError",
    "TextDataModule",
    "read_texts",
]
