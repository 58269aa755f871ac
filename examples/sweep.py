"""The same fine-tuning under several defences, leakage beside loss: `python examples/sweep.py`.

Each run has the same model, data, order and seed. Three servers attack it: one reads the words off
the gradient, one adds layers to recognise a text, and one sees the hidden states at a split.
"Unknown" is not safe. `fedleak report fedleak_runs/sweep/*` writes a page with all runs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import lightning as L

from lightning_fedleak import Games, LeakageMonitor, WatchSettings, attacks
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.defenses import DPSGD, ActivationNoise, Freeze, GradientNoise, TokenLDP
from lightning_fedleak.strategies import DefendedStrategy

LAYER = 2
DEFENCES = {
    "none": [],
    "Freeze": [Freeze("head+embeddings")],
    "GradientNoise 0.001": [GradientNoise(clip=1, sigma=0.001)],
    "DPSGD 0.5": [DPSGD(max_grad_norm=1, noise_multiplier=0.5)],
    "ActivationNoise": [ActivationNoise(LAYER, 1, relative=True)],
    "TokenLDP": [TokenLDP("grr", 10, per="token")],
}
COLUMNS = {
    "words, F1": "aligned_flatchat/f1",
    "membership, AUC": "fc_membership/auc",
    "at the split": "prefix_inversion/token_accuracy",
}
LINE = "{:<22}{:>6}{:>10}" + "{:>18}" * len(COLUMNS)


class KeepCalibrations(L.Callback):
    """Keeps what the attacks of the first run were calibrated to, which later runs use again."""

    kept: ClassVar[dict[str, object]] = {}

    def __init__(self, monitor: LeakageMonitor) -> None:
        self.engine = monitor.engine
        self.engine.reuse(self.kept)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps them before any step changes the model."""
        self.kept.update(self.engine.calibrations())


def train(name: str, defenses: list, steps: int) -> tuple[L.Trainer, LeakageMonitor]:
    """Fine-tunes under the defences, and attacks three steps or more."""
    L.seed_everything(0, verbose=False)
    data = TextDataModule(length=24)
    monitor = LeakageMonitor(
        [
            attacks.AlignedFlatChat("sampled", calibration_tokens=2_000),
            attacks.FCMembership(LAYER),
            attacks.PrefixInversion(LAYER, None, budget_seconds=20),
        ],
        every_n_steps=max(1, steps // 3),
        games=Games(window=steps),
        folder=Path("fedleak_runs/sweep", name.replace(" ", "_")),
        settings=WatchSettings(texts=2),
    )
    trainer = L.Trainer(
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        strategy=DefendedStrategy("auto", defenses=defenses),
        devices=1,
        callbacks=[monitor, KeepCalibrations(monitor)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The mean over texts of each text's mean, which DP-SGD needs.
    trainer.fit(CausalLMFineTuning(loss="sample_mean"), datamodule=data)
    return trainer, monitor


def cell(value: float) -> str:
    """Returns a value; NaN is unknown."""
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def main(max_steps: int = 12, names: Sequence[str] = tuple(DEFENCES)) -> None:
    """Trains under each defence, and prints its loss, epsilon and leakage at the last look."""
    print(LINE.format("defence", "loss", "epsilon", *COLUMNS))
    for name in names:
        trainer, monitor = train(name, DEFENCES[name], max_steps)
        latest = monitor.latest
        epsilon = latest.get("privacy/epsilon", math.nan)
        leaks = (cell(latest.get(f"leakage/{one}", math.nan)) for one in COLUMNS.values())
        loss = float(trainer.callback_metrics["val_loss"])
        print(LINE.format(name, f"{loss:.3f}", cell(epsilon), *leaks))


if __name__ == "__main__":
    main()
