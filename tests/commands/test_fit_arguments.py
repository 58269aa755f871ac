"""What `fedleak fit` says of names that nothing has."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedleak import cli
from lightning_fedleak.cli.commands import fit_arguments
from lightning_fedleak.cli.commands.fit_arguments import check_files, misspelt
from lightning_fedleak.cli.finetuning.assets import SourceError

NAMES = {
    "config",
    "trainer",
    "trainer.callbacks",
    "trainer.max_steps",
    "trainer.strategy",
    "data",
    "data.text",
    "data.length",
    "model",
    "model.lr",
}
WRONG = """
trainer:
  max_step: 2
  callbacks+:
    - class_path: lightning_fedleak.callbacks.LeakageMonitor
      init_args:
        every_n_step: 1
        games:
          targetts: 2
        attacks:
          - class_path: lightning_fedleak.attacks.FlatChatt
            init_args:
              public_txt: sampled
    - class_path: RiskGte
  strategy:
    class_path: lightning_fedleak.strategy.DefendedStrategy
data:
  lenght: 32
modle:
  lr: 1.0e-3
"""
RIGHT = """
seed_everything: 0
trainer:
  max_steps: 2
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: lightning_fedleak.LeakageMonitor
      init_args: {every_n_steps: 2}
    - class_path: RiskGate
      init_args: {metric: leakage/a/f1, at_most: 0.5}
  strategy:
    class_path: lightning_fedleak.strategies.DefendedStrategy
    init_args:
      strategy: auto
      defenses:
        - class_path: lightning_fedleak.defenses.GradientNoise
          init_args: {clip: 1.0, sigma: 0.1}
data: {text: null, length: 8}
"""


def test_all_names_are_told_at_once_each_with_its_nearest(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRONG)
    told = misspelt(["--config", str(path), "--trainer.max_stepp=3", "--data.txt", "x"], NAMES)
    where = "of LeakageMonitor at trainer.callbacks.0"
    first = "class 'lightning_fedleak.attacks.FlatChatt'"
    assert told == [
        "'trainer.max_step' (did you mean 'max_steps'?)",
        f"'every_n_step' (did you mean 'every_n_steps'?) {where}",
        f"'games.targetts' (did you mean 'targets'?) {where}",
        f"{first} at attacks.0 (did you mean 'FlatChat'?) {where}",
        f"'public_txt' (did you mean 'public_text'?) of FlatChat at attacks.0 {where}",
        "class 'RiskGte' at trainer.callbacks.1 (did you mean 'RiskGate'?)",
        "class 'lightning_fedleak.strategy.DefendedStrategy' at trainer.strategy (there is no "
        "module 'lightning_fedleak.strategy')",
        "'data.lenght' (did you mean 'length'?)",
        "'modle' (did you mean 'model'?)",
        "'--trainer.max_stepp' (did you mean '--trainer.max_steps'?)",
        "'--data.txt' (did you mean '--data.text'?)",
    ]


def test_what_is_right_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RIGHT)
    arguments = [f"--config={path}", "--data.length", "3", "--trainer.strategy=ddp"]
    arguments += ["--trainer.callbacks+=LeakageMonitor", "--trainer.callbacks.every_n_steps=5"]
    arguments += ["--trainer.callbacks+=RiskGate", "--trainer.callbacks.init_args.at_most=0.5"]
    arguments += ["--config", str(tmp_path / "absent.yaml")]
    assert misspelt(arguments, NAMES | {"seed_everything"}) == []


def test_classes_that_the_package_imports_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_fedleak.LeakageMonitr\n"
        "    - class_path: lightning_fedleak.RiskGate\n      init_args: {atmost: 1}\n"
    )
    assert misspelt(["--config", str(path)], NAMES) == [
        "class 'lightning_fedleak.LeakageMonitr' at trainer.callbacks.0 (did you mean "
        "'LeakageMonitor'?)",
        "'atmost' (did you mean 'at_most'?) of RiskGate at trainer.callbacks.1",
    ]


def test_settings_of_classes_on_the_command_line() -> None:
    arguments = ["--trainer.callbacks=RiskGate", "--trainer.callbacks.at_mots=1"]
    assert misspelt(arguments, NAMES) == [
        "'--trainer.callbacks.at_mots' (did you mean 'at_most'?) of RiskGate"
    ]
    assert misspelt(["--trainer.callbacks+=LeakageMonitr"], NAMES) == [
        "class 'LeakageMonitr' at --trainer.callbacks (did you mean 'LeakageMonitor'?)"
    ]


def test_files_that_are_not_there_are_told_by_the_last_word(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {model: ./nomodel}\ndata: {text: a.csv}\n")
    with pytest.raises(SourceError, match=r"no folder './nomodel'"):
        check_files(["--config", str(config)])
    check_files(["--config", str(config), "--model.model=null", "--data.text", "null"])
    with pytest.raises(SourceError, match=r"no file '.*rum\.yaml' .* did you mean 'run\.yaml'"):
        check_files([f"--config={tmp_path / 'rum.yaml'}"])
    table = tmp_path / "t.csv"
    table.write_text("id,review\n1,x\n")
    with pytest.raises(SourceError, match=r"name one with data\.column="):
        check_files([f"--data.text={table}"])
    check_files([f"--data.text={table}", "--data.column=review"])


def test_what_is_no_config_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a config is given as --config run\.yaml"):
        check_files(["run.yaml", "--data.length=3"])
    config = tmp_path / "run.yaml"
    config.write_text("data:\n\ttext: private\n")
    with pytest.raises(SourceError, match=r"run\.yaml', line 2 is not YAML: ") as error:
        check_files(["--config", str(config)])
    assert "private" not in str(error.value)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """What is said of a run that cannot start."""
    off = ["--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    assert cli.main(["fit", *arguments, *off]) == 1
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["fedleak"])
    monkeypatch.chdir(tmp_path)


def test_the_command_ends_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRONG)
    said = fails(["--config", str(path)], capsys, tmp_path)
    assert said.startswith("fedleak: no such settings: 'trainer.max_step' (did you")
    assert said.count("did you mean") == 8
    assert said.count("\n") == 1
    said = fails(["--data.lenght=3"], capsys, tmp_path)
    assert said == (
        "fedleak: no such setting: '--data.lenght' (did you mean '--data.length'?). 'fedleak fit "
        "--help' lists the settings.\n"
    )
    said = fails(["--data.length=abc"], capsys, tmp_path)
    assert '"data.length"' in said
    assert "abc" in said
    assert said.count("\n") == 1


def test_a_value_that_is_refused_is_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = fails(["--data.batch_size=0", "--trainer.max_steps=1"], capsys, tmp_path)
    assert said.splitlines()[-1] == "fedleak: batch_size must be an integer of at least 1, got 0"


def test_what_a_callback_refuses_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_fedleak.callbacks.RiskGate\n"
        "      init_args: {metric: leakage/worst/words, at_most: 30}\n"
    )
    said = fails(["--config", str(config)], capsys, tmp_path).splitlines()[-1]
    assert said.startswith("fedleak: RiskGate watches 'leakage/worst/words', which lies between")
    assert "subclass" not in said


def test_errors_that_others_raise_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        int("x")

    monkeypatch.setattr(fit_arguments, "check_files", broken)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["fit"])
