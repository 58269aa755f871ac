"""Fine-tuning and its data for the Trainer of ``lightning``."""

from __future__ import annotations

import lightning.pytorch as L

from lightning_fedleak.cli.finetuning.data import TextBatches
from lightning_fedleak.cli.finetuning.module import NextTokenTraining


class CausalLMFineTuning(NextTokenTraining, L.LightningModule):  # noqa: D101
    __doc__ = NextTokenTraining.__doc__


class TextDataModule(TextBatches, L.LightningDataModule):  # noqa: D101
    __doc__ = TextBatches.__doc__


__all__ = ["CausalLMFineTuning", "TextDataModule"]
