"""Every command that the README and docs/ name is one that the programs themselves understand.

Nothing is computed: `fedleak` and the scripts of benchmarks/ read their arguments, make finds its
target. `<folder>` and `...` stand for what a reader puts in, and `[--a | --b]` for a choice.

In running text and tables stand whole commands too, scripts with arguments, and parts of commands
that begin with an option or a subcommand. A part belongs to a command of its own page: one of the
page's programs must understand it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from benchmarks.papers import __main__ as papers
from lightning_fedleak.cli.commands import parser
from lightning_fedleak.cli.commands.recipes import recipe_files
from tests.docs.blocks import blocks, blocks_of, inline_code
from tests.tools.sentences import ROOT, pages

COMMANDS = ("fedleak", "make", "python", "pip")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHERS = ("trl",)  # packages that this one works with and does not install
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
            parser.parse(arguments)
        return
    parser.parse(arguments)


def _configs(arguments: list[str]) -> None:
    """What LightningCLI gets: files of the repository, recipes, and a config of the reader's."""
    assert arguments, "fit needs a config"
    assert set(arguments[::2]) <= {"--config", "--recipe"}, arguments
    for option, name in zip(arguments[::2], arguments[1::2], strict=True):
        if option == "--recipe":
            assert name in recipe_files(), name
            continue
        there = (ROOT / name).is_file() or name.removesuffix(".yaml") in recipe_files()
        assert there or name.startswith("your_"), name


def _make(arguments: list[str]) -> None:
    targets = [word for word in arguments if not SETS.fullmatch(word.partition(" ")[0])]
    assert targets
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"make {target}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    assert len(arguments) == 2
    if arguments[1] in OTHERS:
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
    path, given = _script(arguments)
    if path.parent == ROOT / "examples":
        assert not given
        runs = [ROOT / "tests" / "test_examples.py", ROOT / "tests" / "trl" / "test_example.py"]
        assert any(path.name in run.read_text() for run in runs), "is it run?"
        return
    source = path.read_text(encoding="utf-8")
    if "ArgumentParser" not in source:
        assert not given, f"{path.name} takes no arguments"
        return
    _reads(path, given)


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


def _reads(path: Path, arguments: list[str]) -> None:
    """Lets a script's parser read arguments."""
    _parser_of(path).parse_args(arguments)


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


def _known(arguments: Sequence[str]) -> None:
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
            _known(arguments)


def commands_of(path: Path) -> list[list[str]]:
    """The commands of a page's blocks and running text; of a script that it names, the name."""
    found = [
        words
        for block in blocks_of(path)
        if block.language in ("commands", "bash") and not block.skip
        for line in lines_of(block.text)
        for words in variants(line)
    ]
    for code in filter(str.strip, inline_code(path)):
        first = code.split()[0]
        if first in COMMANDS:
            found += variants(code)
        elif script_named(first):
            found.append(["python", *script_named(first)])
    programs = [words for words in found if words[0] in ("fedleak", "python") and len(words) > 1]
    return [words for words in programs if not words[1].startswith("your_")]


@cache
def script_named(word: str) -> tuple[str, str] | tuple[()]:
    """Return how Python is told to run the script of benchmarks/ that a word names."""
    if not word.endswith(".py"):
        return ()
    for path in (ROOT / "benchmarks").rglob(Path(word).name):
        if "ArgumentParser" in path.read_text("utf-8"):
            return "-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return ()


def parts_of(path: Path) -> Iterator[str]:
    """Parts of commands in running text and tables: what holds an option behind no program."""
    for code in inline_code(path):
        first = code.split()[0] if code.split() else ""
        if first not in COMMANDS and "=" not in first and re.search(r"(^|\s)--\w", code):
            yield code


def understood(part: str, commands: Sequence[Sequence[str]]) -> bool:
    """Whether a part is one of a command: by itself, or behind what stands there.

    Capital letters stand for what a reader puts in: a name, or else a number. An option alone is a
    name, of one of the programs or of `fedleak`.
    """
    words = shlex.split(re.sub(r"<[^<>]*>", "placeholder", part))
    if len(words) == 1:
        return words[0] in set().union(*map(_option_names, [["fedleak"], *commands]))
    if script := script_named(words[0]):
        return _is_read(["python", *script, *words[1:]])
    numbers = [re.sub(r"^[A-Z]+$", "1", word) for word in words]
    for command in commands:
        head = 3 if command[1] == "-m" else 2
        given = command if words[0].startswith("--") else command[:head]
        if _is_read([*given, *words]) or _is_read([*given, *numbers]):
            return True
    return False


def _is_read(words: Sequence[str]) -> bool:
    try:
        check(words)
    except (AssertionError, SystemExit, ModuleNotFoundError):
        return False
    return True


def _option_names(command: Sequence[str]) -> set[str]:
    """The options of a script with all its subcommands, or of all of `fedleak`."""
    if command[0] == "fedleak":
        parsers = list(parser.parsers()[1].values())
    else:
        path, _ = _script(command[1:])
        reads = "ArgumentParser" in path.read_text("utf-8")
        parsers = [_parser_of(path)] if reads else []
    names: set[str] = set()
    while parsers:
        for action in parsers.pop()._actions:
            names |= {*action.option_strings}
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return names


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_of_commands_are_understood_by_a_program_of_their_page(path, capsys):
    commands = commands_of(path)
    assert [part for part in parts_of(path) if not understood(part, commands)] == []


@pytest.mark.parametrize(
    ("part", "right"),
    [
        ("--rank 8 --shapes 8x64", True),
        ("--rank 8 --layers 1", False),
        ("passive_membership.py --model DIR --shapes 1x64 --warm 5,30", True),
        ("passive_membership.py --shapes 1x64", False),
        ("benchmarks/attacks/subspace_words.py --layers 1", False),
        ("table2 --layers 10 20 30 --paper-games 8", False),
        ("membership table2 --set layers=10,20,30", True),
        ("membership table2 --set paper_games=8", False),
        ("--warm N", True),
        ("--batches N", True),
        ("--batches many", False),
        ("--shapes", True),
        ("--lora-r", True),
        ("--no-such", False),
    ],
)
def test_parts_that_no_program_of_the_page_has_are_found(part, right, capsys):
    commands = [
        ["python", "-m", "benchmarks.attacks.subspace_words", "--model", "DIR"],
        ["python", "-m", "benchmarks.papers", "membership", "table2", "--model", "DIR"],
    ]
    assert understood(part, commands) is right


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
        "pip install coffee",
        "python benchmarks/no_such.py",
        "python -m benchmarks.attacks.setups --no-such-option",
        "python -m benchmarks.no_such",
        "python -m benchmarks.papers membership table2 --model DIR --set no_such=1",
        "python -m benchmarks.papers membership no_such_table --model DIR",
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
