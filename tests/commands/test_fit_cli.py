"""The errors of `fedleak fit`, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedleak import cli
from lightning_fedleak.cli import command_line


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
