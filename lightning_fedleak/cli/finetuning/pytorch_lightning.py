"""Fine-tuning and its data for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

import pytorch_lightning as pl

from lightning_fedleak.cli.finetuning.data import TextBatches
from lightning_fedleak.cli.finetuning.module import NextTokenTraining


class CausalLMFineTuning(NextTokenTraining, pl.LightningModule):  # type: ignore[misc]  # noqa: D101
    __doc__ = NextTokenTraining.__doc__


class TextDataModule(TextBatches, pl.LightningDataModule):  # type: ignore[misc]  # noqa: D101
    __doc__ = TextBatches.__doc__


__all__ = ["CausalLMFineTuning", "TextDataModule"]
