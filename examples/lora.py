"""With LoRA the output head's gradient does not leave the client: `python examples/lora.py`.

A word attack then logs 0 with ``exposed = 0``. That says that this surface is closed, not that
the run is safe: the adapters' gradients still leave, and no attack here reads those.
"""

import lightning as L

from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.finetuning import CausalLMFineTuning, TextDataModule


def main() -> None:
    """Fine-tunes 10 steps whole, then 10 steps with LoRA."""
    for peft in (None, "lora"):
        monitor = LeakageMonitor(
            [AlignedFlatChat("sampled", calibration_tokens=4_000)], every_n_steps=5
        )
        trainer = L.Trainer(
            max_steps=10, callbacks=[monitor], default_root_dir="fedleak_runs", logger=False
        )
        trainer.fit(CausalLMFineTuning(peft=peft), datamodule=TextDataModule())
        f1, exposed = (monitor.latest[f"leakage/aligned_flatchat/{m}"] for m in ("f1", "exposed"))
        print(f"{peft or 'everything trained'}: F1 {f1:.3f}, exposed {exposed:.0f}")


if __name__ == "__main__":
    main()
