"""The code blocks of the README and of docs/, and what a comment in front of one asks of the tests.

A comment that a reader does not see may stand in the line above a block::

    <!-- test: setup=NAME -->      the block needs another setting; see the test of its language
    <!-- test: skip (reason) -->   it is not run

A block says its language. Without one it holds commands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_ASKS = re.compile(r"<!-- test: (?:setup=(?P<setup>\w+)|skip \((?P<skip>.+)\)) -->\s*")


def pages() -> list[Path]:
    """The README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        place: the page and the line of its first line of code.
        language: as it is written; `commands` where none is.
        text: the code.
        setup: the setting that it needs; empty where it is the usual one.
        skip: why it is not run; empty where it is.
    """

    place: str
    language: str
    text: str
    setup: str = ""
    skip: str = ""


@cache
def tokens_of(path: Path) -> list[Token]:
    """A page as markdown-it reads it."""
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def blocks_of(path: Path) -> Iterator[Block]:
    """The code blocks of a page.

    Raises:
        ValueError: a comment for the tests that they do not understand, or that no block follows.
    """
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    queried: re.Match[str] | None = None
    for token in tokens_of(path):
        if token.type == "html_block" and "test:" in token.content:
            queried = _ASKS.fullmatch(token.content)
            if queried is None:
                raise ValueError(f"{name}: {token.content!r} is no comment that the tests know")
        elif token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + 1 + (token.type == "fence")
            notes = queried.groupdict("") if queried else {}
            queried = None
            language = token.info.strip() or "commands"
            yield Block(f"{name}:{line}", language, token.content, **notes)
        elif queried is not None:
            raise ValueError(f"{name}: behind {queried[0]!r} stands no code block")
    if queried is not None:
        raise ValueError(f"{name}: behind {queried[0]!r} stands no code block")


def inline_code(path: Path) -> Iterator[str]:
    """What stands in backquotes in a page's running text and tables."""
    for token in tokens_of(path):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages, in order."""
    return [b for path in pages() for b in blocks_of(path) if b.language in languages]
