"""What people see of a run while it goes on, and what loggers get beside numbers."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate, WatchSettings
from lightning_fedleak.report import pages as files
from lightning_fedleak.report import watched
from tests.callbacks.runs import Probe, fit

LIVE = WatchSettings(report="live")
F1 = "leakage/probe/f1"


class Pages(Callback):
    """Keeps the page as it is after each step."""

    def __init__(self, folder: Path) -> None:
        self.page, self.texts = folder / "report.html", list[str]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.texts.append(self.page.read_text())


def monitor(folder: Path, settings: WatchSettings = LIVE) -> LeakageMonitor:
    return LeakageMonitor(Probe(), every_n_steps=1, folder=folder, settings=settings)


def test_the_page_is_written_after_each_look_and_loads_itself_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "SECONDS", 1e9)
    pages = Pages(tmp_path)
    fit([monitor(tmp_path), pages], tmp_path)
    assert all("data-live" in text for text in pages.texts)
    assert len(set(pages.texts)) == len(pages.texts) > 2
    assert "data-live=" not in pages.page.read_text()
    assert stat.S_IMODE(pages.page.stat().st_mode) == 0o600


def test_a_page_that_costs_much_is_written_at_few_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "SECONDS", 1e-9)
    pages = Pages(tmp_path)
    fit([monitor(tmp_path), pages], tmp_path)
    assert len(set(pages.texts)) == 1
    assert len(pages.texts) > 2


def test_a_live_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(files, "_write_whole", refuse)
    with pytest.warns(UserWarning, match="no live report: no room"):
        trainer = fit([one := monitor(tmp_path)], tmp_path)
    assert one.looks == trainer.global_step


def test_a_notebook_shows_the_page(tmp_path, monkeypatch):
    display = pytest.importorskip("IPython.display")

    one = monitor(tmp_path)
    with pytest.raises(RuntimeError, match="train first"):
        one.show()
    fit([one], tmp_path)
    shown = []
    monkeypatch.setattr(display, "display", shown.append)
    one.show(height=500)
    assert "height:500px" in shown[0].data
    assert 'srcdoc="&lt;!doctype html&gt;' in shown[0].data


# ---- loggers ------------------------------------------------------------------------------------


class Experiment:
    """Stands for a run of W&B, or the client of MLflow."""

    def __init__(self) -> None:
        self.defined: dict[str, dict[str, Any]] = {}
        self.artifacts: list[tuple[str, str]] = []

    def define_metric(self, name: str, **settings: Any) -> None:
        self.defined[name] = settings

    def log_artifact(self, run_id: str, path: str) -> None:
        self.artifacts.append((run_id, path))


class WandbLogger(Logger):
    """Has what is used of Lightning's logger of this name."""

    name, version, save_dir = "project", "run1", None

    def __init__(self) -> None:
        self.experiment = Experiment()
        self.settings: dict[str, Any] = {}
        self.values: dict[str, float] = {}

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        self.settings |= dict(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values |= metrics


class MLFlowLogger(WandbLogger):
    run_id = "run1"


def test_loggers_have_the_settings_and_the_highest_leakage(tmp_path):
    wandb, csv = WandbLogger(), CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    gate = RiskGate(F1, at_most=0.9, action="warn")
    fit([monitor(tmp_path, WatchSettings()), gate], tmp_path, logger=[wandb, csv])
    settings = wandb.settings["fedleak"]
    assert settings["attacks"] == ["probe"]
    assert settings["gates"] == [f"{F1} at most 0.9: warn"]
    assert settings["defenses"] == []
    worst = {"step_metric": "trainer/global_step", "summary": "max,last"}
    assert wandb.experiment.defined == {"leakage/worst/words": worst}
    saved = yaml.safe_load(next(tmp_path.rglob("hparams.yaml")).read_text())
    assert saved["fedleak"]["attacks"] == ["probe"]


def test_a_report_is_uploaded_where_that_is_asked_for(tmp_path):
    for asked in (False, True):
        mlflow = MLFlowLogger()
        settings = WatchSettings(report=True, upload_report=asked)
        folder = tmp_path / str(asked)
        fit([monitor(folder, settings)], folder, logger=mlflow)
        page = str(folder / "report.html")
        assert mlflow.experiment.artifacts == ([("run1", page)] if asked else [])
    with pytest.raises(ValueError, match="pass report=True too"):
        WatchSettings(upload_report=True)


def test_a_logger_that_takes_no_settings_ends_no_run(tmp_path):
    class Refuses(WandbLogger):
        def log_hyperparams(self, params: Any, *_: Any) -> None:
            if "fedleak" in params:
                raise OSError("offline")

    with pytest.warns(UserWarning, match="not every logger has the settings"):
        fit([monitor(tmp_path, WatchSettings())], tmp_path, logger=(logger := Refuses()))
    assert F1 in logger.values


def test_two_runs_of_a_project_have_folders_of_their_own(tmp_path):
    """W&B and MLflow have one folder for all of them."""
    for run in ("run1", "run2"):
        logger = WandbLogger()
        logger.version = run
        one = LeakageMonitor(Probe(), every_n_steps=1)
        fit([one], tmp_path, logger=logger)
        assert (tmp_path / "project" / run / "leakage.jsonl").exists()


def test_tensorboard_has_the_settings_without_a_value_before_a_look(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    board = TensorBoardLogger(tmp_path)
    fit([monitor(tmp_path, WatchSettings())], tmp_path, logger=board, max_steps=1)
    events = EventAccumulator(board.log_dir).Reload()
    tables = events.PluginTagToContent("hparams")
    data = plugin_data_pb2.HParamsPluginData.FromString(tables["_hparams_/session_start_info"])
    assert "fedleak/attacks" in data.session_start_info.hparams
    data = plugin_data_pb2.HParamsPluginData.FromString(tables["_hparams_/experiment"])
    assert [one.name.tag for one in data.experiment.metric_infos] == ["leakage/worst/words"]
    assert [one.step for one in events.Scalars("leakage/worst/words")] == [0]
