"""A site's training script: Lightning with ``flare.patch``, which NVFlare runs in a thread."""

import lightning as L
import nvflare.client.lightning as flare
from watch import STEPS, Module, loader

from lightning_fedleak.federation import TrainedOn


def main() -> None:
    """Train as often as the server asks."""
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[TrainedOn()],  # the filter asks what was trained on
    )
    flare.patch(trainer)
    module, data = Module(), loader(flare.get_site_name())
    while flare.is_running():
        trainer.fit(module, data)


main()
