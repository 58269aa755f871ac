from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.sweep import explain_defenses
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.sweep.cell import run_cell
from lightning_fedleak.cli.studies.sweep.grid import CellResult, GridCell, Setting, _leakage
from lightning_fedleak.report.records import MetricValue, ResultLine
from tests.helpers.commands import options_of, run_command
from tests.helpers.folders import TEXTS, save_tiny_causal_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(40)))
    return str(path)


def swept(status: int = 0, **settings: object) -> str:
    ended, printed = run_command("sweep", width=200, **settings)
    assert ended == status
    return printed


def test_a_grid_is_run_written_reported_and_continued(
    model: str, text: str, tmp_path: Path
) -> None:
    settings: dict[str, object] = {
        "model": model,
        "text": text,
        "steps": 4,
        "every_n_steps": 2,
        "length": 12,
    }
    settings |= {
        "defense": ["none", "gradient_noise:clip=1e-6,sigma=5", "freeze:part=head"],
        "attack": ["flatchat", "fc"],
        "out": tmp_path,
    }
    printed = swept(status=1, **settings)
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
    page = (tmp_path / "report.html").read_text()
    assert "Utility against leakage" in page
    runs = json.loads((tmp_path / "report.json").read_text())["comparison"]["utilities"]
    assert sorted(name.rpartition("-")[0] for name in runs) == [
        "gradient_noise-clip=1e-06,sigma=5",
        "none",
    ]
    assert set(runs.values()) == {none["val_loss"], noise["val_loss"]}
    assert f"{none['val_loss']:.3f}" in printed
    again = swept(status=1, **settings)
    assert "3 cells, 2 of them done before" in again
    assert "none: val loss" not in again


def test_warnings_of_the_package_are_printed(model: str, text: str, tmp_path: Path) -> None:
    (spec,) = parse_defenses("freeze:part=head+embeddings")
    setting = Setting(model=model, text=text, attacks=("flatchat",), steps=1, length=12)
    result = run_cell(GridCell(setting, spec), tmp_path)
    (warning,) = result.warnings
    assert "which is not shared in this run" in warning
    assert not result.leakage["flatchat"].exposed
    again = CellResult.from_dict(json.loads(json.dumps(asdict(result))))
    assert again == result
    assert f"{spec} warns: {warning}" in explain_defenses([(GridCell(setting, spec), result)])


def test_the_command_line_and_the_class_agree() -> None:
    options = options_of("sweep")
    assert tuple(options.attack) == Setting.attacks
    shared = {f.name for f in fields(Setting)} - {"attacks"}
    assert all(getattr(options, name) == getattr(Setting, name) for name in shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defense", "gradient_nose"], "did you mean 'gradient_noise'"),
        (["--layer", "9"], "the model has 2 blocks; give 0 to 2"),
        (["--text", "nowhere.txt"], "there is no file 'nowhere.txt'"),
    ],
)
def test_what_would_fail_everywhere_is_reported_first(
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
        swept(model=model, out=tmp_path / "file" / "x")


def line(value: float | None, unknown: str | None = None, **more: float) -> ResultLine:
    metrics = {"f1": MetricValue(value, 0.1, 0.9)}
    metrics |= {name: MetricValue(v) for name, v in more.items()}
    return ResultLine(
        step=0, stage="shared", attack="a", exposed=True, metrics=metrics, unknown=unknown
    )


def test_unknown_looks_are_in_no_mean_and_are_counted() -> None:
    leakage = _leakage("f1", [line(0.2), line(None, "it crashed"), line(0.4)])
    assert leakage.value == pytest.approx(0.3)
    # t(.975, 1 degree of freedom) = 12.706; the standard error of (.2, .4) is .1
    assert (leakage.low, leakage.high) == (0.0, 1.0)
    assert (leakage.looks, leakage.unknown, leakage.why) == (2, 1, "it crashed")
    assert _leakage("f1", [line(None, "it crashed")]).value is None
    assert _leakage("f1", []).value is None


def test_pooled_games_are_not_averaged() -> None:
    looks = [line(0.2, f1_of_this_look=0.2), line(0.5, f1_of_this_look=0.8)]
    leakage = _leakage("f1", looks)
    assert (leakage.value, leakage.low, leakage.high) == (0.5, 0.1, 0.9)
