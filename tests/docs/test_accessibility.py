"""axe-core finds nothing serious on the site of docs/, on a phone and on a desktop."""

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


@pytest.mark.parametrize("width", [browser.PHONE, browser.DESKTOP])
@pytest.mark.parametrize("name", ["index", "dpsgd", "report", "api/callbacks"])
def test_axe_finds_nothing_serious_on_the_site(site, tmp_path, name, width):
    for dark in (False, True):
        results = browser.violations(site / f"{name}.html", width, tmp_path, dark=dark)
        assert [one for one in results if one["impact"] != "moderate"] == []
