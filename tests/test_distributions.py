"""What a wheel and an sdist hold, built as pip builds them, from a copy of this folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_fedleak"
COPIED = ("lightning_fedleak", "tests", "benchmarks", "examples", "docs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Names in the sdist, and in the wheel that is built from that sdist."""
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
        names = {name.partition("/")[2] for name in held.getnames()}
    _build("wheel", folder / archive.name.removesuffix(".tar.gz"), out)
    [wheel] = out.glob("*.whl")
    return names, set(zipfile.ZipFile(wheel).namelist())


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


def test_the_wheel_holds_the_package_whole_and_nothing_else(
    built: tuple[set[str], set[str]],
) -> None:
    _, wheel = built
    own = {name for name in wheel if not name.partition("/")[0].endswith(".dist-info")}
    assert own == _under(PACKAGE)
    assert "lightning_fedleak/recipes/word_leakage.yaml" in own
    assert "lightning_fedleak/finetuning/model/model.safetensors" in own


def test_the_sdist_holds_what_its_tests_need(built: tuple[set[str], set[str]]) -> None:
    sdist, _ = built
    for name in COPIED:
        assert _under(ROOT / name) <= sdist
    for name in ("README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"):
        assert name in sdist


def test_the_old_place_of_the_recipes_leads_to_them() -> None:
    old = ROOT / "callbacks"
    if not old.exists():
        pytest.skip("an sdist has no links")
    assert old.resolve() == PACKAGE / "recipes"
