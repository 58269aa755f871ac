"""Defences that act on the loader, on batches and around the forward pass."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.settings import QUIET

X = torch.arange(12.0).reshape(12, 1)


class Regression(pl.LightningModule):
    """Keeps what its training and validation steps get."""

    def __init__(self, *, asks_early: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.asks_early = asks_early
        self.seen: list[list[float]] = []
        self.validated: list[list[float]] = []

    def setup(self, stage: str) -> None:
        if self.asks_early:
            assert self.trainer.estimated_stepping_batches == 3

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(batch.flatten().tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Recorder(Defense):
    guarantee = "none: adds to every input, for a test"

    def __init__(self, name: str, plus: float, log: list[str], factor: float = 1.0) -> None:
        self.name, self.plus, self.log, self.factor = name, plus, log, factor
        self.steps: list[int] = []

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        self.log.append(f"{self.name} loader {len(dataloader)}")
        return dataloader

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        self.steps.append(context.step)
        return self.factor * batch + self.plus

    def on_training_step(self, training_step: Any, batch: Any, context: DefenseContext) -> Any:
        self.log.append(f"{self.name} before {batch.flatten().tolist()}")
        output = training_step()
        self.log.append(f"{self.name} after")
        return output


class Truth(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, index: int) -> None:
        self.seen.append(batch.flatten().tolist())


def fit(module, defenses, *callbacks, **options) -> Any:
    trainer = pl.Trainer(
        strategy=DefendedStrategy("auto", defenses), max_epochs=1, callbacks=list(callbacks),
        **options, **QUIET,
    )  # fmt: skip
    trainer.fit(module, DataLoader(X, batch_size=4), DataLoader(X[:2], batch_size=2))
    return trainer


@pytest.mark.parametrize("asks_early", [False, True])
def test_defences_act_in_order_and_the_truth_stays(asks_early: bool) -> None:
    log: list[str] = []
    first, second = Recorder("a", 1.0, log), Recorder("b", 0.5, log, factor=2.0)
    module, truth = Regression(asks_early=asks_early), Truth()
    fit(module, [first, second], truth)
    assert module.seen == [[2 * (x + 1) + 0.5 for x in X[i : i + 4, 0].tolist()] for i in (0, 4, 8)]
    assert truth.seen == [X[i : i + 4, 0].tolist() for i in (0, 4, 8)]
    assert module.validated[0] == [0.0, 1.0]
    assert first.steps == second.steps == [0, 1, 2]
    assert log[:2] == ["a loader 3", "b loader 3"]
    batch = module.seen[0]
    assert log[2:6] == [f"a before {batch}", f"b before {batch}", "b after", "a after"]
    assert len(log) == 2 + 3 * 4


def test_each_micro_batch_passes_with_the_step_it_is_of() -> None:
    defense = Recorder("a", 1.0, [])
    fit(Regression(), [defense], accumulate_grad_batches=2)
    assert defense.steps == [0, 0, 1]


def test_a_step_that_takes_an_iterator_is_refused() -> None:
    class Takes(Regression):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch).square().mean()

    with pytest.raises(DefenseError, match=r"Recorder replaces batches.*`batch` and `batch_idx`"):
        fit(Takes(), [Recorder("a", 1.0, [])])
