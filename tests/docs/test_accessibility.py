"""axe-core finds nothing serious on the site of docs/, on a phone and a desktop, light and dark."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import browser

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it."""
    pytest.importorskip("material", reason="the site's theme is not there: make docs")
    pytest.importorskip("mkdocstrings", reason="what reads docstrings is not there: make docs")
    browser.axe_core()
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    return folder


def test_axe_finds_nothing_serious_on_the_site(site, tmp_path):
    names = ["index", "dpsgd", "report", "api"]
    found = browser.violations([site / f"{name}.html" for name in names], tmp_path)
    serious = {
        name: [one for one in ones if one["impact"] != "moderate"] for name, ones in found.items()
    }
    assert serious == {name: [] for name in found}
