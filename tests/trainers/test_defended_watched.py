"""LeakageCallback under defences: what it reads is what LeakageMonitor reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedleak import BagOfWords, FCMembership, LeakageMonitor
from lightning_fedleak.defenses import DPSGD, Defense, GradientNoise
from lightning_fedleak.engine import Games
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers import LeakageCallback
from tests.callbacks.runs import Probe
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import QUIET, grouped
from tests.trainers.hosts import CLIP, rows, traced, trainer_of
from tests.trainers.test_watch import lines

LR = 0.05
PLAYED: dict[str, Any] = {
    "every_n_steps": 2, "games": Games(targets=2), "stages": ("local", "shared"),
}  # fmt: skip


def model() -> Any:
    return tiny_gpt2(tied=False, dropout=0.0).train()


def attacks(probe: Probe) -> list[Any]:
    return [BagOfWords(), FCMembership(1), probe]


def monitored(folder: Path, defenses: list[Defense]) -> tuple[list[Any], Probe, Any]:
    probe = Probe(role=EMBEDDING_WEIGHT)
    monitor = LeakageMonitor(attacks(probe), folder=folder, **grouped(PLAYED))
    L.Trainer(
        max_epochs=1, callbacks=[monitor], strategy=DefendedStrategy("auto", defenses), **QUIET
    ).fit(CausalLMModule(model(), lr=LR), DataLoader(rows(), batch_size=4))
    return lines(folder), probe, monitor


def watched(folder: Path, defenses: list[Defense]) -> tuple[list[Any], Probe, Any]:
    probe, trained = Probe(role=EMBEDDING_WEIGHT), model()
    optimizer = torch.optim.SGD(trained.parameters(), LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_of(folder, trained, defenses, optimizers=(optimizer, scheduler))
    callback = LeakageCallback(trainer, attacks(probe), folder=folder, **grouped(PLAYED))
    trainer.add_callback(callback)
    trace = traced(trainer)
    callback.trace = trace
    return lines(folder), probe, callback


@pytest.mark.parametrize(
    "build",
    [
        lambda: [DPSGD(CLIP, 1.0, seed=3, max_physical_batch_size=2)],
        lambda: [GradientNoise(0.5, 0.01, seed=3)],
    ],
    ids=["dpsgd", "noise"],
)
def test_lines_are_those_of_lightning(build: Any, tmp_path: Path) -> None:
    first, probe, _ = monitored(tmp_path / "lightning", build())
    second, own, _ = watched(tmp_path / "trainer", build())
    for stage in ("local", "shared"):
        assert own.at(stage)
        assert len(own.at(stage)) == len(probe.at(stage))
    if isinstance(build()[0], DPSGD):  # the other host shuffles
        assert second == first
        for a, b in zip(probe.seen, own.seen, strict=True):
            assert a[:2] == b[:2]
            assert torch.equal(a[2], b[2])


def test_the_defended_gradient_is_shared_and_the_bare_one_is_local(tmp_path: Path) -> None:
    _, probe, callback = watched(tmp_path, [DPSGD(CLIP, 4.0, seed=3)])
    latest, trace = callback.latest, callback.trace
    size = probe.seen[0][2].numel()
    for step, stage, gradient in probe.seen:
        released = {"local": trace.local, "shared": trace.shared}[stage][step]
        assert torch.equal(gradient.flatten(), released[:size])
    assert latest["leakage_local/bag_of_words/f1"] > 0.9 > latest["leakage/bag_of_words/f1"] + 0.1
    assert latest["privacy/noise_multiplier"] == 4.0
    (record,) = tmp_path.rglob("run.jsonl")
    assert json.loads(record.read_text().splitlines()[0])["defenses"][0]["name"] == "dpsgd"
