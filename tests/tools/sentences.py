"""How long the sentences of the README and of docs/ are: words a sentence, page by page.

::

    python -m tests.tools.sentences                      # every page, the longest means first
    python -m tests.tools.sentences docs/gate.md         # one page, with its longest sentences
    python -m tests.tools.sentences --longest 10 README.md

Headings, tables, code blocks and images do not count. What stands in backquotes is one word, a link
is its text. An item of a list ends its sentence, with or without a full stop; a colon or semicolon
does not. The exit status is 1 where the mean of a page is above 18 words.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
MOST = 18
_ABBREVIATIONS = ("al", "cf", "e.g", "eq", "eqs", "etc", "fig", "figs", "i.e", "vs")
_END = re.compile(
    r"(?P<before>[^\s(]*?)(?P<mark>[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9.\ue000])"
)
_CODE = re.compile("\ue000(\\d+)\ue000")


@dataclass(frozen=True)
class Sentence:
    """One sentence.

    Attributes:
        line: of its paragraph in the file, from 1.
        text: on one line, with what stood in backquotes.
        words: how many; code is one.
    """

    line: int
    text: str
    words: int


@dataclass(frozen=True)
class Page:
    """A page's name and sentences."""

    name: str
    sentences: tuple[Sentence, ...]

    @cached_property
    def mean(self) -> float:
        """Words a sentence; 0 without sentences."""
        return sum(s.words for s in self.sentences) / max(len(self.sentences), 1)


def pages() -> list[Path]:
    """The README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(path: Path) -> Page:
    """The sentences of a Markdown file."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    return Page(name, tuple(sentences(path.read_text(encoding="utf-8"))))


def sentences(markdown: str) -> Iterator[Sentence]:
    """The sentences of a text in Markdown, in order."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    for before, token in pairwise(tokens):
        if token.type == "inline" and before.type == "paragraph_open" and token.map is not None:
            codes: list[str] = []
            text = " ".join(_flat(token, codes).split())
            if text.startswith(":::"):  # mkdocstrings fills it
                continue
            for sentence in _split(text):
                words = sum(any(c.isalnum() for c in word) for word in sentence.split())
                if words:
                    yield Sentence(token.map[0] + 1, _with_code(sentence, codes), words)


def _flat(token: Token, codes: list[str]) -> str:
    """The text of an inline token; code is a word of its own, and kept aside by its number."""
    parts = []
    for child in token.children or ():
        if child.type == "code_inline":
            parts.append(f"\ue000{len(codes)}\ue000")
            codes.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif child.type == "text":
            parts.append(child.content)
    return "".join(parts)


def _with_code(text: str, codes: list[str]) -> str:
    return _CODE.sub(lambda found: f"`{codes[int(found[1])]}`", text)


def _split(text: str) -> Iterator[str]:
    begin = 0
    for end in _END.finditer(text):
        if end["mark"] == "." and end["before"].lower() in _ABBREVIATIONS:
            continue
        yield text[begin : end.end()].strip()
        begin = end.end()
    yield text[begin:].strip()


def main() -> int:
    """Prints the pages; the exit status."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parse.add_argument("--longest", type=int, metavar="N", help="sentences to show of each page")
    options = parse.parse_args()
    shown = options.longest if options.longest is not None else 5 * bool(options.files)
    found = [read(path.resolve()) for path in options.files or pages()]
    print("mean  longest  sentences  page")
    for page in sorted(found, key=lambda page: -page.mean):
        by_length = sorted(page.sentences, key=lambda s: -s.words)
        longest = by_length[0].words if by_length else 0
        print(f"{page.mean:4.1f}  {longest:7d}  {len(by_length):9d}  {page.name}")
        for sentence in by_length[:shown]:
            print(f"      {sentence.words:3d} words, line {sentence.line}: {sentence.text}")
    return int(any(page.mean > MOST for page in found))


if __name__ == "__main__":
    raise SystemExit(main())
