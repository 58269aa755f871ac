from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.cli.command_line import recipe_files, with_configs

FOLDER = Path(__file__).parents[2] / "callbacks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_every_recipe_is_found_and_begins_with_what_it_does() -> None:
    assert list(recipe_files()) == NAMES
    assert NAMES == ["dp_sgd", "gate_leakage", "leakage", "memorization"]
    for path in recipe_files().values():
        assert path.read_text(encoding="utf-8").startswith("# ")


def test_a_recipe_stands_for_its_file_in_its_place() -> None:
    leakage, gate = (str(recipe_files()[name]) for name in ("leakage", "gate_leakage"))
    arguments = ["fit", "--recipe", "leakage", "--config", "run.yaml", "--recipe=gate_leakage.yaml"]
    expected = ["fit", "--config", leakage, "--config", "run.yaml", "--config", gate]
    assert with_configs(arguments) == expected


@pytest.mark.parametrize("words", [["--recipe", "leakge"], ["--recipe=leakge"]])
def test_a_wrong_name_is_answered_with_the_names_and_their_folder(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "fedleak: no such recipe: 'leakge' (did you mean 'leakage'?). There are "
    )
    assert all(name in error for name in NAMES)
    assert str(FOLDER) in error or "recipes" in error


def test_a_recipe_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe"]) == 1
    assert "no such recipe: ''" in capsys.readouterr().err
