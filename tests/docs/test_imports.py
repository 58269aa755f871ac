"""Every name that a snippet imports is at the root, which is the one way to write it."""

from __future__ import annotations

import ast

import pytest

import lightning_fedleak
from lightning_fedleak.extras import homes_of
from tests.docs.blocks import blocks_of, pages

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
