"""An attack of your own beside a built-in one: `python examples/custom_attack.py`."""

import lightning as L

from lightning_fedleak import attacks
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import Observation


class LargestRows(attacks.Attack):
    """Names the word types whose rows of the head's gradient are the longest.

    Args:
        n_types: how many it names: a guess of the adversary's, it does not know the number.
    """

    threat_model = attacks.ThreatModel.create(
        "a server that reads one update of the output head", attacks.Capability.SEES_HEAD_GRADIENT
    )
    default_name = "largest_rows"

    def __init__(self, n_types: int = 150, name: str | None = None) -> None:
        super().__init__(name)
        self.n_types = n_types

    def needs(self, anatomy: Anatomy) -> attacks.Surfaces:
        """The head's weight."""
        return attacks.Surfaces(gradients=(HEAD_WEIGHT,))

    def run(self, view: Observation, query: attacks.Query | None = None) -> attacks.WordGuess:
        """Ranks the rows of the gradient, (V, d), by their 2-norm."""
        lengths = view.gradient(HEAD_WEIGHT).float().norm(dim=1)
        if not bool(lengths.isfinite().all()) or not bool(lengths.any()):
            raise attacks.UnusableObservation("the head's gradient is not finite, or all zero")
        return attacks.WordGuess(types=lengths.topk(self.n_types).indices, scores=lengths)


def main() -> None:
    """Trains 10 steps and prints how the two attacks did."""
    monitor = LeakageMonitor(
        [LargestRows(), attacks.AlignedFlatChat("sampled", calibration_tokens=2_000)],
        every_n_steps=5,
    )
    trainer = L.Trainer(
        max_steps=10, callbacks=[monitor], default_root_dir="fedleak_runs", logger=False
    )
    trainer.fit(CausalLMFineTuning(), datamodule=TextDataModule())
    for attack in monitor.attacks:
        print(f"{attack.name}: F1 {monitor.latest[f'leakage/{attack.name}/f1']:.3f}")


if __name__ == "__main__":
    main()
