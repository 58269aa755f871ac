"""``fedleak fit``: LightningCLI over any causal language model and any text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_fedleak.attacks
import lightning_fedleak.callbacks
import lightning_fedleak.defenses
import lightning_fedleak.strategies  # noqa: F401  (all four: their names work in class_path)
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, SourceError, TextDataModule

_LONGEST = 300  # characters of a message of LightningCLI that are shown
_HELP = "'fedleak fit --print_config' shows all settings, '--trainer.callbacks.help CLASS' of one"


class _FitCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.model", "data.tokenizer")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Report in short what LightningCLI cannot take."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            message = " ".join(str(error).replace("Parser key ", "").split())
            message = message[max(0, message.find("Problem with given class_path")) :]
            message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
            raise SourceError(f"{message}. {_HELP}.") from error

    def instantiate_classes(self) -> None:
        """Report a class's own error, without the other types that LightningCLI would list."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            first = re.search(r"Errors:\s+- (.*?)\n\s*- ", str(error), re.DOTALL)
            if not first:
                raise
            raise SourceError(f"{' '.join(first[1].split())}. {_HELP}.") from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}


def fit(arguments: Sequence[str] | None = None) -> None:
    """Train as the arguments and their ``--config`` files say.

    Args:
        arguments: ``["fit", ...]``, as LightningCLI takes them; None reads the command line.

    Raises:
        SourceError: a model or text cannot be used, or a setting does not exist.
    """
    _FitCLI(
        CausalLMFineTuning,
        TextDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "fedleak", "exit_on_error": False, "fit": {"exit_on_error": False}},
        args=None if arguments is None else list(arguments),
    )
