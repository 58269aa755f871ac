"""Checkpoints of one mechanism, and data that are made anew: what goes on with past noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.strategies import DefendedStrategy

N, BATCH = 24, 4
DATA = TensorDataset(torch.randn(N, 6), torch.arange(N) % 2)


class Module(L.LightningModule):
    def __init__(self, made: Callable[[], Dataset[Any]] = lambda: DATA) -> None:
        super().__init__()
        self.net = torch.nn.Linear(6, 2)
        self.made = made

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made(), batch_size=BATCH)

    def training_step(self, batch: Any, _: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        run.should_stop = run.should_stop or run.global_step >= self.after


def defense(mechanism: Any, **settings: Any) -> DPSGD:
    given = {"noise_multiplier": 1.0, "target_delta": 1e-3, "accountant": "rdp", "bands": 3}
    return DPSGD(1.0, mechanism=mechanism, **{**given, **settings})


def fit(own: DPSGD, module: Module, *callbacks: Any, **settings: Any) -> L.Trainer:
    path = settings.pop("ckpt_path", None)
    run = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=4,
        strategy=DefendedStrategy("auto", [own]),
        callbacks=[*callbacks],
        **{"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
        | settings,
    )
    run.fit(module, ckpt_path=path)
    return run


def began_anew(own: DPSGD, module: Module, *callbacks: Any, **settings: Any) -> bool:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(own, module, *callbacks, **settings)
    return any("A new mechanism begins" in str(warning.message) for warning in said)


@pytest.mark.parametrize("mechanism", ["banded", "banded_inverse"])
def test_of_all_checkpoints_one_goes_on_with_past_noise(mechanism: Any, tmp_path: Path) -> None:
    folder, ledger = tmp_path / "saved", tmp_path / "ledger"
    saver = ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_top_k=-1)
    fit(defense(mechanism, ledger=ledger), Module(), saver, Stop(8))
    assert len(list(folder.glob("secret-*"))) == 1
    step8 = next(folder.glob("epoch*step=8.ckpt"))
    own = defense(mechanism, ledger=ledger)
    assert not began_anew(own, Module(), Stop(8 + 1), ckpt_path=saver.last_model_path)
    paid = own.accountant.steps
    assert paid == (3 if mechanism == "banded" else 1)
    for again in (step8, Path(saver.last_model_path), next(folder.glob("epoch*step=4.ckpt"))):
        own = defense(mechanism, ledger=ledger)
        assert began_anew(own, Module(), Stop(9), ckpt_path=again)
        paid += 2 if again.name.endswith("=4.ckpt") and mechanism == "banded" else 1
        assert own.accountant.steps == paid
