"""Code blocks, links, imports and sentences of the README and of docs/."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import lightning_fedleak
from lightning_fedleak.extras import homes_of
from tests.docs.blocks import ROOT, blocks_of, inline_code, pages, tokens_of

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
