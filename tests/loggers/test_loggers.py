"""What W&B, MLflow and Trackio have of a run, all of them offline; see ``make test-loggers``."""

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from transformers import Trainer, TrainingArguments, default_data_collator

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate, WatchSettings
from lightning_fedleak.trainers import LeakageCallback
from tests.callbacks.runs import Probe, fit
from tests.helpers.models import VOCAB, tiny_gpt2

TRACKIO = Path(tempfile.mkdtemp())
os.environ["TRACKIO_DIR"] = str(TRACKIO)  # which trackio reads when it is imported
mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny: make test-loggers")
wandb = pytest.importorskip("wandb", reason="needs wandb: make test-loggers")
pytest.importorskip("trackio", reason="needs trackio: make test-loggers")

WORST = "leakage/worst/words"
UPLOADED = WatchSettings(report=True, upload_report=True)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Nothing leaves this machine; MLflow's runs lie in SQLite at the address returned."""
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": address,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(address)
    return address


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file of W&B, whose parts lie in blocks of 32 kB, as LevelDB's logs do."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def check_wandb(prefix: str = "") -> None:
    """The settings, the highest and last value, and the page of the run at work, which ends."""
    assert wandb.run.config["fedleak"]["attacks"]
    folder = Path(wandb.run.dir).parent
    wandb.finish()
    wandb.teardown()  # `finish` does not wait until the process that writes has written all
    [path] = folder.glob("*.wandb")
    records = [*wandb_records(path)]
    summaries = {r.metric.name: r.metric.summary for r in records if r.HasField("metric")}
    assert (summaries[f"{prefix}{WORST}"].max, summaries[f"{prefix}{WORST}"].last) == (True, True)
    items = [item for r in records for item in r.history.item]
    assert {f"{prefix}{WORST}", "leakage/report"} <= {i.key or i.nested_key[0] for i in items}


def check_mlflow(experiment: str, name: str = WORST) -> None:
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert 0 < run.data.metrics[name] <= 1
    assert "report.html" in [one.path for one in client.list_artifacts(run.info.run_id)]


def test_lightning_writes_to_four_loggers_at_once(tmp_path: Path, offline: str) -> None:
    loggers = [
        WandbLogger(project="p", save_dir=tmp_path, offline=True),
        MLFlowLogger("p", tracking_uri=offline, artifact_location=str(tmp_path / "artifacts")),
        CSVLogger(tmp_path / "csv"),
        TensorBoardLogger(tmp_path / "board"),
    ]
    monitor = LeakageMonitor(Probe(), every_n_steps=1, settings=UPLOADED)
    gate = RiskGate("leakage/probe/f1", at_most=0.9, action="warn")
    fit([monitor, gate], tmp_path, logger=loggers)
    check_wandb()
    check_mlflow("p")
    assert WORST in (tmp_path / "csv").rglob("metrics.csv").__next__().read_text()
    assert list((tmp_path / "board").rglob("events.*"))


def train_and_report(folder: Path, host: str) -> None:
    """Train by transformers' Trainer, which reports to a host."""
    ids = torch.randint(3, VOCAB, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=2,
        report_to=[host],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        project="p",
        run_name="r",
    )
    trainer = Trainer(tiny_gpt2(tied=False), arguments, default_data_collator, rows)
    trainer.add_callback(LeakageCallback(trainer, BagOfWords(), every_n_steps=1, settings=UPLOADED))
    trainer.train()


def test_the_trainer_reports_to_wandb(tmp_path: Path) -> None:
    train_and_report(tmp_path, "wandb")
    check_wandb("train/")


def test_the_trainer_reports_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "p")
    train_and_report(tmp_path, "mlflow")
    check_mlflow("p")


def test_the_trainer_reports_to_trackio(tmp_path: Path) -> None:
    import sqlite3

    train_and_report(tmp_path, "trackio")
    [database] = TRACKIO.glob("*.db")
    rows = sqlite3.connect(database).execute("SELECT metrics FROM metrics").fetchall()
    assert any(f"train/{WORST}" in json.loads(row) for (row,) in rows)
