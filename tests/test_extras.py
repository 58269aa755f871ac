from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_fedleak import extras

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'lightning-fedleak[cli]'"),
        ({"url": "file:///a%20b/c", "dir_info": {}}, "pip install '/a b/c[cli]'"),
        ({"url": "file:///c", "dir_info": {"editable": True}}, "pip install -e '/c[cli]'"),
        (
            {"url": "file:///c.whl", "archive_info": {}},
            "pip install 'lightning-fedleak[cli] @ file:///c.whl'",
        ),
        (
            {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'lightning-fedleak[cli] @ git+https://host/r.git@ab12'",
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_came(
    noted: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if noted is None else json.dumps(noted)
    monkeypatch.setattr(
        extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
    )
    assert extras.install("cli") == command


def test_a_package_that_is_not_installed_comes_from_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install("dp").startswith("pip install '.[dp]' in the folder")


def test_every_extra_that_a_message_names_exists() -> None:
    named = {
        extra
        for path in (ROOT / "lightning_fedleak").rglob("*.py")
        for extra in re.findall(r"\b(?:install|require_package)\(['\"](\w+)['\"]", path.read_text())
    }
    assert {"cli", "demo", "datasets", "dp", "peft"} <= named
    assert named <= EXTRAS.keys()
    spelled = [
        path
        for path in (ROOT / "lightning_fedleak").rglob("*.py")
        if "pip install 'lightning-fedleak" in path.read_text()
    ]
    assert spelled == []


def test_the_docs_name_every_extra_that_a_message_may_name() -> None:
    assert "[extras](docs/install.md)" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    shown = page[page.index("## Extras") :]
    for extra in EXTRAS.keys() - {"test", "dev", "docs"}:
        assert f"| `{extra}` |" in shown, extra
