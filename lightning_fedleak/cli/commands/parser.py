"""The parser of ``fedleak``'s command line. It imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from lightning_fedleak.cli.commands import options

_COMMANDS = (
    *(options.demo, options.fit, options.plan, options.memorization, options.synthetic),
    *(options.records, options.invert, options.report, options.compare, options.verify),
)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; ``command`` holds the name of the subcommand.

    An error in the command line ends the program with status 2.

    Args:
        arguments: The words of the command line, without the program's name.
    """
    return parsers()[0].parse_args(arguments)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of the subcommands by their names."""
    fedleak = _Parser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client reveal.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    names = ",".join(add_options.__name__ for add_options in _COMMANDS)
    commands = fedleak.add_subparsers(required=True, dest="command", metavar=f"{{{names}}}")
    for add_options in _COMMANDS:
        summary, description, helps = _parse_docstring(add_options)
        command = commands.add_parser(
            add_options.__name__, help=summary, description=description, formatter_class=_Help
        )

        def add(name: str, **arguments: Any) -> None:
            key = re.sub(r"\W", "_", name.lstrip("-"))
            command.add_argument(name, help=helps[key], **arguments)  # noqa: B023  (called here)

        add_options(add)
    return fedleak, commands.choices


def _parse_docstring(add_options: Callable[[options.Add], None]) -> tuple[str, str, dict[str, str]]:
    """Return the summary and the description of a command, and the help of each of its options.

    All three are parsed from the docstring of the function that adds the options.
    """
    text, _, options_text = (inspect.getdoc(add_options) or "").partition("\n\nOptions:\n")
    summary, _, description = text.partition("\n\n")
    _, *fields = re.split(r"^    (\w+): ", options_text, flags=re.MULTILINE)
    names, entries = fields[::2], fields[1::2]
    sentences = (" ".join(entry.split()).removesuffix(".") for entry in entries)
    helps = (sentence.format_map(options.PHRASES).replace("%", "%%") for sentence in sentences)
    summary = (summary[:1].lower() + summary[1:]).removesuffix(".")
    return summary, description, dict(zip(names, helps, strict=True))
