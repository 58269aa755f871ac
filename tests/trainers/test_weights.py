"""A loop and the Trainer say the same of the trained weights, and of those that they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedleak.attacks.memorization import Extraction, LossRatio
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import Threshold, Watch
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import grouped
from tests.trainers.test_transformers import constant, rows, trainer_of, watched
from tests.trainers.test_watch import lines

METRIC = "leakage/loss_ratio/auc"
SETTINGS = Memorization(max_overhead=4 / 3, looks=(0.5,))
TRAIN, EVALUATED = leave_out(rows(440), 220, seed=1)[0], rows(8)


def start() -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0).train()
    return (
        model,
        torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-12),
        DataLoader(TRAIN, batch_size=4),
    )  # type: ignore[arg-type]


def played() -> list[Any]:
    return [LossRatio(), Extraction(tokens=3)]


def limits(at_most: float) -> dict[str, Any]:
    return {"at_most": at_most, "action": "warn", "strict": False}


def under_the_trainer(place: Path, at_most: float) -> float:
    model, optimizer, _ = start()
    trainer = trainer_of(
        place,
        model,
        num_train_epochs=2,
        metric_for_best_model="leakage/choose",
        greater_is_better=False,
        save_strategy="epoch",
        eval_strategy="epoch",
        train_dataset=TRAIN,
        eval_dataset=EVALUATED,
        optimizers=constant(optimizer),
    )
    gate = Threshold(METRIC, **limits(at_most))
    watched(trainer, played(), [gate], every_n_steps=50, memorization=SETTINGS)
    trainer.train()
    return float(trainer.state.best_metric)


def in_a_loop(place: Path, at_most: float) -> float:
    model, optimizer, loader = start()
    gate, best = Threshold(METRIC, **limits(at_most)), float("inf")
    settings: dict[str, Any] = {"folder": place, "memorization": SETTINGS}
    with Watch(model, optimizer, played(), [gate], loader, **grouped(settings)) as watch:
        for _ in range(2):
            for batch in loader:
                with watch.step(batch):
                    model(**batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                batch = next(iter(DataLoader(EVALUATED, batch_size=8)))  # type: ignore[arg-type]
                loss = float(model.eval()(**batch).loss)
            best = min(best, watch.choose(loss))
            model.train()
    return best


@pytest.mark.slow
def test_the_trainer_says_and_chooses_what_a_loop_does(tmp_path: Path) -> None:
    faces = {"trainer": under_the_trainer, "loop": in_a_loop}
    scores = {name: face(tmp_path / name, 1.0) for name, face in faces.items()}
    trainer, first = ([*lines(tmp_path / name)] for name in faces)
    assert [line["attack"] for line in first] == ["loss_ratio", "extraction"] * 3
    assert all(line["unknown"] is None for line in first)
    for line, other in zip(first, trainer, strict=True):
        assert {**other, "metrics": line["metrics"]} == line
        assert other["metrics"].keys() == line["metrics"].keys()
        for name in ("members", "others", "alpha", "visible", "extracted_base"):
            assert other["metrics"].get(name) == line["metrics"].get(name)
        # It divides by other counts of labels: rounding is all that Adam feels of it.
        if auc := line["metrics"].get("auc"):
            assert other["metrics"]["auc"] == pytest.approx(auc, abs=0.05)
    assert scores["trainer"] == pytest.approx(scores["loop"] * 8 / 9, rel=1e-2)
    assert scores["loop"] < float("inf")


def test_weights_that_give_away_too_much_are_not_chosen(tmp_path: Path) -> None:
    assert in_a_loop(tmp_path, 0.5) == float("inf")


def test_a_loop_without_a_gate_on_the_weights_cannot_choose(tmp_path: Path) -> None:
    model, optimizer, loader = start()
    settings: dict[str, Any] = {"folder": tmp_path, "memorization": SETTINGS}
    with (
        Watch(model, optimizer, played(), [], loader, **grouped(settings)) as watch,
        pytest.raises(ValueError, match="needs a gate on the trained weights"),
    ):
        watch.choose(1.0)
