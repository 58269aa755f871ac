"""Canaries, an account and a lost file on two processes; see test_shared_weights.py."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor
from lightning_fedleak.engine import reference
from lightning_fedleak.evaluation.canaries import leave_out
from tests.engine.channels.test_canaries import planted, watch
from tests.engine.channels.test_memorization import combined, fit, rows


def latest(watching: LeakageMonitor) -> dict[str, float]:
    starts = ("leakage/", "audit/")
    return {name: v for name, v in watching.latest.items() if name.startswith(starts)}


def canaries(folder: Path) -> dict[str, Any]:
    data = planted()
    watching = watch(data, folder)
    fit([watching], data=data, devices=2, strategy="ddp", max_epochs=1)
    [channel] = {c for s, c in watching.engine.series.items() if s.name == "canary_x8"}
    base = channel._base.log_probs.double().sum(1).tolist()  # type: ignore[attr-defined]
    return {"latest": latest(watching), "base": base}


def account(folder: Path) -> dict[str, Any]:
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)
    strategy = DefendedStrategy("ddp", [defense], client="world")
    data = leave_out(rows(), 140, seed=1, coins=True)[0]
    watching = combined(folder)
    fit([watching], data=data, devices=2, strategy=strategy, max_epochs=1)
    return {"latest": latest(watching), "step": watching.last_step}


def lost(folder: Path, rank: int) -> dict[str, Any]:
    """A resumed fit whose second process does not see the base's answers."""
    keep = ModelCheckpoint(folder / "ckpt", save_last=True)
    fit(
        [combined(folder), keep], devices=2, strategy="ddp", max_epochs=1, enable_checkpointing=True
    )
    path = folder / "ckpt" / "last.ckpt"
    load = reference.load_private
    if rank:
        reference.load_private = refuse  # type: ignore[assignment]
    watching = combined(folder / "resumed")
    fit([watching], devices=2, strategy="ddp", max_epochs=2, ckpt_path=str(path))
    reference.load_private = load
    return {"latest": latest(watching)}


def refuse(path: Path) -> Any:
    raise OSError("it is on another machine")


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {
        "canaries": canaries(folder / "canaries"),
        "world": account(folder / "world"),
        "lost": lost(folder / "lost", rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
