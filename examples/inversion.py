"""What a split leaks, block by block, as training runs: `python examples/inversion.py`.

In split learning a client keeps the first blocks and sends their hidden states; here nothing is
split, and the monitor reads what your own forward gives behind each block. The server that has the
whole model reads the texts off it, left to right: that a split lies deep is no defence.
"""

import lightning as L

from lightning_fedleak.attacks import PrefixInversion
from lightning_fedleak.callbacks import LeakageMonitor, WatchSettings
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule

SPLITS = (1, 3, 5)


def main() -> None:
    """Fine-tunes 9 steps and looks at two texts of every fourth batch."""
    attacks = [PrefixInversion(layer, public_text=None, name=f"split_{layer}") for layer in SPLITS]
    monitor = LeakageMonitor(attacks, every_n_steps=4, settings=WatchSettings(texts=2))

    def show(trainer: L.Trainer) -> None:
        found = [monitor.latest[f"leakage/{a.name}/token_accuracy"] for a in attacks]
        shares = ", ".join(f"split {n}: {x:.3f}" for n, x in zip(SPLITS, found, strict=True))
        print(f"step {monitor.last_step}: token accuracy at {shares}")

    monitor.subscribe(show)
    trainer = L.Trainer(
        max_steps=9, callbacks=[monitor], devices=1, default_root_dir="fedleak_runs", logger=False
    )
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())


if __name__ == "__main__":
    main()
