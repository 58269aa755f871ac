"""The command ``fedleak``: it parses the command line, runs a subcommand, and reports errors.

Only what the chosen subcommand needs is imported. A *recipe* is a ready-made config of ``fit``.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from lightning_fedleak.cli.commands.options import did_you_mean, parse
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.extras import install

_OPTION = "--recipe"  # an option of ``fit`` that LightningCLI does not have: see with_configs


def recipe_files() -> dict[str, Traversable]:
    """Return the file of each recipe, by its name.

    They are in ``callbacks/`` of a checkout, and are installed as ``lightning_fedleak.recipes``.
    """
    try:
        folder: Traversable = files("lightning_fedleak.recipes")
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "callbacks"
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {path.name[:-5]: path for path in paths if path.name.endswith(".yaml")}


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``fit``, with ``--config FILE`` for each ``--recipe NAME``.

    Args:
        arguments: The words of the command line.

    Raises:
        SourceError: there is no such recipe; the message lists the recipes and their folder.
    """
    configs: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != _OPTION:
            configs.append(word)
            continue
        name = name if equals else next(words, "")
        recipes = recipe_files()
        path = recipes.get(name.removesuffix(".yaml"))
        if path is None:
            folder = Path(str(next(iter(recipes.values())))).parent
            raise SourceError(
                f"no such recipe: '{name}'{did_you_mean(name, list(recipes))}. There are "
                f"{', '.join(recipes)}. Files for your own LightningCLI: {folder}"
            )
        configs += ["--config", str(path)]
    return configs


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fedleak``; the console script.

    Args:
        argv: The arguments without the program's name; None reads the command line.

    Returns:
        The exit status: 0 when done, 1 after an error that the user can mend (on stderr), 130
        after an interrupt.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["fit"] and not {"-h", "--help"}.intersection(arguments):
            return _fit(arguments, from_command_line=argv is None)
        return _run(parse(arguments))
    except ValueError as error:
        if not _is_meant_for_users(error):
            raise
        print(f"fedleak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedleak: interrupted", file=sys.stderr)
        return 130


def _is_meant_for_users(error: ValueError) -> bool:
    """Return whether this package itself raised the error: its messages say what to change."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in: str = frame.f_globals.get("__name__", "")
    return raised_in.partition(".")[0] == __name__.partition(".")[0]


def _run(options: argparse.Namespace) -> int:
    """Run a subcommand."""
    if options.command == "demo" and importlib.util.find_spec("tensorboard") is None:
        raise SourceError(f"'demo' writes TensorBoard logs: {install('demo')}")
    # Threads that spin while they wait starve each other where other programs use the cores too;
    # OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.command in ("report", "compare", "verify"):
        module, function = "logs", f"run_{options.command}"
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        module, function = options.command, "run"
    command = importlib.import_module(f"lightning_fedleak.cli.commands.{module}")
    status: int = getattr(command, function)(options)
    return status


def _fit(arguments: Sequence[str], *, from_command_line: bool) -> int:
    """Run ``fit``, which LightningCLI parses; raise ``SourceError`` if that is not installed."""
    # These deprecations are LightningCLI's to mend, not the user's.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    arguments = with_configs(arguments)
    try:
        from lightning_fedleak.cli.commands.fit import fit

        if from_command_line:  # LightningCLI reads sys.argv itself
            sys.argv[1:] = arguments
        fit(None if from_command_line else arguments)
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):  # Lightning names it if LightningCLI is not installed
            raise
        raise SourceError(f"'fit' needs LightningCLI: {install('cli')}") from error
    return 0
