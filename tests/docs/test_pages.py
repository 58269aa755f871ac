"""Code blocks, links, imports and sentences of the README and of docs/."""

import argparse
import ast
import importlib
import importlib.util
import json
import logging
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import lightning_fedleak
from benchmarks.papers import __main__ as papers
from lightning_fedleak import (
    EMBEDDED_MESSAGES,
    EMBEDDED_MODEL,
    CausalLMFineTuning,
    TextDataModule,
    read_texts,
)
from lightning_fedleak.attacks import Attack
from lightning_fedleak.cli import main
from lightning_fedleak.cli.command_line import recipe_files
from lightning_fedleak.cli.commands import options as parser
from lightning_fedleak.extras import homes_of
from tests.docs.blocks import ROOT, Block, blocks, blocks_of, inline_code, pages, tokens_of
from tests.docs.test_python import reader as reader

RUN = {"python", "commands", "bash", "yaml", "toml"}
NOT_RUN = {"text"}  # diagrams, and the output of commands
# The most blocks that may be skipped: those of Flower, NVFlare, bitsandbytes and TRL, which are
# installed in other environments.
MAX_SKIPS = 12


def test_every_block_has_a_language_that_tests_know():
    for path in pages():
        for block in blocks_of(path):
            assert block.language in RUN | NOT_RUN, block.place


def test_pages_skip_at_most_12_blocks():
    assert len([b for path in pages() for b in blocks_of(path) if b.skip]) <= MAX_SKIPS


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_pages_exist(path):
    for code in inline_code(path):
        first = code.split()[0] if code.split() else ""
        if first.startswith(("examples/", "benchmarks/", "tests/", "docs/", "lightning_fedleak/")):
            assert (ROOT / first).exists(), code


MORE = [
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "benchmarks" / name for name in ("README.md", "papers/README.md")),
]


def links_of(path: Path) -> list[str]:
    """Targets of the relative links and images of a page."""
    children = [child for token in tokens_of(path) for child in token.children or ()]
    targets = [str(child.attrGet("href") or child.attrGet("src") or "") for child in children]
    return [t for t in targets if t and not re.match(r"[a-z]+:", t)]


@cache
def anchors_of(path: Path) -> set[str]:
    """The headings of a page, as sites of repositories and mkdocs both spell them in links."""
    tokens = tokens_of(path)
    results: list[str] = []
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(
                child.content
                for child in token.children or ()
                if child.type in ("text", "code_inline")
            )
            retained = re.sub(r"[^\w\s-]", "", text.lower()).strip()
            results.append(re.sub(r"\s", "-", retained))
    return set(results)


