"""Commands of ``fedleak`` with settings instead of words."""

import importlib
import io
from argparse import Namespace
from typing import Any

from rich.console import Console

from lightning_fedleak.cli.commands.options import parsers


def options_of(command: str, **settings: Any) -> Namespace:
    """Return the options of a command: its defaults, and settings."""
    actions = parsers()[1][command]._actions
    # The program's parser reads a default that is a string as it reads what is typed.
    defaults = {
        action.dest: action.type(action.default)
        if isinstance(action.default, str) and callable(action.type)
        else action.default
        for action in actions
        if action.dest != "help"
    }
    assert settings.keys() <= defaults.keys(), settings.keys() - defaults.keys()
    return Namespace(**defaults | settings)


def run_command(
    command: str, *, width: int = 160, terminal: bool = False, **settings: Any
) -> tuple[int, str]:
    """Return the exit status of a command, and what it printed."""
    module = importlib.import_module(f"lightning_fedleak.cli.commands.{command}")
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=terminal)
    status = module.run(options_of(command, **settings), console)
    return status, output.getvalue()


def printed_by(command: str, *, status: int = 0, **settings: Any) -> str:
    """Return what a command printed, which must end with a status."""
    ended, output = run_command(command, **settings)
    assert ended == status
    return output
