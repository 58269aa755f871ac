"""The parser of code blocks in pages. The other tests of this folder run the blocks."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, inline_code, pages

RUN = {"python", "commands", "bash", "yaml", "toml"}
NOT_RUN = {"text"}  # diagrams, and the output of commands
# The most blocks that may be skipped: those of Flower, NVFlare, bitsandbytes and TRL, which are
# installed in other environments.
MAX_SKIPS = 12


def read(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return list(blocks_of(path))


def test_every_block_has_a_language_that_tests_know():
    for path in pages():
        for block in blocks_of(path):
            assert block.language in RUN | NOT_RUN, block.place


def test_pages_skip_at_most_12_blocks():
    assert len([b for path in pages() for b in blocks_of(path) if b.skip]) <= MAX_SKIPS


def test_blocks_of_yields_language_text_setup_and_skip(tmp_path):
    blocks = read(
        tmp_path,
        "Text\n\n<!-- test: setup=own -->\n```python\nx\n```\n\n    make y\n\n"
        "- in a list:\n\n  <!-- test: skip (no (such) thing) -->\n  ```text\n  z\n  ```\n",
    )
    assert blocks == [
        Block("page.md:5", "python", "x\n", setup="own"),
        Block("page.md:8", "commands", "make y\n"),
        Block("page.md:14", "text", "z\n", skip="no (such) thing"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<!-- test: skip -->\n```\nx\n```\n", id="skip without a reason"),
        pytest.param("<!-- test: setup=a b -->\n```\nx\n```\n", id="setup of two words"),
        pytest.param("<!-- test: setup=a -->\n\nText\n\n```\nx\n```\n", id="text before block"),
        pytest.param("<!-- test: setup=a -->\n", id="no block"),
    ],
)
def test_blocks_of_raises_for_invalid_test_comment(tmp_path, text):
    with pytest.raises(ValueError, match="test:"):
        read(tmp_path, text)


def test_inline_code_yields_code_of_text_and_tables(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# `a`\n\nText `b c` and\n[`d`](x.md).\n\n| `e` |\n|---|\n| `f` |\n")
    assert list(inline_code(path)) == ["a", "b c", "d", "e", "f"]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_pages_exist(path):
    for code in inline_code(path):
        first = code.split()[0] if code.split() else ""
        if first.startswith(("examples/", "benchmarks/", "tests/", "docs/", "lightning_fedleak/")):
            assert (ROOT / first).exists(), code
