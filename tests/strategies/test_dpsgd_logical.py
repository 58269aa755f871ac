"""Logical batches in pieces, in Lightning: one release, one step, and what counts steps."""

import csv
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_fedleak.defenses import DPSGD, DefenseError
from tests.helpers.dpsgd_settings import grouped
from tests.strategies.dpsgd_runs import CLIP, CausalLM, fit, loader

pytestmark = pytest.mark.slow


def quiet(**settings: Any) -> DPSGD:
    clip = settings.pop("max_grad_norm", CLIP)
    return DPSGD(
        clip,
        **grouped(**{"noise_multiplier": 0.0, "seed": 1, "max_physical_batch_size": 3, **settings}),
    )


class Logs(CausalLM):
    """Logs in each of the ways in which Lightning puts values together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.truth: list[dict[str, float]] = []
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rows = batch["labels"]
        marks = rows.float().clamp(min=0).mean(1)
        self.log("mean", marks.mean(), on_step=True, on_epoch=True)
        self.log("sum", marks.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", marks.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.seen(float(len(rows)))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "marks": marks, "mean": marks.mean(), "name": "step"}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        marks = batch["labels"].float().clamp(min=0).mean(1)
        truth = {"mean": marks.mean(), "sum": marks.sum(), "max": marks.max(), "rows": len(marks)}
        self.truth.append({name: float(value) for name, value in truth.items()})
        self.marks = marks

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.testing.assert_close(outputs["marks"], self.marks)
        torch.testing.assert_close(outputs["mean"], self.marks.mean())
        assert outputs["name"] == "step"
        self.outputs.append(float(outputs["loss"]))


class Loss(Callback):
    """The loss of the whole batch, before the step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @torch.no_grad()
    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(module.loss(batch)))


def test_everything_counts_logical_steps(tmp_path: Path) -> None:
    class Counted(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.hooks: dict[str, int] = {}

        def count(self, _: Any = None, *, name: str) -> None:
            self.hooks[name] = self.hooks.get(name, 0) + 1
            assert name != "after" or all(p.grad is not None for p in self.model.parameters())

        on_before_zero_grad = partialmethod(count, name="zero")
        on_before_backward = partialmethod(count, name="before")
        on_after_backward = partialmethod(count, name="after")
        on_before_optimizer_step = partialmethod(count, name="step")

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module, defense, losses = Counted(), quiet(), Loss()
    logger = CSVLogger(tmp_path)
    _, run = fit(
        defense, module, data=loader(batch_size=8), max_steps=6, max_epochs=-1, logger=logger,
        log_every_n_steps=1, callbacks=[losses],
    )  # fmt: skip
    assert run.global_step == defense.releases == defense.privacy.releases == 6
    assert len(module.sizes) > 12
    assert set(module.hooks.values()) == {6}
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**6)
    assert module.outputs == pytest.approx(losses.losses, rel=1e-5)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [*csv.DictReader(file)]
    steps = [row for row in rows if row["mean_step"]]
    assert [int(row["step"]) for row in steps] == [*range(6)]
    for number, (row, truth) in enumerate(zip(steps, module.truth, strict=True)):
        for name in ("mean", "sum", "max"):
            value = truth[name]
            assert float(row[f"{name}_step"]) == pytest.approx(value, rel=1e-5), name
        assert float(row["train_loss"]) == pytest.approx(losses.losses[number], rel=1e-5)
    epochs = [row for row in rows if row["seen"]]
    assert len(epochs) == 2
    assert sum(float(row["seen"]) for row in epochs) == sum(module.sizes)
    for row, own in zip(epochs, (slice(0, 3), slice(3, 6)), strict=True):
        truth, sizes = module.truth[own], [t["rows"] for t in module.truth[own]]
        mean = sum(t["mean"] * t["rows"] for t in truth) / sum(sizes)
        assert float(row["mean_epoch"]) == pytest.approx(mean, rel=1e-5)
        assert float(row["sum_epoch"]) == pytest.approx(sum(t["sum"] for t in truth), rel=1e-5)


def test_a_checkpoint_within_a_batch_forgets_and_repeats_no_release(tmp_path: Path) -> None:
    path = tmp_path / "mid.ckpt"

    class Saves(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.sizes) == 18:
                self.trainer.save_checkpoint(path)
                raise KeyError("killed")
            return super().training_step(batch, batch_idx)

    settings: Any = {"noise_multiplier": 1.0, "target_delta": 1e-3, "accountant": "rdp"}
    pieces: Any = {"max_physical_batch_size": 3, "ledger": tmp_path / "ledger"}
    first = DPSGD(CLIP, **settings, **pieces)
    with pytest.raises(KeyError, match="killed"):
        fit(first, Saves(), data=loader(batch_size=24), max_epochs=8)
    assert first.releases == 2  # two of its eight pieces were run: the third batch is lost
    second = DPSGD(CLIP, **settings, **pieces)
    _, run = fit(second, data=loader(batch_size=24), max_epochs=8, ckpt_path=str(path))
    assert run.global_step == second.releases == second.accountant.steps == 8
    assert len((tmp_path / "ledger").read_text().splitlines()) == 8


def test_what_is_trained_must_stay_the_same_in_all_pieces() -> None:
    defense = quiet()

    class Thaws(CausalLM):
        pieces = 0  # of the second batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.pieces += defense.releases
            self.model.transformer.ln_f.requires_grad_(self.pieces != 2)
            return super().training_step(batch, batch_idx)

    with pytest.raises(DefenseError, match="were frozen or unfrozen within"):
        fit(defense, Thaws(), data=loader(batch_size=24), max_epochs=2)
    assert defense.releases == 1
