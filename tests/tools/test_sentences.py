"""Sentences of the README and of docs/ are short, and the counter counts as it says."""

import pytest

from tests.tools.sentences import MOST, ROOT, pages, read, sentences


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path):
    page = read(path)
    longest = max(page.sentences, key=lambda s: s.words, default=None)
    told = f"{page.name}: {page.mean:.1f} words a sentence; the longest: {longest}"
    assert page.mean <= MOST, f"{told}. See python -m tests.tools.sentences {page.name}"


def counted(markdown):
    return {s.text: s.words for s in sentences(markdown)}


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("One two. Three four five.", {"One two.": 2, "Three four five.": 3}),
        ("It is .5 or 3.5\nof all. `a.b c` is.", {"It is .5 or 3.5 of all.": 7, "`a.b c` is.": 2}),
        ("By Vu et al. 2024 (Fig. 1), so.", {"By Vu et al. 2024 (Fig. 1), so.": 8}),
        ("A [link here](x.md) is *its* text -- no.", {"A link here is its text -- no.": 7}),
        ("Why? (It is.) **So** be it!", {"Why?": 1, "(It is.)": 2, "So be it!": 3}),
        ("- a b\n- c. D\n\n  five", {"a b": 2, "c.": 1, "D": 1, "five": 1}),
        ("# No\n\nYes: so\n\n```\nno no\n```\n\n    no\n\n| no |\n|---|\n| no |\n", {"Yes: so": 2}),
        ("![no](no.png)\n\n<!-- no -->\n\n::: no.no\n\n> Yes", {"Yes": 1}),
    ],
)
def test_what_is_counted(markdown, expected):
    assert counted(markdown) == expected


def test_the_line_is_that_of_the_paragraph():
    assert [s.line for s in sentences("# A\n\nB c.\nD.\n\nE")] == [3, 3, 6]
