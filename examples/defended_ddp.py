"""Two clients under DDP, each with a defence of its own: `python examples/defended_ddp.py`.

Every process is a client. Its gradient is clipped and noised *before* it is all-reduced, and the
monitor attacks what leaves (``leakage/...``) as well as what would have left without the defence
(``leakage_local/...``).
"""

import lightning as L

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.strategies import DefendedStrategy


def main() -> None:
    """Trains 6 steps on two processes."""
    monitor = LeakageMonitor(
        [AlignedFlatChat("sampled", calibration_tokens=2_000)],
        every_n_steps=3,
        settings=WatchSettings(stages=("local", "shared")),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DefendedStrategy("ddp", defenses=[GradientNoise(clip=1.0, sigma=0.01)]),
        max_steps=6,
        callbacks=[monitor],
        default_root_dir="fedleak_runs",
        logger=False,
    )
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())
    if trainer.is_global_zero:
        for prefix in ("leakage_local", "leakage"):
            name = f"{prefix}/aligned_flatchat/f1"
            print(f"{name} = {monitor.latest[name]:.3f}")


if __name__ == "__main__":
    main()
