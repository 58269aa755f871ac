from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import demo
from lightning_fedleak.cli.commands.options import parsers
from lightning_fedleak.extras import install


@pytest.mark.parametrize(
    ("arguments", "shown", "unloaded"),
    [
        (["--help"], "demo", "torch lightning transformers"),
        (["fit", "--data.length=3", "--help"], "--recipe NAME", "jsonargparse"),
    ],
)
def test_help_is_short_and_loads_no_library(arguments, shown, unloaded) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_fedleak", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("usage: fedleak ")
    assert shown in finished.stdout
    assert finished.stdout.count("\n") <= 60
    loaded = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "lightning_fedleak.cli" in loaded
    assert not loaded & {*unloaded.split()}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == version("lightning-fedleak")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "argument --steps: '0' is not a whole number of at least 1"),
        (["demo", "--length", "1"], "argument --length: '1' is not a whole number of at least 2"),
        (["demo", "--at-most", "1.5"], "argument --at-most: '1.5' is not a number from 0 to 1"),
        (["demo", "--lr", "inf"], "argument --lr: 'inf' is not a positive number"),
        (["demo", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
        (["demo", "--batchsize", "3"], "unrecognized arguments: --batchsize 3. See fedleak --help"),
        (["invrt"], "invalid choice: 'invrt'"),
        (["invert", "--attack", "prefx"], "invalid choice: 'prefx'"),
    ],
)
def test_numbers_out_of_range_and_wrong_names_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "nofile.txt"], "there is no file 'nofile.txt'"),
        (["invert", "--text", "./letters"], "there is no file './letters'"),
        (["invert", "--text", "t.csv"], "name one with column= (--column)"),
        (["invert", "--column", "review"], "has no column 'review'"),
        (["demo", "--model", "inside"], "could be loaded from 'inside'"),
        (["invert", "--model", "./nomodel"], "there is no folder './nomodel'"),
        (["invert", "--model", "."], "is no folder of a model (no config.json)"),
    ],
)
def test_missing_sources_are_reported_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("id,review\n1,x\n")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").touch()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedleak: ")
    assert message in error
    assert error.count("\n") == 1


def test_demo_without_tensorboard_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert install("demo") in capsys.readouterr().err


def test_an_interrupt_while_loading_is_no_traceback(monkeypatch, capsys) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("partly", [False, True])
def test_fit_without_jsonargparse_says_what_to_install(partly, monkeypatch, capsys) -> None:
    if partly:  # of jsonargparse[signatures] a part: Lightning's own error, which names no module
        message = "Requirement 'jsonargparse[signatures]>=4.27.7' not met"

        def refuses(*args: object, **settings: object) -> None:
            raise ModuleNotFoundError(message)

        monkeypatch.setattr("lightning_fedleak.cli.commands.fit._FitCLI", refuses)
    else:
        monkeypatch.setitem(sys.modules, "jsonargparse", None)
        monkeypatch.delitem(sys.modules, "lightning_fedleak.cli.commands.fit", raising=False)
    assert main(["fit"]) == 1
    assert install("cli") in capsys.readouterr().err


def test_every_option_has_a_help_text() -> None:
    for name, command in parsers()[1].items():
        assert all(action.help for action in command._actions), name
