"""Could a dishonest server tell whether a text is in a batch? `python examples/membership.py`.

The server would add two layers of its own to the model. Here nothing is added: what their gradient
would be follows from each step that is looked at, and goes the way of every gradient, through the
defences. Clipping and noise hold the server back; noise that is small beside the clip does not.
"""

import lightning as L

from lightning_fedleak.attacks import FCMembership
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.strategies import DefendedStrategy


def main() -> None:
    """Fine-tunes 8 steps without a defence, then with little and with much noise."""
    defences = {
        "no defence": [],
        "sigma 0.01": [GradientNoise(clip=1.0, sigma=0.01)],
        "sigma 2": [GradientNoise(clip=1.0, sigma=2.0)],
    }
    for name, chosen in defences.items():
        monitor = LeakageMonitor(FCMembership(layer=2, ladder=[1.0]), every_n_steps=1)
        trainer = L.Trainer(
            max_steps=8,
            callbacks=[monitor],
            strategy=DefendedStrategy("auto", defenses=chosen),
            devices=1,
            default_root_dir="fedleak_runs",
            logger=False,
        )
        trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())
        auc, low, high = (
            monitor.latest[f"leakage/fc_membership/auc{end}"] for end in ("", "_low", "_high")
        )
        print(f"{name}: AUC {auc:.3f} (95% {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
