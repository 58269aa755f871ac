"""The trained weights of a fit on two processes; see test_memorization.py."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

from lightning_fedleak import LeakageMonitor
from lightning_fedleak.attacks.memorization import Combined, Extraction
from lightning_fedleak.callbacks import MonitorSettings
from tests.looks.channels.test_memorization import SETTINGS, fit


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    watching = LeakageMonitor(
        [Combined(), Extraction(tokens=4)],
        log_dir=folder,
        settings=MonitorSettings(memorization=SETTINGS),
    )
    _, module = fit([watching], devices=2, strategy="ddp", max_epochs=2)
    [channel] = {c for s, c in watching.engine.series.items() if s.name == "combined"}
    found = {
        "latest": {k: v for k, v in watching.latest.items() if k.startswith("leakage/")},
        "failures": watching.failures,
        "looks": watching.looks,
        "weights": float(sum(p.double().sum() for p in module.parameters())),
        "seen": int(channel._pool.seen.sum()),
        "base": channel._base.log_probs.double().sum(1).tolist(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
