"""Sentences of the README and of docs/ are short."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, pages

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


def test_code_is_one_word_and_tables_code_and_headings_are_left_out() -> None:
    text = "# No\n\nSee Fig. 1\nof `a.b c`. (It is.) So\n\n```\nno\n```\n\n- a b\n\n| no |\n|---|\n"
    assert [words(s) for s in sentences(text)] == [5, 2, 1, 2]
