"""One of two gloo processes that train on pairs as one client; see test_defended.py."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from lightning_fedleak.defenses import DPSGD
from tests.helpers.cases import gathered
from tests.trainers.hosts import traced
from tests.trl.test_defended import WideLogProbs, gradient_of, pairs_trainer_of, utils

CLIP = 2.0


def main(root: Path) -> None:
    distributed.init_process_group("gloo")
    pytest.MonkeyPatch().setattr(utils, "_ChunkedLogProbFunction", WideLogProbs)
    defense = DPSGD(CLIP, 0.0, seed=1, max_physical_batch_size=3)
    more = {"per_device_train_batch_size": 4, "ddp_backend": "gloo", "use_cpu": True}
    trainer = pairs_trainer_of(root, defense, **more)
    gradients = [gradient_of(trainer, example) for example in trainer.train_dataset]
    trace = traced(trainer)
    drawn, distances = gathered(trace.drawn), []
    for shared, one, other in zip(trace.shared, *drawn, strict=True):
        clipped = [
            g * min(1.0, CLIP / float(g.norm())) for g in (gradients[i] for i in one + other)
        ]
        total = torch.stack(clipped).sum(0)
        distances.append(float((shared * 8 - total).norm() / total.norm()))
    found = {
        "distances": distances,
        "sizes differ": any(len(a) != len(b) for a, b in zip(*drawn, strict=True)),
        "rate": defense.privacy.sample_rate,
        "restored": "gather" not in vars(trainer.accelerator),
    }
    (root / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
