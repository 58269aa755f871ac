"""The command ``fedleak``. Imports only what the chosen subcommand needs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_fedleak.cli.commands.options import FederateOptions
from lightning_fedleak.cli.commands.parser import check_sources, parse
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.extras import install

_CLASSES = {
    "demo": ("demo", "Demo"),
    "game": ("game", "GameCommand"),
    "invert": ("invert", "InvertCommand"),
    "sweep": ("sweep", "SweepCommand"),
    "plan": ("plan", "PlanCommand"),
    "memorization": ("memorization", "MemorizationCommand"),
    "inspect": ("inspect", "InspectCommand"),
    "federate": ("federate", "FederateCommand"),
}
"""Module and class of each subcommand that measures something."""

_FUNCTIONS = {
    "report": ("compare", "write_report"),
    "compare": ("compare", "compare"),
}
"""Module and function of each that does not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fedleak``; the console script.

    Args:
        argv: arguments without the program's name; None reads the command line.

    Returns:
        Exit status: 0 when done, 1 after an error that the user can mend (on stderr), 130
        after an interrupt.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["fit"]:
        return _fit(arguments, from_command_line=argv is None)
    options = parse(arguments)
    command = options.command
    del options.command
    try:
        if command in _CLASSES:
            return _run(*_CLASSES[command], options)
        status: int = _attribute(*_FUNCTIONS[command])(options)
        return status
    except SourceError as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("fedleak: interrupted", file=sys.stderr)
        return 130


def _fail(error: object) -> int:
    print(f"fedleak: {error}", file=sys.stderr)
    return 1


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lightning_fedleak.cli.commands.{module}"), name)


def _run(module: str, name: str, options: argparse.Namespace) -> int:
    """Run a command's class, and print errors that a user can mend."""
    # What needs no library is checked before libraries load, which is slow.
    check_sources(options)
    if name == "FederateCommand":
        FederateOptions(**vars(options)).check()
    if name == "Demo" and importlib.util.find_spec("tensorboard") is None:
        return _fail(f"'demo' writes TensorBoard logs: {install('demo')}")
    # Threads that spin while they wait starve each other where other programs use the cores too;
    # OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import transformers

    from lightning_fedleak.cli.commands.printing import USER_ERRORS

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    command = _attribute(module, name)
    try:
        status: int = command(**vars(options)).run()
    except USER_ERRORS as error:
        return _fail(error)
    return status


def _fit(arguments: Sequence[str], *, from_command_line: bool) -> int:
    # These deprecations are LightningCLI's to mend, not the user's.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    if importlib.util.find_spec("jsonargparse") is None:
        return _without_lightning_cli()
    from lightning_fedleak.cli.commands.fit_arguments import check_files
    from lightning_fedleak.cli.commands.recipes import with_configs

    try:
        arguments = with_configs(arguments)
        check_files(arguments[1:])
        from lightning_fedleak.cli.commands.fit import fit

        if from_command_line:  # which LightningCLI reads itself
            sys.argv[1:] = arguments
        fit(None if from_command_line else arguments)
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):  # Lightning's, of a part of it that is missing
            raise
        return _without_lightning_cli()
    except ValueError as error:
        if not _is_meant_for_users(error):
            raise
        return _fail(error)
    return 0


def _is_meant_for_users(error: ValueError) -> bool:
    """Return whether this package itself raised the error: its messages say what to change."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    raised_in = "" if place is None else place.tb_frame.f_globals.get("__name__", "")
    return raised_in.partition(".")[0] == __name__.partition(".")[0]


def _without_lightning_cli() -> int:
    return _fail(f"'fit' needs LightningCLI: {install('cli')}")
