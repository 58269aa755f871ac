"""Leakage beside your own metrics, in your own Trainer: `python examples/quickstart.py`.

Model and data stand for your own; nothing in them knows of the monitor.
"""

import lightning as L

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.finetuning import CausalLMFineTuning, TextDataModule


def main() -> None:
    """Trains for 20 steps, or until the gate stops it."""
    monitor = LeakageMonitor([AlignedFlatChat("sampled")], every_n_steps=5)
    gate = RiskGate("leakage/aligned_flatchat/f1", at_most=0.99, action="stop")
    trainer = L.Trainer(max_steps=20, callbacks=[monitor, gate], default_root_dir="fedleak_runs")
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())

    for metric in ("recall", "precision", "f1"):
        name = f"leakage/aligned_flatchat/{metric}"
        print(f"{name} = {float(trainer.callback_metrics[name]):.3f}")


if __name__ == "__main__":
    main()
