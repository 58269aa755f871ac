"""``fedleak completion``: a shell's completion, written from the options themselves."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator

from lightning_fedleak.commands.parser import parsers
from lightning_fedleak.commands.recipes import recipes

_FIT = ("--config", "--help", "--print_config", "--model.model", "--data.text", "--data.column")
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """_fedleak() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" option="" known="" i
  for ((i = COMP_CWORD - 1; i > 1; i--)); do
    case "${{COMP_WORDS[i]}}" in --*) option="${{COMP_WORDS[i]}}"; break ;; esac
  done
  if [ "$COMP_CWORD" -eq 1 ]; then
    known={commands}
  else
    case "$word" in -*) option="" ;; esac
    case "$command $option" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _fedleak fedleak
"""


def print_script(options: argparse.Namespace) -> int:
    """Print what the chosen shell has to read, and return 0."""
    print(script(options.shell), end="")
    return 0


def script(shell: str) -> str:
    """Return what a shell has to read to complete subcommands, options and their choices.

    Elsewhere (a path, for example) the shell completes as usual.

    Args:
        shell: ``bash`` or ``zsh``.
    """
    _, commands = parsers()
    cases = [
        f"      {pattern}) known={shlex.quote(' '.join(words))} ;;"
        for name, command in commands.items()
        for pattern, words in _cases(name, command)
    ]
    text = _SCRIPT.format(commands=shlex.quote(" ".join(commands)), cases="\n".join(cases))
    return _ZSH + text if shell == "zsh" else text


def _cases(name: str, command: argparse.ArgumentParser) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield what may follow each option of a subcommand that has choices, and all its options."""
    words: list[str] = [*_FIT] if name == "fit" else []
    for action in command._actions:
        spelled = [option for option in action.option_strings if option.startswith("--")]
        words += spelled if name != "fit" else []
        for option in spelled if action.choices else ():
            yield shlex.quote(f"{name} {option}"), [str(choice) for choice in action.choices or ()]
        if not action.option_strings and action.choices:
            words += action.choices
    if name == "recipes":
        words += recipes()
    yield shlex.quote(f"{name} "), words
