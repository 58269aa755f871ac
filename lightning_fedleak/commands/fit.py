"""``fedleak fit``: LightningCLI over any causal language model and any text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_fedleak.attacks
import lightning_fedleak.callbacks
import lightning_fedleak.defenses
import lightning_fedleak.strategies  # noqa: F401  (all four: their names work in class_path)
from lightning_fedleak.finetuning.data import TextDataModule
from lightning_fedleak.finetuning.module import CausalLMFineTuning


class _FitCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.model", "data.tokenizer")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}


def fit(arguments: Sequence[str] | None = None) -> None:
    """Trains as the arguments and their ``--config`` files say.

    Args:
        arguments: ``["fit", ...]``, as LightningCLI takes them; None reads the command line.
    """
    _FitCLI(
        CausalLMFineTuning,
        TextDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "fedleak"},
        args=None if arguments is None else list(arguments),
    )
