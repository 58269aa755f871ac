"""The reader of ``fedleak``'s command line. Imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from lightning_fedleak.cli.commands import options
from lightning_fedleak.cli.finetuning.assets import SourceError, check_model_source
from lightning_fedleak.cli.finetuning.texts import check_text_source
from lightning_fedleak.cli.studies.names import check_defense


@dataclass(frozen=True)
class ReportOptions:
    """Write what runs showed: a page for people, JSON, an entry for a registry.

    Reads the log folders of runs (lightning_logs/version_0, fedleak_runs/...), and writes
    report.html, report.json and, where there was differential privacy, report.yaml.

    Attributes:
        runs: folder of logs.
        out: folder of the report (default: the first RUN's).
        about: facts that no log holds, in tables named as the registry's sections (default:
            report.toml in --out, where there is one).
        model_card: print a block of Markdown for a model card, and write nothing.
        reveal: local reveal files to put into the page: private text; the page gets mode 0600.
    """

    runs: Sequence[Path] = field(metadata={"metavar": "RUN"})
    out: Path | None = field(default=None, metadata={"metavar": "DIR"})
    about: Path | None = field(default=None, metadata={"metavar": "TOML"})
    model_card: bool = False
    reveal: Sequence[Path] = field(default=(), metadata={"metavar": "FILE"})


@dataclass(frozen=True)
class CompareOptions:
    """Print what changed between two runs.

    Prints utility, leakage with 95% intervals, and epsilon of two runs side by side.

    Attributes:
        before: log folder of the first run.
        after: log folder of the second.
    """

    before: Path = field(metadata={"metavar": "RUN_A"})
    after: Path = field(metadata={"metavar": "RUN_B"})


@dataclass(frozen=True)
class FitOptions:
    """Fine-tune any causal language model on any text, configured by LightningCLI.

    --recipe NAME appends a ready-made config: monitors, gates, defences (once for each).
    """


_COMMANDS: dict[str, type] = {
    "demo": options.DemoOptions,
    "game": options.GameOptions,
    "invert": options.InvertOptions,
    "plan": options.PlanOptions,
    "memorization": options.MemorizationOptions,
    "inspect": options.InspectOptions,
    "federate": options.FederateOptions,
    "sweep": options.SweepOptions,
    "report": ReportOptions,
    "compare": CompareOptions,
    "fit": FitOptions,
}


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
            message += _nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def _nearest(word: str, names: Iterable[str]) -> str:
    spelled = {name.lstrip("-"): name for name in names}
    close = difflib.get_close_matches(word.lstrip("-"), spelled, n=1)
    return f" (did you mean {spelled[close[0]]}?)" if close else ""


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
        known = [name for action in command._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
        phrases = ", ".join(name + _nearest(name, known) for name in names)
        command.error(f"no such option{'s' * (len(names) > 1)}: {phrases}")
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
    check_model_source(getattr(namespace, "model", None))
    check_model_source(getattr(namespace, "base", None))
    texts = ("members", "others") if hasattr(namespace, "others") else ("text",)
    for name, column_name in (*((text, "column") for text in texts), ("public", "public_column")):
        source, column = getattr(namespace, name, None), getattr(namespace, column_name, None)
        option = f"--{column_name.replace('_', '-')}"
        if name == "public" and source == "sampled":  # by the model itself
            continue
        if source is not None:
            check_text_source(source, column, option=option)
        elif column is not None:
            raise SourceError(f"{option} names a column of --{name}: give that too")


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the reader of the command line, and that of each subcommand by its name."""
    fedleak = _Parser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client give away.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    listed = ",".join(_COMMANDS)
    commands = fedleak.add_subparsers(required=True, dest="command", metavar=f"{{{listed}}}")
    for command_name, kind in _COMMANDS.items():
        brief, description, helps = _documentation(kind)
        command = commands.add_parser(
            command_name, help=brief, description=description, formatter_class=_Help
        )
        hints = get_type_hints(kind)
        for option in fields(kind):
            arguments = _arguments(option, hints[option.name])
            name = option.name
            if option.default is not MISSING:
                arguments["dest"] = name
                name = f"--{name.rstrip('_').replace('_', '-')}"  # from_, as Python has a 'from'
            command.add_argument(name, help=helps.get(option.name), **arguments)
    return fedleak, commands.choices


def _documentation(kind: type) -> tuple[str, str, Mapping[str, str]]:
    """Return what the help says of a command in a line and at length, and of each of its options.

    All of it is the docstring of the command's settings.
    """
    text, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    brief, _, description = text.partition("\n\n")
    _, *entries = re.split(r"^    (\w+): ", attributes, flags=re.MULTILINE)
    sentences = (" ".join(entry.split()).removesuffix(".") for entry in entries[1::2])
    helps = (sentence.format_map(options.PHRASES).replace("%", "%%") for sentence in sentences)
    brief = (brief[:1].lower() + brief[1:]).removesuffix(".")
    return brief, description, dict(zip(entries[::2], helps, strict=True))


def _arguments(option: Field[Any], hint: object) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that a field's default, type and metadata say."""
    if isinstance(option.default, bool):
        action = argparse.BooleanOptionalAction if option.default else "store_true"
        return {"default": option.default, "action": action, **option.metadata}
    arguments: dict[str, Any] = {}
    if option.default is not MISSING:
        default = option.default
        arguments["default"] = list(default) if isinstance(default, tuple) else default
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal and "type" not in option.metadata:
            arguments["choices"] = get_args(kind)
        elif get_origin(kind) is Sequence:
            arguments["nargs"] = "+"
        elif kind is Path:
            arguments["type"] = Path
    return {**arguments, **option.metadata}
