"""The reader of ``fedleak``'s command line. Imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from lightning_fedleak.commands.options import (
    CapacityOptions,
    DemoOptions,
    FederateOptions,
    GameOptions,
    InvertOptions,
    MemorizationOptions,
    SweepOptions,
)

_COMMANDS: dict[str, tuple[type, str, str]] = {
    "demo": (
        DemoOptions,
        "fine-tune a small model on private messages and watch them leak",
        "Fine-tunes a language model on private text twice: once watched, once with a gate that "
        "stops it. A model and texts are included; use your own with --model and --text.",
    ),
    "game": (
        GameOptions,
        "ask, as a dishonest server, whether a text is in a client's batch",
        "Plays the security game of active membership inference (Vu et al. 2024): a client's batch "
        "is drawn from a text, and a server that has added layers of its own to the model guesses "
        "from their gradient whether a target is in it. A server that adds none reads the gradient "
        "of what the client trains (--attack gradient). A model and texts are included; use your "
        "own with --model and --text.",
    ),
    "invert": (
        InvertOptions,
        "read, as the server, a client's texts from the hidden states or gradients that it sends",
        "Runs a model's bottom on texts, adds Gaussian noise to the hidden states at the split as "
        "a client might before it sends them, and reads the texts back (Zheng 2023), beside what "
        "the noise costs the model. With --from gradients the client sends the gradient of a batch "
        "of texts instead, of the whole model or of a LoRA, and nothing else. A model and texts "
        "are included; use your own with --model and --text.",
    ),
    "capacity": (
        CapacityOptions,
        "how many distinct tokens an update can give away, before any training",
        "Counts the rows of an update that name the tokens of a batch (a LoRA's, or the whole "
        "first block's), and finds by attack the smallest batch that is not read exactly. It is "
        "no promise that a larger one is safe. A model and texts are included; use your own with "
        "--model and --text.",
    ),
    "memorization": (
        MemorizationOptions,
        "what a trained model gives away of its training texts, before it is released",
        "Asks the trained model and its base about texts that were trained on and texts that were "
        "not, and shows how far they can be told apart and which of them the model would write. "
        "Each text costs two forwards; nothing is generated.",
    ),
    "federate": (
        FederateOptions,
        "train a federation, and see what each client's update and their sum leak",
        "Deals texts to clients, who train a language model for some rounds. Each update is "
        "attacked before it leaves; a gate may hold it back, and client-level differential "
        "privacy clip it and add noise. Shows utility, leakage of each client and of the sum, and "
        "epsilon, round by round. A model and texts are included; use your own with --model and "
        "--text.",
    ),
    "sweep": (
        SweepOptions,
        "train under a grid of defences: what each costs and what still leaks",
        "Fine-tunes a language model once for each defence and strength, with the same data, order "
        "and seed, and attacks every run as it trains. Writes a table, JSON and a plot of utility "
        "against leakage. It continues where it was interrupted.",
    ),
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Print the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default == ""
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
        options = [name for action in command._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
        phrases = ", ".join(name + _nearest(name, options) for name in names)
        command.error(f"no such option{'s' * (len(names) > 1)}: {phrases}")
    return namespace


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the reader of the command line, and that of each subcommand by its name."""
    fedleak = _Parser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client give away.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    commands = fedleak.add_subparsers(
        required=True,
        dest="command",
        metavar="{demo,game,invert,capacity,memorization,federate,sweep,report,compare,recipes,completion,fit}",
    )
    for name, (options, brief, description) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=brief,
            description=description,
            formatter_class=_Help,
        )
        hints = get_type_hints(options)
        for option in fields(options):
            default = option.default
            settings = {"default": list(default) if isinstance(default, tuple) else default}
            literals = [
                kind
                for kind in (hints[option.name], *get_args(hints[option.name]))
                if get_origin(kind) is Literal
            ]
            if literals and "type" not in option.metadata:
                settings["choices"] = get_args(literals[0])
            spelled = option.name.rstrip("_").replace("_", "-")  # from_, as Python has a 'from'
            command.add_argument(
                f"--{spelled}", dest=option.name, **{**settings, **option.metadata}
            )
    report = commands.add_parser(
        "report",
        help="write what runs showed: a page for people, JSON, an entry for a registry",
        description="Reads the log folders of runs (lightning_logs/version_0, fedleak_runs/...), "
        "or results of game, invert and sweep, and writes report.html, report.json and, where "
        "there was differential privacy, report.yaml.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder or result file")
    report.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the report (default: the first RUN's)"
    )
    report.add_argument(
        "--about",
        type=Path,
        metavar="TOML",
        help="facts that no log holds, in tables named as the registry's sections "
        "(default: report.toml in --out, where there is one)",
    )
    report.add_argument(
        "--model-card",
        action="store_true",
        help="print a block of Markdown for a model card, and write nothing",
    )
    report.add_argument(
        "--reveal",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="local reveal files to put into the page: private text; the page gets mode 0600",
    )
    compare = commands.add_parser(
        "compare",
        help="print what changed between two runs",
        description="Prints utility, leakage with 95% intervals, and epsilon of two runs side by "
        "side.",
    )
    compare.add_argument("before", type=Path, metavar="RUN_A", help="log folder of the first run")
    compare.add_argument("after", type=Path, metavar="RUN_B", help="log folder of the second")
    recipes = commands.add_parser(
        "recipes",
        help="list and copy ready-made configs for fit: monitors, gates, defences",
        description="Lists the recipes, fragments of a LightningCLI config; copies those named.",
    )
    recipes.add_argument("names", nargs="*", metavar="NAME", help="recipe to copy")
    recipes.add_argument(
        "--to", type=Path, default=Path(), metavar="DIR", help="folder of the copies"
    )
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description='Prints a script for the shell: eval "$(fedleak completion bash)"',
    )
    completion.add_argument("shell", choices=("bash", "zsh"), help="shell")
    commands.add_parser(
        "fit", help="fine-tune any causal language model on any text, configured by LightningCLI"
    )
    return fedleak, commands.choices
