"""What a wheel and an sdist hold, built as pip builds them; and the extras that are named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import lightning_fedleak
from lightning_fedleak import extras

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]
PACKAGE, RECIPES = ROOT / "lightning_fedleak", ROOT / "callbacks"
COPIED = ("lightning_fedleak", "callbacks", "tools", "tests", "benchmarks", "examples", "docs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    source, out = folder / "source", folder / "out"
    out.mkdir()
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif path.name in COPIED:
            shutil.copytree(path, source / path.name, ignore=LEFT_OUT)
    _build("sdist", source, out)
    [archive] = out.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(folder, filter="data")
    _build("wheel", folder / archive.name.removesuffix(".tar.gz"), out)
    [wheel] = out.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def built(distributions: tuple[Path, Path]) -> tuple[set[str], set[str]]:
    """Names in both."""
    archive, wheel = distributions
    with tarfile.open(archive) as sdist, zipfile.ZipFile(wheel) as wheel_file:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        return names, set(wheel_file.namelist())


def _build(kind: str, folder: Path, out: Path) -> None:
    code = f"from setuptools import build_meta as b; b.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


def _under(folder: Path) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_whole_and_nothing_else(built) -> None:
    _, wheel = built
    own = {name for name in wheel if not name.partition("/")[0].endswith(".dist-info")}
    recipes = {name.replace("callbacks", "lightning_fedleak/recipes") for name in _under(RECIPES)}
    assert own == _under(PACKAGE) | recipes
    assert "lightning_fedleak/recipes/leakage.yaml" in own
    assert "lightning_fedleak/cli/finetuning/model/model.safetensors" in own


def test_the_sdist_holds_what_its_tests_need(built: tuple[set[str], set[str]]) -> None:
    sdist, _ = built
    for name in COPIED:
        assert _under(ROOT / name) <= sdist
    for name in ("README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"):
        assert name in sdist


def test_links_of_the_readme() -> None:
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (
        "![a picture](docs/a.png)\n\nSee ([measured](docs/b.md#c)), [b](docs/b.md), "
        "[docs/b.md](docs/b.md), [below](#c), [out](https://host/x).\n"
        "![out](https://host/x.png)\n```\n[0](1)\n```\n"
    )
    plain = module.for_the_index(text, {})
    assert plain == (
        "See (measured: `docs/b.md`), b (`docs/b.md`), docs/b.md, below, [out](https://host/x).\n"
        "![out](https://host/x.png)\n```\n[0](1)\n```\n"
    )
    whole = module.for_the_index(text, {"Repository": "https://host/r/"})
    assert "![a picture](https://host/r/raw/HEAD/docs/a.png)\n\nSee" in whole
    assert "([measured](https://host/r/blob/HEAD/docs/b.md#c))" in whole
    assert "[below](https://host/r#c)" in whole


def test_what_stands_beside_the_code_agrees_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert lightning_fedleak.__version__ == project["version"]
    assert cited["authors"] == project["authors"] == [{"name": "the lightning-fedleak authors"}]
    if not (ROOT / ".github").exists():
        pytest.skip("an sdist has none")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [s["run"] for job in workflow["jobs"].values() for s in job["steps"] if "run" in s]
    assert commands[0] == ".ci/run"
    makefile = (ROOT / "Makefile").read_text()
    for command in commands[1:]:
        assert re.search(rf"^{command.removeprefix('make ')}: ", makefile, re.MULTILINE), command
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, head, _ = template.read_text().split("---\n", 2)
        assert yaml.safe_load(head).keys() == {"name", "about", "labels"}


@pytest.mark.parametrize("kind", ["wheel", "editable", "none"])
def test_recipes_are_read_wherever_the_package_is(kind, distributions, tmp_path) -> None:
    _, wheel = distributions
    folder = source = wheel.parents[1] / "source"
    if kind == "editable":
        _build("editable", source, tmp_path)
        [wheel] = tmp_path.glob("*.whl")
    if kind != "none":
        folder = tmp_path / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    code = (
        f"import site, sys; sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(folder)!r})\n"
        "from lightning_fedleak.cli.command_line import recipe_files\n"
        "print(recipe_files()['leakage'], len(recipe_files()))"
    )
    # Without what is installed beside, which may hold this package too.
    python = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    place = {"wheel": folder / "lightning_fedleak" / "recipes"}.get(kind, source / "callbacks")
    assert done.stdout.split() == [str(place / "leakage.yaml"), "4"]


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
def test_an_extra_comes_from_where_the_package_came(noted, command, monkeypatch) -> None:
    text = None if noted is None else json.dumps(noted)
    monkeypatch.setattr(
        extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
    )
    assert extras.install("cli") == command


def test_a_package_that_is_not_installed_comes_from_its_folder(monkeypatch) -> None:
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
