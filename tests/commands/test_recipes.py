from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.commands.recipes import recipe_files, recipes

NAMES = sorted(path.stem for path in Path(__file__).parents[2].glob("callbacks/*.yaml"))


def test_all_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    assert list(recipes()) == NAMES
    assert len(NAMES) > 10
    for name, what in recipes().items():
        assert f"{name} " in said
        assert 20 < len(what) < 200
        assert what.endswith(".")
    assert max(map(len, said.splitlines())) < 80


def test_copies_are_what_the_package_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "configs"
    for _ in range(2):  # what is there and the same is no obstacle
        assert main(["recipes", "leakage", "gate_leakage.yaml", "--to", str(to)]) == 0
    assert sorted(p.name for p in to.iterdir()) == ["gate_leakage.yaml", "leakage.yaml"]
    assert (to / "leakage.yaml").read_bytes() == recipe_files()["leakage"].read_bytes()
    assert str(to / "leakage.yaml") in capsys.readouterr().out


def test_a_file_of_the_users_own_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "leakage.yaml"
    own.write_text("mine: 1\n")
    assert main(["recipes", "dp_sgd", "leakage", "--to", str(tmp_path)]) == 1
    assert "differs from the recipe" in capsys.readouterr().err
    assert own.read_text() == "mine: 1\n"
    assert list(tmp_path.iterdir()) == [own]


def test_a_name_that_none_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "word_leakge", "dp", "--to", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said == "fedleak: no such recipe: 'word_leakge' (did you mean 'word_leakage'?), 'dp'.\n"
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys\n"
        "from lightning_fedleak.cli import main\n"
        "main(['recipes'])\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
