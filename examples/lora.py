"""What a LoRA's shared gradients leak: `python examples/lora.py`.

The output head is frozen then, and an attack on its gradient logs 0 with ``exposed = 0``. That says
that this surface is closed, not that the run is safe: the adapters on the first block's projections
leave the client, and their few rows name every token that was read (from the second step on, since
before it LoRA's B is zero and A has no gradient). Dropout in front of the adapters hides much of
that; it is no defence with a guarantee. And whether a text is in the batch is told by every adapter
of every block, dropout or not. docs/setups.md has other set-ups, and rounds of AdamW.
"""

import lightning as L
from torch import nn

from lightning_fedleak.attacks import AlignedFlatChat, GradientMembership, SubspaceWords
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule


def main() -> None:
    """Fine-tunes 10 steps whole, then 10 steps with LoRA, with and without dropout."""
    for peft, dropout in ((None, 0.0), ("lora", 0.05), ("lora", 0.0)):
        attacks = [
            AlignedFlatChat("sampled", calibration_tokens=2_000),
            SubspaceWords(capacity_seconds=0),
            GradientMembership("sampled", tokens=32),
        ]
        monitor = LeakageMonitor(attacks, every_n_steps=5)
        module = CausalLMFineTuning(peft=peft)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
        trainer = L.Trainer(
            max_steps=10, callbacks=[monitor], default_root_dir="fedleak_runs", logger=False
        )
        trainer.fit(module, datamodule=TextDataModule(batch_size=4))
        print(f"{peft or 'everything trained'}, dropout {dropout}")
        for attack in attacks:
            of = f"leakage/{attack.name}"
            exposed = monitor.latest[f"{of}/exposed"]
            metric = "auc" if isinstance(attack, GradientMembership) else "f1"
            value = monitor.latest[f"{of}/{metric}"]
            print(f"  {attack.name}: {metric} {value:.3f}, exposed {exposed:.0f}")


if __name__ == "__main__":
    main()
