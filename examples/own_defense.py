"""A defence of your own in twenty lines: `python examples/own_defense.py`.

Only the largest entries of each gradient leave the client. The monitor attacks what would have left
(``leakage_local/...``) and what leaves (``leakage/...``). That costs the server little: the words
of a batch are in the largest entries. What the defence would do to layers that a dishonest server
adds, it does not say (``Defense.on_canary``), so that membership reads unknown, not safe.
"""

import math
from collections.abc import Sequence

import lightning as L
from torch import nn

from lightning_fedleak.attacks import AlignedFlatChat, FCMembership
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.strategies import DefendedStrategy


class TopK(Defense):
    """Keeps the share of each gradient's entries that are largest, and sets the others to zero."""

    name = "top_k"
    guarantee = "none: the largest entries leave the client as they are"

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise DefenseError(f"TopK: share={share!r} must be above 0 and at most 1")
        self.share = share

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Sets the smaller entries of ``p.grad`` to zero, in place."""
        for p in parameters:
            if p.grad is not None:
                kept = max(1, int(self.share * p.grad.numel()))
                threshold = p.grad.abs().flatten().topk(kept).values[-1]
                p.grad.masked_fill_(p.grad.abs() < threshold, 0.0)


def main() -> None:
    """Trains 6 steps and prints what leaked before the defence and after it."""
    monitor = LeakageMonitor(
        [AlignedFlatChat("sampled", calibration_tokens=2_000), FCMembership(layer=2, ladder=[1.0])],
        every_n_steps=3,
        settings=WatchSettings(stages=("local", "shared")),
    )
    trainer = L.Trainer(
        max_steps=6,
        strategy=DefendedStrategy("auto", defenses=[TopK(share=0.01)]),
        devices=1,
        callbacks=[monitor],
        default_root_dir="fedleak_runs",
        logger=False,
    )
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())
    for name in ("aligned_flatchat/f1", "fc_membership/auc"):
        for prefix in ("leakage_local", "leakage"):
            value = monitor.latest[f"{prefix}/{name}"]
            print(f"{prefix}/{name} = {'unknown' if math.isnan(value) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
