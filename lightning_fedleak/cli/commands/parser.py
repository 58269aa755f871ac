"""The reader of ``fedleak``'s command line. Imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from lightning_fedleak.cli.commands import options
from lightning_fedleak.cli.finetuning.assets import SourceError, check_model_source
from lightning_fedleak.cli.finetuning.texts import check_text_source
from lightning_fedleak.cli.studies.names import check_defense, did_you_mean

_COMMANDS = (
    *(options.demo, options.game, options.invert, options.plan, options.memorization),
    *(options.inspect, options.federate, options.sweep, options.report, options.compare),
    options.fit,
)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Print the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Reports in one line what was wrong and the nearest name."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong is not None:
            message += did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ``command`` is the subcommand's name.

    An error ends the program with status 2; all options that do not exist are reported at once.

    Args:
        arguments: without the program's name.
    """
    fedleak, commands = parsers()
    namespace, unknown = fedleak.parse_known_args(arguments)
    if unknown:
        command = commands[namespace.command]
        names = [name for action in command._actions for name in action.option_strings]
        words = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
        phrases = ", ".join(word + did_you_mean(word, names) for word in words)
        command.error(f"no such option{'s' * (len(words) > 1)}: {phrases}")
    return namespace


def check_sources(namespace: argparse.Namespace) -> None:
    """Raise an error for missing defences, models and texts.

    Args:
        namespace: as :func:`parse` returns it.

    Raises:
        SourceError: what is wrong with which of them.
    """
    defenses = getattr(namespace, "defense", None) or ()
    for defense in (defenses,) if isinstance(defenses, str) else defenses:
        check_defense(defense)
    for name in ("model", "base"):
        check_model_source(getattr(namespace, name, None))
    column = getattr(namespace, "column", None)
    for name in ("text", "members", "others"):
        if (source := getattr(namespace, name, None)) is not None and isinstance(source, str):
            check_text_source(source, column, option="--column")
    if getattr(namespace, "text", "") is None and column is not None:
        raise SourceError("--column names a column of --text: give that too")
    public = getattr(namespace, "public", None)
    if public not in (None, "sampled"):
        check_text_source(public)


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
            key = name.lstrip("-").replace("-", "_")
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
