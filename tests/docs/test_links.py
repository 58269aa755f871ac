"""Links of the README, of docs/ and beside them lead to files and headings that are there."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages, tokens_of

MORE = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


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


def test_links_and_anchors_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What's `x` (Fig. 1)?\n\n[a](b.md#c) ![d](e.png) [out](https://h/x) [here](#y)\n\n"
        "```\n[no](no.md)\n```\n"
    )
    assert links_of(page) == ["b.md#c", "e.png", "#y"]
    assert anchors_of(page) == {"whats-x-fig-1"}
