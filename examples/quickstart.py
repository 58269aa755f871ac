"""Leakage beside your own metrics, in your own Trainer: `python examples/quickstart.py`.

Model and data stand for your own; nothing in them knows of the monitor.
"""

import lightning as L

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule


def main() -> None:
    """Trains for 20 steps; with action="stop" the gate would end it at the first look."""
    monitor = LeakageMonitor(every_n_steps=10)
    gate = RiskGate("leakage/worst/words", at_most=0.99, action="warn")
    trainer = L.Trainer(max_steps=20, callbacks=[monitor, gate], default_root_dir="fedleak_runs")
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())

    for name in ("leakage/aligned_flatchat/f1", "leakage/worst/words", "leakage/worst/membership"):
        print(f"{name} = {float(trainer.callback_metrics[name]):.3f}")


if __name__ == "__main__":
    main()
