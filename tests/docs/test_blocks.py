"""The reader of code blocks; what it reads is run by the tests beside this one."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, inline_code, pages

RUN = {"python", "commands", "bash", "yaml", "toml"}
NOT_RUN = {"text"}  # diagrams, and what a command prints
SKIPS = 12  # four of Flower, four of NVFlare, one each of bitsandbytes and TRL: installed apart


def read(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return list(blocks_of(path))


def test_every_block_of_every_page_is_run_or_is_no_code():
    for path in pages():
        for block in blocks_of(path):
            assert block.language in RUN | NOT_RUN, block.place


def test_few_blocks_are_skipped():
    assert len([b for path in pages() for b in blocks_of(path) if b.skip]) <= SKIPS


def test_blocks_and_what_is_asked_of_them(tmp_path):
    results = read(
        tmp_path,
        "Text\n\n<!-- test: setup=own -->\n```python\nx\n```\n\n    make y\n\n"
        "- in a list:\n\n  <!-- test: skip (no (such) thing) -->\n  ```text\n  z\n  ```\n",
    )
    assert results == [
        Block("page.md:5", "python", "x\n", setup="own"),
        Block("page.md:8", "commands", "make y\n"),
        Block("page.md:14", "text", "z\n", skip="no (such) thing"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- test: skip -->\n```\nx\n```\n",
        "<!-- test: setup=a b -->\n```\nx\n```\n",
        "<!-- test: setup=a -->\n\nText\n\n```\nx\n```\n",
        "<!-- test: setup=a -->\n",
    ],
)
def test_what_is_not_understood_is_told(tmp_path, text):
    with pytest.raises(ValueError, match="test:"):
        read(tmp_path, text)


def test_code_in_text_and_tables(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# `a`\n\nText `b c` and\n[`d`](x.md).\n\n| `e` |\n|---|\n| `f` |\n")
    assert list(inline_code(path)) == ["a", "b c", "d", "e", "f"]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_pages_name_are_there(path):
    for code in inline_code(path):
        first = code.split()[0] if code.split() else ""
        if first.startswith(("examples/", "benchmarks/", "tests/", "docs/", "lightning_fedleak/")):
            assert (ROOT / first).exists(), code
