"""The reader of ``fedleak``'s command line. Imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from lightning_fedleak.cli.commands import log_options, options

_COMMANDS = (
    *(options.demo, options.game, options.invert, options.plan, options.memorization),
    options.records,
    *(options.federate, options.sweep, log_options.report, log_options.compare),
    *(log_options.verify, log_options.sign, options.fit),
)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Print the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Reports in one line what was wrong."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ``command`` is the subcommand's name.

    An error ends the program with status 2.

    Args:
        arguments: without the program's name.
    """
    return parsers()[0].parse_args(arguments)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the reader of the command line, and that of each subcommand by its name."""
    fedleak = _Parser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client give away.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    names = ",".join(add_options.__name__ for add_options in _COMMANDS)
    commands = fedleak.add_subparsers(required=True, dest="command", metavar=f"{{{names}}}")
    for add_options in _COMMANDS:
        brief, description, helps = _documentation(add_options)
        command = commands.add_parser(
            add_options.__name__, help=brief, description=description, formatter_class=_Help
        )

        def add(name: str, **arguments: Any) -> None:
            key = re.sub(r"\W", "_", name.lstrip("-"))
            command.add_argument(name, help=helps[key], **arguments)  # noqa: B023  (called here)

        add_options(add)
    return fedleak, commands.choices


def _documentation(add_options: Callable[[options.Add], None]) -> tuple[str, str, dict[str, str]]:
    """Return what the help says of a command in a line and at length, and of each of its options.

    All of it is the docstring of the function that adds the options.
    """
    text, _, entries = (inspect.getdoc(add_options) or "").partition("\n\nOptions:\n")
    brief, _, description = text.partition("\n\n")
    _, *parts = re.split(r"^    (\w+): ", entries, flags=re.MULTILINE)
    sentences = (" ".join(part.split()).removesuffix(".") for part in parts[1::2])
    helps = (sentence.format_map(options.PHRASES).replace("%", "%%") for sentence in sentences)
    brief = (brief[:1].lower() + brief[1:]).removesuffix(".")
    return brief, description, dict(zip(parts[::2], helps, strict=True))
