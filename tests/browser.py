"""Chromium without a window, and what axe-core finds on a page. Skips where one is not there."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = 390, 1280
"""Widths in pixels."""
_SHOWN = ((PHONE, "light"), (DESKTOP, "light"), (DESKTOP, "dark"))
_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_COUNTED = ("moderate", "serious", "critical")
_RUN = """
addEventListener("load", () => setTimeout(async () => {
  const found = await axe.run(document, {iframes: false});
  const shown = found.violations.map(one => (
    {id: one.id, impact: one.impact, nodes: one.nodes.map(node => node.html.slice(0, 160))}));
  parent.postMessage([window.name, shown], "*");
}, 500));
"""
# Else a page would take over which colours another one was shown in.
_FORGETFUL = """<script>
Object.defineProperty(window, "localStorage", {value: {getItem: () => null, setItem: () => {}}});
</script>"""
_FRAME = (
    '<iframe name="{name}" src="{page}" style="width: {width}px; color-scheme: {scheme}"></iframe>'
)
_FRAMES = """<!doctype html><html lang="en"><title>frames</title><pre id="found"></pre>
<style>iframe {{ height: 2000px; border: 0 }}</style>{frames}<script>
const told = {{}};
addEventListener("message", (e) => {{
  told[e.data[0]] = e.data[1];
  document.getElementById("found").textContent = JSON.stringify(told);
}});
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


def violations(pages: Sequence[Path], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the violations of pages, but for minor ones: narrow, wide, and wide and dark.

    Each page is copied beside itself with axe-core in it, and shown in frames, all in one window: a
    window of Chromium has a least width, a frame has none.

    Args:
        pages: files of HTML, in the first one's folder or below; what they load is there.
        folder: for what Chromium keeps.

    Returns:
        By page, width and colours, as in ``"index 390 light"``.
    """
    root, program, frames = pages[0].parent, axe_core(), []
    for page in pages:
        shutil.copy(program, page.parent / "axe.min.js")
        (page.parent / "run_axe.js").write_text(_RUN, encoding="utf-8")
        text = re.sub(
            r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text("utf-8")
        )
        assert "</body>" in text
        scripts = '<script src="axe.min.js"></script><script src="run_axe.js"></script></body>'
        tested = page.with_name(f"axe_{page.name}")
        text = text.replace("<head>", f"<head>{_FORGETFUL}").replace("</body>", scripts)
        tested.write_text(text, encoding="utf-8")
        for width, scheme in _SHOWN:
            name = f"{page.relative_to(root).with_suffix('')} {width} {scheme}"
            source = tested.relative_to(root)
            frames.append(_FRAME.format(name=name, page=source, width=width, scheme=scheme))
    shown_in = root / "axe_frames.html"
    shown_in.write_text(_FRAMES.format(frames="".join(frames)), encoding="utf-8")
    shown = elements(shown_in.absolute().as_uri(), folder)
    told = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert told is not None
    found: dict[str, list[dict[str, Any]]] = json.loads(html.unescape(told[1] or "{}"))
    assert len(found) == len(frames), f"axe-core gave {len(found)} of {len(frames)} results"
    return {
        name: [one for one in ones if one["impact"] in _COUNTED] for name, ones in found.items()
    }
