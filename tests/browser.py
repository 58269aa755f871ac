"""Chromium without a window, and what axe-core finds on a page. Skips where one is not there."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = 390, 1280
"""Widths in pixels."""
_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_COUNTED = ("moderate", "serious", "critical")
_RUN = """
addEventListener("load", () => setTimeout(async () => {
  const found = await axe.run(document, {iframes: false});
  const shown = found.violations.map(one => (
    {id: one.id, impact: one.impact, nodes: one.nodes.map(node => node.html.slice(0, 160))}));
  parent.postMessage(JSON.stringify(shown), "*");
}, 500));
"""
_FRAME = """<!doctype html><html lang="en"><title>frame</title><pre id="found"></pre>
<iframe src="{page}" style="width: {width}px; height: 2000px; border: 0"></iframe><script>
addEventListener("message", (e) => {{ document.getElementById("found").textContent = e.data }});
</script></html>"""


def axe_core() -> Path:
    """The program of axe-core, of the package axe-core-python."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core is not there: pip install axe-core-python")
    return Path(spec.origin).parent / "axe.min.js"


def elements(address: str, folder: Path) -> str:
    """Return the HTML of a page 20 seconds of its clock after it was opened.

    Args:
        address: of the page.
        folder: for what Chromium keeps.
    """
    if not _CHROMIUM:
        pytest.skip("chromium is not on the PATH")
    shown = subprocess.run(
        [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
         "--window-size=1280,1600", "--allow-file-access-from-files", f"--user-data-dir={folder}",
         "--dump-dom", address],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return shown.stdout


def violations(page: Path, width: int, folder: Path, *, dark: bool = False) -> list[dict[str, Any]]:
    """Return the violations of a page that is shown so wide, but for minor ones.

    The page is copied beside itself with axe-core in it, and shown in a frame: a window of
    Chromium has a least width, a frame has none.

    Args:
        page: file of HTML; files that it loads lie beside it.
        width: in pixels.
        folder: for what Chromium keeps.
        dark: whether the reader asked for dark colours.
    """
    program = axe_core()
    shutil.copy(program, page.parent / "axe.min.js")
    (page.parent / "run_axe.js").write_text(_RUN, encoding="utf-8")
    text = re.sub(
        r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text("utf-8")
    )
    assert "</body>" in text
    scripts = '<script src="axe.min.js"></script><script src="run_axe.js"></script></body>'
    tested = page.with_name(f"axe_{page.name}")
    tested.write_text(text.replace("</body>", scripts), encoding="utf-8")
    frame = page.with_name("axe_frame.html")
    frame.write_text(_FRAME.format(page=tested.name, width=width), encoding="utf-8")
    shown = elements(frame.absolute().as_uri(), folder)
    told = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert told is not None
    assert told[1], "axe-core gave no result"
    found: list[dict[str, Any]] = json.loads(html.unescape(told[1]))
    return [one for one in found if one["impact"] in _COUNTED]