@pytest.mark.parametrize("path", [*pages(), *MORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in links_of(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{path.name}: {link}"


ENGINES = ("lightning_fedleak.federation.flower", "lightning_fedleak.federation.nvflare")
"""They need a package of their own, which not everybody installs."""
BLOCKS = [
    block
    for page in pages()
    for block in blocks_of(page)
    if block.language == "python" and "lightning_fedleak" in block.text
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_snippet_imports_from_the_root(block) -> None:
    imports = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if str(node.module).startswith("lightning_fedleak")]
    assert {str(node.module) for node in own} <= {"lightning_fedleak", *ENGINES}
    for node in own:
        if node.module == "lightning_fedleak":
            for alias in node.names:
                assert getattr(lightning_fedleak, alias.name) is not None


def test_there_are_snippets_of_many_names() -> None:
    assert len(BLOCKS) > 40


@pytest.mark.parametrize("name", sorted(homes_of("lightning_fedleak")))
def test_a_name_of_the_root_is_what_its_home_has(name: str) -> None:
    home = __import__(homes_of("lightning_fedleak")[name], fromlist=[name])
    assert getattr(lightning_fedleak, name) is getattr(home, name)


MOST = 18  # words a sentence, the mean of a page
_ABBREVIATION = re.compile(r"\b(al|cf|e\.g|eqs?|etc|figs?|i\.e|vs)\.", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9`])")


def sentences(markdown: str) -> list[str]:
    """The sentences of paragraphs and items; code is one word."""
    found = []
    for before, token in pairwise(MarkdownIt("commonmark").enable("table").parse(markdown)):
        if token.type == "inline" and before.type == "paragraph_open":
            parts = {"code_inline": "`code`", "softbreak": " ", "hardbreak": " "}
            children = token.children or ()
            text = "".join(parts.get(c.type, c.content * (c.type == "text")) for c in children)
            if not text.startswith(":::"):  # mkdocstrings fills it
                found += _END.split(_ABBREVIATION.sub(r"\1", text))
    return [sentence for sentence in found if words(sentence)]


def words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    found = sorted(sentences(path.read_text(encoding="utf-8")), key=words)
    mean = sum(map(words, found)) / max(1, len(found))
    assert mean <= MOST, f"{mean:.1f} words a sentence; the longest: {found[-3:]}"


# Every command that the README and docs/ name is one that the programs themselves understand.


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


# What the site shows, and that it loads nothing from other hosts. `make docs` builds it.


API = ROOT / "docs" / "api.md"
MAX_PAGES = 22  # of the navigation, with the reference: what a reader can look through
MAX_WORDS = 36_000  # of the README and all pages, as `wc -w` counts
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(path: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)


def pages_of(nav: object) -> list[str]:
    """Return the files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav if isinstance(nav, list) else nav.values()
    return [page for part in parts for page in pages_of(part)]


def test_the_navigation_is_short_and_names_each_page_once() -> None:
    named = pages_of(SETTINGS["nav"])
    assert len(named) == len(set(named)) <= MAX_PAGES
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert files == set(named)


def test_readme_and_pages_are_not_too_long() -> None:
    counts = {str(path): len(path.read_text(encoding="utf-8").split()) for path in pages()}
    assert sum(counts.values()) <= MAX_WORDS, counts


def test_every_public_name_has_one_place_in_the_reference():
    names = documented(API)
    assert len(names) == len(set(names))
    last = [name.rpartition(".")[2] for name in names]
    for name in set(lightning_fedleak.__all__) - {"__version__"}:
        assert last.count(name) == 1, name
        assert f"lightning_fedleak.{name}" in names, "under the name that is imported"


def test_documented_names_exist_and_have_docstrings():
    for name in documented(API):
        module, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(module), last).__doc__, name


def test_the_site_is_strict_and_has_no_font_or_script_of_another_host():
    assert SETTINGS["strict"] is True
    assert SETTINGS["theme"]["font"] is False
    assert "extra_javascript" not in SETTINGS
    for script in SETTINGS["extra"]["polyfills"]:
        assert (ROOT / "docs" / script).is_file()
    [handlers] = [p["mkdocstrings"]["handlers"] for p in SETTINGS["plugins"] if "mkdocstrings" in p]
    assert handlers["python"]["inventories"] == []


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        ('<script src="https://h/x.js"></script>', ".html", ["https://h/x.js"]),
        ('<script src="//h/x.js"></script>', ".html", ["//h/x.js"]),
        ('<link rel="stylesheet" href="https://h/x.css">', ".html", ["https://h/x.css"]),
        ('<link rel="preconnect" href="https://h" crossorigin>', ".html", ["https://h"]),
        ('<img srcset="a.png 1x, https://h/b.png 2x">', ".html", ["https://h/b.png"]),
        ('<p style="background: url(http://h/x)">', ".html", ["http://h/x"]),
        ("<style>@import 'https://h/x.css';</style>", ".html", ["https://h/x.css"]),
        ("<style>p{}</style><iframe src=HTTPS://h>", ".html", ["HTTPS://h"]),
        ('<svg><use xlink:href="https://h/x.svg#a"/></svg>', ".svg", ["https://h/x.svg#a"]),
        ("@font-face{src:url('https://h/x.woff')}", ".css", ["https://h/x.woff"]),
        ('<pre class="mermaid"><code>', ".html", ["a diagram in Mermaid"]),
        ('<a href="https://h/x">', ".html", []),
        ('<link rel="canonical" href="https://h/x">', ".html", []),
        ('<img src="a.png"><script src="../x.js"></script>', ".html", []),
        ('<svg xmlns="http://www.w3.org/2000/svg">', ".svg", []),
        ("<p>url(https://h/x)</p>", ".html", []),
        ("a{background:url(data:image/svg+xml;utf8,x)}", ".css", []),
    ],
)
def test_external_requests_of_a_page(hooks, text, suffix, expected):
    assert hooks.external_requests(text, suffix) == expected


def test_an_external_request_fails_the_build(hooks, tmp_path):
    (tmp_path / "index.html").write_text("<img src='x.png'>")
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "x.html").write_text("<img src='https://h/x.png'>")
    with pytest.raises(RuntimeError, match=r"api/x\.html: https://h/x\.png"):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def on_page(name: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def test_links_that_leave_the_docs_become_names_of_files(hooks):
    markdown = hooks.on_page_markdown(
        "See [the rules](../CONTRIBUTING.md#a), [x](../x.py), [here](x.md#b).\n"
        "<!-- test: skip (because) -->\n```\n[0](../1)\n```\n",
        page=on_page("a.md"),
    )
    assert markdown == (
        "See the rules (`CONTRIBUTING.md`), `x.py`, [here](x.md#b).\n```\n[0](../1)\n```\n"
    )
    inside = "[a](../a.md) ![b](../b.png) [c](../../c/d.py)"
    markdown = hooks.on_page_markdown(inside, page=on_page("api/x.md"))
    assert markdown == "[a](../a.md) ![b](../b.png) `c/d.py`"


def test_roles_of_docstrings_become_names(hooks):
    html = hooks.on_page_content("<p>A :class:<code>~a.b.C</code>, <code>x</code></p>")
    assert html == (
        '<p>A <autoref optional identifier="a.b.C"><code>C</code></autoref>, <code>x</code></p>'
    )


def test_search_has_a_name_and_wide_code_is_reached_by_keyboard(hooks):
    assert hooks.on_post_page('<div role="dialog">') == '<div role="dialog" aria-label="Search">'
    html = hooks.on_page_content("<pre><span></span><code>x\n</code></pre>")
    assert '<code tabindex="0">' in html


def test_long_names_break_after_a_slash_but_not_in_code_blocks(hooks):
    assert hooks.on_page_content("<td><code>a/&lt;b&gt;/c</code></td>") == (
        "<td><code>a/<wbr>&lt;b&gt;/<wbr>c</code></td>"
    )
    block = "<pre><code>a/b\nc/d\n</code></pre>"
    assert hooks.on_page_content(block) == block


# A stranger's run through the README, in order: each block does and prints what the README shows.


README = ROOT / "README.md"
MAX_LINES = 110
STEPS = "100"  # as many as the printed run of the README has


def pattern_of(line: str) -> re.Pattern[str]:
    """Return what a printed line has to match: numbers and spaces aside, ``...`` is anything."""
    parts = []
    for part in re.split(r"(\.\.\.|\d+(?:\.\d+)?|\s+)", line.strip()):
        if part == "...":
            parts.append(r".*?")
        elif re.fullmatch(r"\d+(?:\.\d+)?", part):
            parts.append(r"\d+(?:\.\d+)?")
        else:
            parts.append(r"\s+" if part.isspace() else re.escape(part))
    return re.compile("".join(parts), re.DOTALL)


def assert_printed(expected: str, printed: str) -> None:
    """Fails unless the lines were printed, in this order."""
    position = 0
    for line in expected.strip().splitlines():
        match = pattern_of(line).search(printed, position)
        assert match, f"not printed, or not in this order: {line}\n{printed}"
        position = match.end()


@pytest.fixture
def printed(caplog, capsys) -> Iterator[Any]:
    """A function that returns what was printed or logged since it was called last."""
    with caplog.at_level(logging.INFO):

        def read() -> str:
            messages = [record.getMessage() for record in caplog.records]
            caplog.clear()
            out, err = capsys.readouterr()
            return "\n".join([*messages, out, err])

        yield read


def readers_names() -> dict[str, Any]:
    data = TextDataModule(EMBEDDED_MESSAGES, batch_size=8, length=32)
    return {"model": CausalLMFineTuning(), "datamodule": data}


def fit(**settings: Any) -> None:
    """Train as the comment after a line of the README says."""
    L.Trainer(**settings).fit(**readers_names())


@pytest.mark.slow
def test_each_block_does_what_the_readme_shows(reader, monkeypatch, printed) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", STEPS)
    blocks = list(blocks_of(README))
    assert [block.language for block in blocks] == [
        "bash", "python", "python", "text", "python", "python", "bash"
    ]  # fmt: skip
    make, watch, transformers, watched, gate, defence, release = blocks
    _make_of_readme(make)

    names: dict[str, Any] = {}  # pasted, the first snippets run as they are
    exec(compile(watch.text, watch.place, "exec"), names)
    assert_printed(watched.text, printed())

    monkeypatch.chdir(reader)
    short = transformers.text.replace(f"max_steps={STEPS}", "max_steps=4")
    exec(compile(short, transformers.place, "exec"), {})
    assert_printed("LeakageCallback: highest leakage ...: words 1.00 (step 3)", printed())

    exec(compile(gate.text, gate.place, "exec"), names)
    fit(callbacks=[names["LeakageMonitor"](), names["gate"]])
    assert names["gate"].fired

    exec(compile(defence.text, defence.place, "exec"), names)
    fit(strategy=names["strategy"], callbacks=[names["monitor"]], max_steps=10)
    latest = names["monitor"].latest
    assert latest["leakage/subspace_words/f1"] < 0.1
    assert latest["leakage_local/subspace_words/f1"] > 0.9

    assert _exit_status_of(release, reader) == 3


def _make_of_readme(block: Block) -> None:
    """What `make` would run."""
    run = {"make demo": "fedleak demo", "make test": "-m pytest"}
    for line in lines_of(block.text):
        command = line.partition("#")[0].split()
        dry = subprocess.run(
            [*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert run[" ".join(command)] in dry.stdout, dry.stdout


def _exit_status_of(block: Block, folder: Path) -> int:
    """Return the status of the command on a model that took five steps on all of its 20 rows."""
    texts = read_texts(EMBEDDED_MESSAGES)[:40]
    for name, rows in (("train", texts[:20]), ("left_out", texts[20:])):
        lines = [json.dumps({"text": text}) for text in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    shutil.copytree(EMBEDDED_MODEL, folder / "out" / "base")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([tokenizer(text, max_length=64, truncation=True) for text in texts[:20]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "out" / "model")
    tokenizer.save_pretrained(folder / "out" / "model")
    [line] = lines_of(block.text)
    return main(line.split()[1:])


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_a_line_matches_with_other_numbers_and_what_was_left_out() -> None:
    shown = "  look  played, 0.6 s: reads layers.0 and 34 more\nread 2 of 100 (words 38%, ...); ..."
    real = "A: look played, 12 s: reads layers.1 and\n  7 more\nread 1 of 3 (words 4%, x); y"
    assert_printed(shown, real)
    for wrong in ("look played, s: reads layers.1 and 7 more", real.replace("words", "texts")):
        with pytest.raises(AssertionError, match="not printed"):
            assert_printed(shown, wrong)
