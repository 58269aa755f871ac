"""Every command that the README and docs/ name is one that the programs themselves understand.

Nothing is computed: `fedleak` and the scripts of benchmarks/ read their arguments, make finds its
target. `<folder>` and `...` stand for what a reader puts in, and `[--a | --b]` for a choice.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lightning_fedleak import cli
from lightning_fedleak.commands import options
from lightning_fedleak.commands.recipes import recipes
from tests.docs.blocks import blocks, inline_code
from tests.tools.sentences import ROOT, pages

COMMANDS = ("fedleak", "make", "python", "pip")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SETS = re.compile(r"[A-Z_]+=\S*")


class _Read(Exception):
    """A script has read its arguments."""


def lines_of(text: str) -> list[str]:
    """One command a line; `$` in front of them is a prompt, and lines without it are output."""
    joined = re.sub(r"\\\n\s*", " ", text).splitlines()
    if any(line.startswith("$ ") for line in joined):
        joined = [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def variants(line: str) -> list[list[str]]:
    """The words of a command, for each choice that its brackets leave."""
    line = re.sub(r"<[^<>]*>", "placeholder", line)
    choices = [""]
    bracket = re.search(r"\s\[([^\]]*)\]", line)
    if bracket:
        line = line.replace(bracket[0], " {}")
        choices += [choice.strip() for choice in bracket[1].split("|")]
    found = []
    for choice in choices:
        words = shlex.split(line.replace("{}", choice), comments=True)
        while words and SETS.fullmatch(words[0]):
            words = words[1:]
        found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


def check(words: Sequence[str]) -> None:
    """Fails where a program would not understand its arguments."""
    program, *arguments = words
    assert program in COMMANDS, f"no test knows the command '{program}'"
    {"fedleak": _fedleak, "make": _make, "python": _python, "pip": _pip}[program](arguments)


def check_line(line: str) -> None:
    """:func:`check`, of every choice that the line leaves."""
    for words in variants(line):
        check(words)


def _fedleak(arguments: list[str]) -> None:
    if arguments[0] == "fit":
        _configs(arguments[1:])
        return
    if "--help" in arguments:
        with pytest.raises(SystemExit, match=r"^0$"):
            options.parse(arguments)
        return
    told = options.parse(arguments)
    if told.command == "recipes":
        assert {name.removesuffix(".yaml") for name in told.names} <= recipes().keys()


def _configs(arguments: list[str]) -> None:
    """What LightningCLI gets: files of the repository, recipes, and a config of the reader's."""
    assert arguments, "fit needs a config"
    assert set(arguments[::2]) == {"--config"}, arguments
    for name in arguments[1::2]:
        there = (ROOT / name).is_file() or name.removesuffix(".yaml") in recipes()
        assert there or name.startswith("your_"), name


def _make(arguments: list[str]) -> None:
    targets = [word for word in arguments if not SETS.fullmatch(word.partition(" ")[0])]
    assert targets
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"make {target}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    assert len(arguments) == 2
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[1])
    assert extras, arguments
    assert set(filter(None, (extras[1] or "").split(","))) <= EXTRAS.keys()


def _python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, arguments
        if spec.submodule_search_locations is not None:  # a package runs its __main__
            spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
            assert spec is not None, arguments
        assert spec.origin is not None, arguments
        path, given = Path(spec.origin), arguments[2:]
    elif arguments[0].startswith("your_"):
        assert arguments[1] == "fit"
        _configs(arguments[2:])
        return
    else:
        path, given = ROOT / arguments[0], arguments[1:]
    assert path.is_file(), path
    if path.parent == ROOT / "examples":
        assert not given
        assert path.name in (ROOT / "tests" / "test_examples.py").read_text(), "is it run?"
        return
    source = path.read_text(encoding="utf-8")
    if "ArgumentParser" not in source:
        assert not given, f"{path.name} takes no arguments"
        return
    _reads(path, given)


def _reads(path: Path, arguments: list[str]) -> None:
    """Runs a script until it has read its arguments."""
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args, **kwargs):
        original(self, *args, **kwargs)
        raise _Read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr("sys.argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        with pytest.raises(_Read):
            runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("block", blocks("commands", "bash"), ids=lambda block: block.place)
def test_commands_are_understood(block, capsys):
    if block.skip:
        pytest.skip(block.skip)
    lines = lines_of(block.text)
    assert lines, "no command in it: say its language behind the backquotes"
    for line in lines:
        check_line(line)


def _known(arguments: Sequence[str]) -> None:
    """Of a command in running text: the subcommand and each option exist."""
    _, subcommands = options.parsers()
    command = subcommands[arguments[0]]
    names = {name for action in command._actions for name in action.option_strings}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= names


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_running_text_are_understood(path):
    rules: dict[str, Callable[[list[str]], None]] = {"make": _make, "pip": _pip, "python": _python}
    for code in inline_code(path):
        code = code.removeprefix('eval "$(').removesuffix(')"')
        if code.partition(" ")[0] not in COMMANDS:
            continue
        program, *arguments = shlex.split(code)
        if not arguments:
            continue
        if program != "fedleak":
            rules[program](arguments)
        elif arguments[0] not in ("fit", "--version"):
            _known(arguments)


@pytest.mark.parametrize(
    "line",
    [
        "fedleak demo --colour",
        "fedleak dream",
        "fedleak recipes no_such_recipe",
        "fedleak fit --config no_such.yaml",
        "python your_script.py fit --config no_such.yaml",
        "make coffee",
        "pip install '.[coffee]'",
        "pip install coffee",
        "python benchmarks/no_such.py",
        "python benchmarks/setups.py --no-such-option",
        "python -m benchmarks.no_such",
        "python examples/lora.py --rank 8",
        "coffee",
    ],
)
def test_what_is_wrong_is_found(line, capsys):
    with pytest.raises((AssertionError, SystemExit, ModuleNotFoundError)):
        check_line(line)


def test_prompts_choices_and_comments():
    assert lines_of("# a\nfedleak x \\\n    --y\n\n") == ["fedleak x  --y"]
    assert lines_of("$ make a\nits output\n$ make b\n") == ["make a", "make b"]
    assert variants("A=1 .venv/bin/fedleak x <a b> [--c | --d 1]  # e") == [
        ["fedleak", "x", "placeholder"],
        ["fedleak", "x", "placeholder", "--c"],
        ["fedleak", "x", "placeholder", "--d", "1"],
    ]


def test_recipes_are_listed_and_completed_as_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes"]) == 0
    assert cli.main(["recipes", "leakage", "gate_leakage"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"leakage.yaml", "gate_leakage.yaml"}
