"""A kept step that is repeated gives the same to the bit, or it is said what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from lightning_fedleak import DPSGD, BagOfWords, DefendedStrategy
from lightning_fedleak.cli.command_line import main
from lightning_fedleak.engine import Evidence, WatchSettings
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verify_run
from lightning_fedleak.report.records import RECORD, RESULTS
from lightning_fedleak.trainers import LeakageCallback, Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.evidence.test_repetition import IDS, change, read_lines
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2

STEPS = (0, 2, 5)


def own_loop(folder: Path, evidence: Evidence | None = None, *, order: int = 0) -> list[Any]:
    """Train six steps of two batches, with dropout and a schedule; return all that may differ."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    rows = DataLoader(IDS, 2, shuffle=True, generator=torch.Generator().manual_seed(order))
    settings = WatchSettings(evidence=evidence, tensorboard=False)
    watch = Watch(
        model, optimizer, [BagOfWords()], folder=folder, every_n_steps=4, settings=settings
    )
    with watch:
        for number, ids in enumerate(batch for _ in range(2) for batch in rows):
            if watch.skips(ids):
                continue
            with watch.step(ids):
                (model(input_ids=ids, labels=ids).loss / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


def other_rows(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    return own_loop(folder, evidence, order=1)


def by_lightning(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    """Fit two epochs of four steps, with dropout and AdamW."""
    monitor = monitor_with([Probe()], every_n_steps=3, folder=folder, evidence=evidence)
    loader = random_token_loader(32)
    trainer = fit([monitor], folder.parent, logger=False, max_epochs=2, loader=loader)
    return [*trainer.lightning_module.state_dict().values(), torch.get_rng_state()]


def by_trainer(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    """Train two epochs of three steps of two batches, in an order that the Trainer draws."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS]
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    settings = WatchSettings(evidence=evidence, tensorboard=False)
    callback = LeakageCallback(trainer, [BagOfWords()], every_n_steps=2, settings=settings)
    trainer.add_callback(callback)
    trainer.train()
    return [*model.state_dict().values(), torch.get_rng_state()]


TRAININGS = own_loop, by_lightning, by_trainer


def replay(place: Path, step: int, train: str = "own_loop") -> int:
    """Return the exit code of the command."""
    arguments = ["--evidence", str(place / "kept"), "--step", str(step), "--train"]
    return main(["replay", str(place / "run"), *arguments, f"{__name__}:{train}"])


@pytest.fixture(scope="module", params=TRAININGS, ids=lambda train: train.__name__)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training, and the folder of its run, its kept steps and its state at the end."""
    place = tmp_path_factory.mktemp(request.param.__name__)
    state = request.param(place / "run", Evidence(place / "kept", steps=STEPS))
    return request.param, place, state


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    own_loop(tmp_path / "run", Evidence(tmp_path / "kept", steps=STEPS))
    return tmp_path


def test_training_is_the_same_as_without(each: Any, tmp_path: Path) -> None:
    train, _, state = each
    plain = train(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))


@pytest.mark.parametrize("step", STEPS)
def test_a_kept_step_is_repeated_to_the_bit(
    each: Any, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train, place, _ = each
    results = [line for line in read_lines(place / "run", RESULTS) if line["step"] == step]
    values = sum(len(line["metrics"]) for line in results)
    assert values
    assert replay(place, step, train.__name__) == HOLDS
    text = f"checked: step {step} again: its update, loss and {values} values of leakage"
    assert text in capsys.readouterr().out
