"""`fedleak fit`: its errors in one line each, and the recipes."""

from pathlib import Path

import pytest

from lightning_fedleak import cli
from lightning_fedleak.cli import command_line, main
from lightning_fedleak.cli.command_line import recipe_files, with_configs


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """Return the error of a run that cannot start."""
    disabled = ["--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    assert cli.main(["fit", *arguments, *disabled]) == 1
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["fedleak"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.lenght=3", ["lenght", "'fedleak fit --print_config' shows all settings"]),
        ("--data.length=abc", ['"data.length"', "abc"]),
        ("--trainer.callbacks=RiskGte", ["RiskGte"]),
        ("--config=rum.yaml", ["rum.yaml"]),
        ("--model.model=./nomodel", ["no folder './nomodel'"]),
        ("run.yaml", ["run.yaml"]),
        ("--data.batch_size=0", ["batch_size must be an integer of at least 1, got 0"]),
    ],
)
def test_a_wrong_setting_is_reported_in_one_line(
    argument: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    *_, line = fails([argument, "--trainer.max_steps=1"], capsys, tmp_path).splitlines()
    assert line.startswith("fedleak: ")
    assert all(word in line for word in words)


def test_the_error_of_a_callback_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_fedleak.callbacks.RiskGate\n"
        "      init_args: {metric: leakage/worst/words, at_most: 30}\n"
    )
    error = fails(["--config", str(config)], capsys, tmp_path).splitlines()[-1]
    assert error.startswith("fedleak: RiskGate watches 'leakage/worst/words', which is 0 by chance")
    assert "subclass" not in error


def test_errors_that_others_raise_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        int("x")

    monkeypatch.setattr(command_line, "with_configs", broken)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["fit"])


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
