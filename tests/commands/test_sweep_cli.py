from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.defense_specs import DefenseSpec, parse_defenses
from lightning_fedleak.cli.studies.sweep import run_name
from tests.helpers.commands import options_of, printed_by
from tests.helpers.folders import TEXTS
from tests.report.lines import begin, end, result, written


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(40)))
    return str(path)


swept = partial(printed_by, "sweep", width=200)


def test_a_grid_is_run_reported_and_continued(model: str, text: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model": model,
        "text": text,
        "steps": 4,
        "every_n_steps": 2,
        "length": 12,
    }
    settings |= {
        "defense": [
            "none",
            "gradient_noise:clip=1e-6,sigma=5",
            "freeze:part=head",
            "freeze:part=head+embeddings",
        ],
        "attack": ["flatchat", "fc"],
        "out": tmp_path,
    }
    printed = swept(status=1, **settings)
    # The tiny model's head is tied: to freeze it alone is refused, and no other cell is lost.
    assert "freeze:part=head failed: DefenseError" in printed
    assert "freeze:part=head+embeddings warns: " in printed
    assert "which is not shared in this run" in printed
    assert "Utility against leakage" in (tmp_path / "report.html").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    by_defense = {run["name"].rpartition("-")[0]: run for run in report["runs"]}
    assert sorted(by_defense) == [
        "freeze-part=head+embeddings",
        "gradient_noise-clip=1e-06,sigma=5",
        "none",
    ]
    none, noise = (
        {one["name"]: one for one in by_defense[name]["attacks"] if one["stage"] == "shared"}
        for name in ("none", "gradient_noise-clip=1e-06,sigma=5")
    )
    assert none["fc"]["last"]["value"] == 1
    assert none["fc"]["looks"] == 2
    assert 0.1 < noise["fc"]["last"]["value"] < 0.9  # an AUC of few games, which scatters by 0.1
    assert none["flatchat"]["mean"] > noise["flatchat"]["mean"]
    frozen = by_defense["freeze-part=head+embeddings"]["attacks"]
    assert not next(one for one in frozen if one["name"] == "flatchat")["exposed"]
    losses = report["comparison"]["utilities"]
    assert len(set(losses.values())) == 3
    assert all(f"{loss:.3f}" in printed for loss in losses.values())
    again = swept(status=1, **settings)
    assert "4 cells, 3 of them done before" in again
    assert "none: done" not in again


def test_an_interrupt_keeps_what_is_done(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train_and_attack(options: Namespace, defense: DefenseSpec, folder: Path) -> list[str]:
        trained.append(str(defense))
        if len(trained) == 2:
            written(folder, [result(0, f1=0.1)], [begin()])
            raise KeyboardInterrupt
        run = str(len(trained))
        written(folder, [result(0, f1=0.1, run=run)], [begin(run), end(4, run)])
        return []

    monkeypatch.setattr("lightning_fedleak.cli.studies.sweep.train_and_attack", train_and_attack)
    specs = [f"gradient_noise:clip=1,sigma={sigma}" for sigma in (1, 2, 3)]
    settings = {"model": model, "text": text, "length": 12, "out": tmp_path}
    interrupted = swept(
        status=130, **settings, defense=["gradient_noise:clip=1,sigma=1/2/3", specs[0]]
    )
    assert "3 cells, 0 of them done before" in interrupted
    assert trained == specs[:2]
    swept(**settings, defense=specs)
    assert trained == [*specs[:2], *specs[1:]]
    assert "1 cells, 0 of them" in swept(**settings, defense=specs[:1], lr=0.5)


def test_run_name_hashes_every_setting_but_the_folder_of_results() -> None:
    [spec] = parse_defenses("none")
    options = options_of("sweep")
    # Names of earlier versions, by which an interrupted sweep goes on.
    assert run_name(options, spec) == "none-ad1153b72dda"
    settings = {"attack": ["fc", "flatchat", "fc"], "model": "/x/y", "peft": "lora", "layer": 3}
    assert run_name(options_of("sweep", lr=0.5, **settings), spec) == "none-01762fada660"
    elsewhere = options_of("sweep", out=Path("elsewhere"), defense=["none"])
    assert run_name(elsewhere, spec) == run_name(options, spec)
    assert run_name(options_of("sweep", seed=1), spec) != run_name(options, spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defense", "gradient_nose"], "did you mean 'gradient_noise'"),
        (["--layer", "9"], "0 to 2, got 9: the model has 2 blocks"),
        (["--text", "nowhere.txt"], "there is no file 'nowhere.txt'"),
    ],
)
def test_what_would_fail_everywhere_is_reported_first(
    model: str, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--model", model, "--out", str(tmp_path), *options]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="Name another folder with --out"):
        swept(model=model, out=tmp_path / "file" / "x")
