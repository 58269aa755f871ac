"""The command ``fedleak``, its studies, and helpers to fine-tune."""

from lightning_fedleak.cli.command_line import main as main
