"""What the site shows, and that it loads nothing from other hosts. `make docs` builds it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import lightning_fedleak
from tests.docs.blocks import ROOT, pages

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
