"""What `mkdocs build` does beyond its settings: links that leave docs/, and no host that is asked.

A page may link to a file of the repository, `../examples/lora.py` say. The site does not hold that
file, so the link becomes its text and the file's name. What was built is then read: a page that
would load anything from another host fails the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_UP = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)[^)]*\)")
_COMMENT = re.compile(r"^<!-- test: .*? -->\n", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":[a-z]+:<code>~?([\w.]+)</code>")
_INLINE = re.compile(r"<code>([^<\n]*/[^<\n]*)</code>")
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_IN_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", re.IGNORECASE)
_ATTRIBUTES = ("src", "srcset", "poster", "data", "background")
_LINKS = {"stylesheet", "icon", "manifest", "preload", "prefetch", "modulepreload", "preconnect"}
_LINKS |= {"dns-prefetch", "apple-touch-icon", "shortcut"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as the site shows it."""
    folder = posixpath.dirname(page.file.src_uri)

    def named(link: re.Match[str]) -> str:
        label, target = link.groups()
        file = posixpath.normpath(posixpath.join(folder, target))
        if not file.startswith("../"):
            return link[0]
        file = file.removeprefix("../")
        if label.strip("`") in file:
            return f"`{file}`"
        return label if file in label else f"{label} (`{file}`)"

    parts = _FENCE.split(_COMMENT.sub("", markdown))
    parts[::2] = [_UP.sub(named, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """The page with names where docstrings hold roles of Sphinx, linked where the site has them.

    Names in the logs are long: on a narrow screen they break behind a slash. Code that is wider
    than the screen can be scrolled by keyboard.
    """
    broken = _INLINE.sub(lambda code: f"<code>{code[1].replace('/', '/<wbr>')}</code>", html)
    broken = broken.replace("<pre><span></span><code>", '<pre><span></span><code tabindex="0">')
    return _ROLE.sub(_reference, broken)


def on_post_page(output: str, **_: Any) -> str:
    """The page with a name for the theme's search, for those who cannot see it."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _reference(role: re.Match[str]) -> str:
    name = role[1].rpartition(".")[2]
    return f'<autoref optional identifier="{role[1]}"><code>{name}</code></autoref>'


def on_post_build(config: Any, **_: Any) -> None:
    """End the build if a page would load something from another host.

    Raises:
        RuntimeError: names the pages and the addresses.
    """
    requests = [
        f"{file.relative_to(config.site_dir)}: {address}"
        for file in sorted(Path(config.site_dir).rglob("*"))
        if file.suffix in (".html", ".css", ".svg")
        for address in external_requests(file.read_text(encoding="utf-8"), file.suffix)
    ]
    if requests:
        raise RuntimeError("the site would load from other hosts:\n  " + "\n  ".join(requests))


def external_requests(text: str, suffix: str) -> list[str]:
    """Return what a browser that opens a file would load from other hosts.

    Links that a reader may follow do not count. A diagram in Mermaid counts: the theme fetches its
    program.

    Args:
        text: of the file.
        suffix: `.html`, `.svg` or `.css`.
    """
    if suffix == ".css":
        return list(_in_css(text))
    page = _Page()
    page.feed(text)
    page.close()
    return page.requests


def _in_css(text: str) -> Iterator[str]:
    for found in _IN_CSS.finditer(text):
        address = found[1] or found[2]
        if _ELSEWHERE.match(address):
            yield address


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        addresses = [values[name] for name in _ATTRIBUTES if name in values]
        if tag == "link" and _LINKS & set(values.get("rel", "").lower().split()):
            addresses.append(values.get("href", ""))
        if tag in ("image", "use"):  # of SVG
            addresses += [values[name] for name in ("href", "xlink:href") if name in values]
        self.requests += [
            address
            for value in addresses
            for address in value.replace(",", " ").split()
            if _ELSEWHERE.match(address)
        ]
        self.requests += _in_css(values.get("style", ""))
        if "mermaid" in values.get("class", "").split():
            self.requests.append("a diagram in Mermaid")
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.requests += _in_css(data)
