"""The trained weights of fits on two processes, under DDP and FSDP2; see test_memorization.py."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor

from lightning_fedleak import LeakageMonitor
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.callbacks import WatchSettings
from tests.engine.channels.test_memorization import SETTINGS, fit, tiny
from tests.helpers.sharded import ShardedModule


def run(kind: str, callbacks: list[Any]) -> list[torch.Tensor]:
    """Return this process's part of the weights that a fit ends with, and its random state."""
    if kind == "ddp":
        _, module = fit(callbacks, devices=2, strategy="ddp", max_epochs=2)
    else:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        model = ShardedModule(tiny(), 1e-2, "adamw")
        _, module = fit(callbacks, model, devices=2, strategy=strategy, max_epochs=2)
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [*weights, torch.get_rng_state()]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {}
    for kind in ("ddp", "fsdp2"):
        watching = LeakageMonitor(
            [Combined(), Extraction(tokens=4)],
            folder=folder / kind,
            settings=WatchSettings(
                memorization=SETTINGS, client="world" if kind == "fsdp2" else None
            ),
        )
        watched, alone = run(kind, [watching]), run(kind, [])
        [channel] = {c for s, c in watching.engine.series.items() if s.name == "combined"}
        results[kind] = {
            "latest": {k: v for k, v in watching.latest.items() if k.startswith("leakage/")},
            "failures": watching.failures,
            "looks": watching.looks,
            "same": all(torch.equal(*pair) for pair in zip(watched, alone, strict=True)),
            "parts": sum(p.numel() for p in alone),
            "seen": int(channel._pool.seen.sum()),
            "base": channel._base.log_probs.double().sum(1).tolist(),
        }
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
