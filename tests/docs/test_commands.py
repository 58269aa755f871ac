"""Every command that the README and docs/ name is one that the programs themselves understand.

Nothing is computed: `fedleak` and the scripts of benchmarks/ read their arguments, make finds its
target. `<folder>` and `...` stand for what a reader puts in, and `[--a | --b]` for a choice.

Whole commands in running text and tables are checked too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml

from benchmarks.papers import __main__ as papers
from lightning_fedleak.attacks import Attack
from lightning_fedleak.cli.command_line import recipe_files
from lightning_fedleak.cli.commands import options as parser
from tests.docs.blocks import ROOT, blocks, inline_code, pages

COMMANDS = ("fedleak", "make", "python", "pip")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = ("trl",)  # packages that this one works with and does not install
SETS = re.compile(r"[A-Z_]+=\S*")


class _Read(Exception):
    """A script would read its arguments now; holds its parser."""


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
    commands = []
    for choice in choices:
        words = shlex.split(line.replace("{}", choice), comments=True)
        while words and SETS.fullmatch(words[0]):
            words = words[1:]
        commands.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return commands


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
            parser.parse(arguments)
        return
    parser.parse(arguments)


def _configs(arguments: list[str]) -> None:
    """What LightningCLI gets: files of the repository or the reader, recipes, attacks."""
    assert arguments, "fit needs a config"
    options = {"--config", "--recipe", "--trainer.callbacks.attacks"}
    assert set(arguments[::2]) <= options, arguments
    for option, name in zip(arguments[::2], arguments[1::2], strict=True):
        if option == "--recipe":
            assert name in recipe_files(), name
            continue
        if option == "--trainer.callbacks.attacks":
            for attack in yaml.safe_load(name):
                module, _, kind = attack["class_path"].rpartition(".")
                assert issubclass(getattr(importlib.import_module(module), kind), Attack), attack
            continue
        exists = (ROOT / name).is_file() or name.removesuffix(".yaml") in recipe_files()
        assert exists or name.startswith("your_"), name


def _make(arguments: list[str]) -> None:
    targets = [word for word in arguments if not SETS.fullmatch(word.partition(" ")[0])]
    assert targets
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"make {target}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    assert len(arguments) == 2
    if arguments[1] in PACKAGES:
        return
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[1])
    assert extras, arguments
    assert set(filter(None, (extras[1] or "").split(","))) <= EXTRAS.keys()


def _python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "benchmarks.papers"]:
        _papers(arguments[2:])
        return
    if arguments[0].startswith("your_"):
        assert arguments[1] == "fit"
        _configs(arguments[2:])
        return
    path, rest = _script(arguments)
    if path.parent == ROOT / "examples":
        assert not rest
        runs = [ROOT / "tests" / "test_examples.py", ROOT / "tests" / "trl" / "test_example.py"]
        assert any(path.name in run.read_text() for run in runs), "is it run?"
        return
    source = path.read_text(encoding="utf-8")
    if not re.search(r"ArgumentParser|parser_of|read_options", source):
        assert not rest, f"{path.name} takes no arguments"
        return
    _parser_of(path).parse_args(rest)


def _script(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The file that ``python`` runs, and what is left of its arguments."""
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, arguments
        if spec.submodule_search_locations is not None:  # a package runs its __main__
            spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
            assert spec is not None, arguments
        assert spec.origin is not None, arguments
        path, rest = Path(spec.origin), arguments[2:]
    else:
        path, rest = ROOT / arguments[0], arguments[1:]
    assert path.is_file(), path
    return path, list(rest)


def _papers(arguments: list[str]) -> None:
    """Tables, their size and `--set` are read behind the parser: `--list` reads them, runs none."""
    parser = _parser_of(ROOT / "benchmarks" / "papers" / "__main__.py")
    parser.parse_args(arguments)
    models = arguments.index("--model") if "--model" in arguments else len(arguments)
    end = next((i for i, w in enumerate(arguments) if i > models and w.startswith("--")), None)
    rest = [*arguments[:models], *(arguments[end:] if end else [])]
    assert papers.main([*rest, "--list"]) == 0


@cache
def _parser_of(path: Path) -> argparse.ArgumentParser:
    """A script is run until it reads its arguments, once."""

    def parse(self: argparse.ArgumentParser, *args, **kwargs):
        raise _Read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr("sys.argv", [str(path)])
        with pytest.raises(_Read) as read:
            runpy.run_path(str(path), run_name="__main__")
    parser = read.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


@pytest.mark.parametrize("block", blocks("commands", "bash"), ids=lambda block: block.place)
def test_commands_are_understood(block, capsys):
    if block.skip:
        pytest.skip(block.skip)
    lines = lines_of(block.text)
    assert lines, "no command in it: say its language behind the backquotes"
    for line in lines:
        check_line(line)


def _check_options(arguments: Sequence[str]) -> None:
    """Of a command in running text: the subcommand and each option exist."""
    _, subcommands = parser.parsers()
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
            _check_options(arguments)


@pytest.mark.parametrize(
    "line",
    [
        "fedleak demo --colour",
        "fedleak dream",
        "fedleak fit --recipe no_such_recipe",
        "fedleak fit --config no_such.yaml",
        "python your_script.py fit --config no_such.yaml",
        "make coffee",
        "pip install '.[coffee]'",
        "python benchmarks/no_such.py",
        "python -m benchmarks.attacks.setups --no-such-option",
        "python -m benchmarks.no_such",
        "python -m benchmarks.papers membership table2 --model DIR --set no_such=1",
        "python -m benchmarks.papers membership no_such_table --model DIR",
        "python examples/lora.py --rank 8",
        "coffee",
    ],
)
def test_wrong_commands_are_reported(line, capsys):
    with pytest.raises((AssertionError, SystemExit, ModuleNotFoundError)):
        check_line(line)


def test_two_commands_of_the_readme_set_up_a_fresh_machine() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Install and try")[2].partition("\n## ")[0]
    assert section, "the README has a section that says how to install"
    commands = [
        line.partition("#")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
        for line in lines_of(block)
    ]
    assert commands[:2] == ["make demo", "make test"]
    for target in ("demo", "test"):
        assert re.search(rf"^{target}: \$\(READY\)", MAKEFILE, flags=re.MULTILINE), target
    ci = lines_of((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert any(line.partition("||")[0].strip() == "make test" for line in ci)
