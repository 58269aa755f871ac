from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.options import DEFENSES
from lightning_fedleak.cli.commands.sweep import SweepCommand, explain_defenses
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.names import SWEEP_ATTACKS
from lightning_fedleak.cli.studies.sweep.cell import run_cell
from lightning_fedleak.cli.studies.sweep.grid import CellResult, GridCell, Setting, _leakage
from lightning_fedleak.report.records import MetricValue, ResultLine
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(40)))
    return str(path)


def swept(command: SweepCommand, status: int = 0) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert command.run(console) == status
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_grid_is_run_written_plotted_and_gone_on_with(
    model: str, text: str, tmp_path: Path
) -> None:
    settings = {"model": model, "text": text, "steps": 4, "every_n_steps": 2, "length": 12}
    command = SweepCommand(
        defense=["none", "gradient_noise:clip=1e-6,sigma=5", "freeze:part=head"],
        attack=["flatchat", "fc"],
        out=tmp_path,
        **settings,  # type: ignore[arg-type]
    )
    printed = swept(command, status=1)
    rows = json.loads((tmp_path / "results.json").read_text())["cells"]
    none, noise, freeze = (row["result"] for row in rows)
    # The tiny model's head is tied: to freeze it alone is refused, and the others are not lost.
    assert "DefenseError" in freeze["error"]
    assert "freeze:part=head failed: DefenseError" in " ".join(printed.split())
    assert none["val_loss"] != noise["val_loss"]
    assert none["leakage"]["fc"]["value"] == 1
    assert none["leakage"]["fc"]["looks"] == 2
    assert 0.2 < noise["leakage"]["fc"]["value"] < 0.8
    assert none["leakage"]["flatchat"]["value"] > noise["leakage"]["flatchat"]["value"]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert f"{none['val_loss']:.3f}" in printed
    again = swept(command, status=1)
    assert "3 cells, 2 of them done before" in again
    assert "none: val loss" not in again


def test_what_the_package_warns_of_is_told(model: str, text: str, tmp_path: Path) -> None:
    (spec,) = parse_defenses("freeze:part=head+embeddings")
    setting = Setting(model=model, text=text, attacks=("flatchat",), steps=1, length=12)
    result = run_cell(GridCell(setting, spec), tmp_path)
    (told,) = result.warnings
    assert "which is not shared in this run" in told
    assert not result.leakage["flatchat"].exposed
    again = CellResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again == result
    assert f"{spec} warns: {told}" in explain_defenses([(GridCell(setting, spec), result)])


def test_the_command_line_and_the_class_agree(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(SweepCommand, "run", lambda self: seen.append(self) or 0)
    assert main(["sweep"]) == 0
    assert seen[0] == SweepCommand(defense=list(DEFENSES), attack=list(Setting.attacks))
    assert main(["sweep", "--attack", *SWEEP_ATTACKS]) == 0
    assert tuple(seen[1].attack) == SWEEP_ATTACKS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defense", "gradient_nose"], "did you mean 'gradient_noise'"),
        (["--layer", "9"], "the model has 2 blocks; give 0 to 2"),
        (["--text", "nowhere.txt"], "there is no file 'nowhere.txt'"),
    ],
)
def test_what_would_fail_everywhere_is_said_first(
    model: str,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", "--model", model, "--out", str(tmp_path), *options]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="name another folder with --out"):
        SweepCommand(model=model, out=tmp_path / "file" / "x").run()


def line(value: float | None, unknown: str | None = None, **more: float) -> ResultLine:
    metrics = {"f1": MetricValue(value, 0.1, 0.9)}
    metrics |= {name: MetricValue(v) for name, v in more.items()}
    return ResultLine(
        step=0, stage="shared", attack="a", exposed=True, metrics=metrics, unknown=unknown
    )


def test_unknown_looks_are_in_no_mean_and_are_told() -> None:
    found = _leakage("f1", [line(0.2), line(None, "it crashed"), line(0.4)])
    assert found.value == pytest.approx(0.3)
    # t(.975, 1 degree of freedom) = 12.706; the standard error of (.2, .4) is .1
    assert (found.low, found.high) == (0.0, 1.0)
    assert (found.looks, found.unknown, found.why) == (2, 1, "it crashed")
    assert _leakage("f1", [line(None, "it crashed")]).value is None
    assert _leakage("f1", []).value is None


def test_pooled_games_are_not_averaged() -> None:
    looks = [line(0.2, f1_of_this_look=0.2), line(0.5, f1_of_this_look=0.8)]
    found = _leakage("f1", looks)
    assert (found.value, found.low, found.high) == (0.5, 0.1, 0.9)
