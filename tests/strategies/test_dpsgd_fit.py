"""DPSGD in Lightning: one device and two gloo processes, resume, budget, refusals."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fedleak.defenses import DPSGD, BudgetSpent, DefenseError, ReleaseSettings
from lightning_fedleak.strategies import DefendedStrategy
from tests.strategies.dpsgd_runs import CLIP, CausalLM, fit, loader, trainer


def test_resume_goes_on_with_noise_and_account(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_epsilon": 5.0, "target_delta": 1e-3, "accountant": "rdp"}
    first = DPSGD(CLIP, **settings)
    _, run = fit(first, max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert first.privacy.epsilon == pytest.approx(5.0, rel=0.01)
    second = DPSGD(CLIP, **settings)
    module, run = fit(second, max_epochs=3, ckpt_path=str(tmp_path / "a.ckpt"))
    assert run.global_step == 6
    assert not module.sizes
    raises = DPSGD(CLIP, release=ReleaseSettings(on_budget="raise"), **settings)
    with pytest.raises(BudgetSpent, match="after 6 releases"):
        fit(raises, max_epochs=3, ckpt_path=str(tmp_path / "a.ckpt"))
    for again in (second, raises):
        assert again.noise_multiplier == first.noise_multiplier
        assert again.accountant.steps == 6


class Manual(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Plateau(CausalLM):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}
        }  # fmt: skip


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (CausalLM, {"gradient_clip_val": 1.0}, "Leave gradient_clip_val out"),
        (CausalLM, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=1"),
        (CausalLM, {"overfit_batches": 2}, "only a few rows"),
        (
            CausalLM,
            {"callbacks": [GradientAccumulationScheduler({0: 1, 3: 2})], "max_epochs": 2},
            "GradientAccumulationScheduler joins 2 batches",
        ),
        (
            CausalLM,
            {"callbacks": [EarlyStopping("val_loss")]},
            r"EarlyStopping\(monitor='val_loss'\) decides by a metric.*outside_epsilon=True",
        ),
        (  # it is the validation loss, where a gate allows the weights
            CausalLM,
            {"callbacks": [EarlyStopping("leakage/choose")]},
            r"EarlyStopping\(monitor='leakage/choose'\) decides by a metric",
        ),
        (Plateau, {}, "the scheduler ReduceLROnPlateau decides by a metric"),
        (Manual, {}, "automatic_optimization=True"),
    ],
)
def test_refused_with_the_mend(build: Any, settings: Any, message: str) -> None:
    module = build()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(DefenseError, match=message):
        fit(DPSGD(CLIP, noise_multiplier=1.0, seed=1), module, **settings)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_search_of_the_batch_size_is_refused_by_its_name() -> None:
    class Loads(CausalLM):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return loader(batch_size=self.batch_size)

    strategy = DefendedStrategy("auto", [DPSGD(CLIP, noise_multiplier=1.0)])
    with pytest.raises(DefenseError, match=r"BatchSizeFinder repeats.*max_physical_batch_size"):
        trainer(strategy, callbacks=[BatchSizeFinder(max_trials=1)]).fit(Loads())


def test_what_decides_by_a_metric_is_accepted_on_request(tmp_path: Path) -> None:
    chosen = ModelCheckpoint(tmp_path, monitor="train_loss")
    counted = ModelCheckpoint(tmp_path, monitor="step", mode="max")
    fit(
        DPSGD(CLIP, noise_multiplier=1.0), callbacks=[counted], enable_checkpointing=True,
        max_steps=1,
    )  # fmt: skip
    with pytest.raises(DefenseError, match=r"ModelCheckpoint\(monitor='train_loss'\) decides"):
        fit(DPSGD(CLIP, noise_multiplier=1.0), callbacks=[chosen], enable_checkpointing=True)
    defense = DPSGD(CLIP, noise_multiplier=1.0)
    run = trainer(
        DefendedStrategy("auto", [defense], outside_epsilon=True), callbacks=[chosen], max_steps=1,
        enable_checkpointing=True,
    )  # fmt: skip
    run.fit(CausalLM(), loader())
    assert defense.privacy.releases == 1


class Late(L.Callback):
    """Writes to weights when training ends."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            next(pl_module.parameters()).add_(1e-3)


class Hooked(CausalLM):
    """Writes to weights in a hook that its optimizer runs after each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def write(*_: Any) -> None:
            with torch.no_grad():
                next(self.parameters()).add_(1e-3)

        optimizer.register_step_post_hook(write)
        return optimizer


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("build", "callbacks"), [(CausalLM, [Late()]), (Hooked, [])])
def test_weights_written_in_the_end_or_by_the_optimizers_hook_are_refused(build, callbacks, steps):
    defense = DPSGD(CLIP, noise_multiplier=1.0)
    with pytest.raises(DefenseError, match="was written to since the optimizer's"):
        fit(defense, build(), callbacks=callbacks, max_steps=steps)
    assert defense.releases == (1 if build is Hooked else steps)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("EMAWeightAveraging", {}),
        ("StochasticWeightAveraging", {"swa_lrs": 1e-3, "swa_epoch_start": 1}),
    ],
)
def test_averages_of_released_weights_may_replace_them_in_the_end(name, settings) -> None:
    if not hasattr(L.pytorch.callbacks, name):
        pytest.skip(f"Lightning {L.__version__} has no {name}")
    defense = DPSGD(CLIP, noise_multiplier=1.0)
    fit(defense, callbacks=[getattr(L.pytorch.callbacks, name)(**settings)], max_epochs=3)
    assert defense.releases == 18


class Writing(L.Callback):
    """Writes to weights behind the optimizer's step, by a hook of its own."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weight = next(p for p in pl_module.parameters() if p.requires_grad)

        def write(*_: Any) -> None:
            with torch.no_grad():
                weight.add_(1e-3)

        self.hook = register_optimizer_step_post_hook(write)


def test_a_hook_on_optimizers_that_writes_to_weights_is_refused() -> None:
    writing = Writing()
    try:
        with pytest.raises(DefenseError, match="was written to since the optimizer's"):
            fit(DPSGD(CLIP, noise_multiplier=1.0), callbacks=[writing])
    finally:
        writing.hook.remove()
