"""``fedleak fit``: LightningCLI for any causal language model and any text."""

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

_MAX_MESSAGE = 300  # characters of an error of LightningCLI that are shown; the rest lists types
_HELP = "'fedleak fit --print_config' shows all settings, '--trainer.callbacks.help CLASS' of one"


class _FitCLI(LightningCLI):
    """LightningCLI with the single subcommand ``fit``, and with short errors."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the data the tokenizer of the model."""
        parser.link_arguments("model.model", "data.tokenizer")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and shorten the error for arguments that LightningCLI refuses."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            message = " ".join(str(error).replace("Parser key ", "").split())
            message = message[max(0, message.find("Problem with given class_path")) :]
            message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} ..."
            raise SourceError(f"{message}. {_HELP}.") from error

    def instantiate_classes(self) -> None:
        """Build model, data and Trainer; of an error, keep only what the class itself reported.

        LightningCLI would also list all other types that it tried for the argument.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            # The errors of all types that were tried are a list with "- "; the first is kept.
            match = re.search(r"Errors:\s+- (.*?)\n\s*- ", str(error), re.DOTALL)
            if not match:
                raise
            raise SourceError(f"{' '.join(match[1].split())}. {_HELP}.") from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the name of the subcommand, with the arguments that its classes provide."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}


def fit(arguments: Sequence[str] | None = None) -> None:
    """Train with the settings in the arguments and in their ``--config`` files.

    Args:
        arguments: ``["fit", ...]``, as LightningCLI takes them; None reads the command line.

    Raises:
        SourceError: A model or text cannot be used, or a setting does not exist.
    """
    _FitCLI(
        CausalLMFineTuning,
        TextDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "fedleak", "exit_on_error": False, "fit": {"exit_on_error": False}},
        args=None if arguments is None else list(arguments),
    )
