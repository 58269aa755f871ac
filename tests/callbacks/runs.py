"""Runs of a tiny model that are compared with and without the callbacks."""

import inspect
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fedleak.attacks.base import (
    Attack,
    Capability,
    Query,
    Surfaces,
    ThreatModel,
    WordGuess,
)
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.lightning_packages import twin
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import Observation
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import grouped


class Probe(Attack):
    """Names the rows with the largest norm, and keeps a copy of what it was shown."""

    threat_model = ThreatModel.create("a test", Capability.SEES_HEAD_GRADIENT)
    default_name = "probe"
    reads_adaptive_updates = True
    needs_control = False  # it counts what it was shown

    def __init__(self, k: int = 10, name: str | None = None, role: str = HEAD_WEIGHT) -> None:
        super().__init__(name)
        self.k = k
        self.role = role
        self.seen: list[Any] = []
        self.prepared = 0

    def needs(self, anatomy: Anatomy) -> Surfaces:
        return Surfaces(gradients=(self.role,))

    def prepare(self, anatomy: Anatomy) -> None:
        self.prepared += 1

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        gradient = view.gradient(self.role)
        snapshot = view.gradients[-1]
        self.seen.append((snapshot.step, str(snapshot.stage), gradient.clone()))
        scores = gradient.float().reshape(gradient.shape[0], -1).norm(dim=1)
        return WordGuess(scores.topk(self.k).indices, scores)

    def at(self, stage: str) -> list[Tensor]:
        return [g for _, s, g in self.seen if s == stage]

    def config(self) -> dict[str, object]:
        return {"k": self.k}


def monitor_with(attacks: Any = "auto", **arguments: Any) -> LeakageMonitor:
    """Return a monitor whose rare settings are named among its arguments."""
    return LeakageMonitor(attacks, **grouped(arguments))


def fit(
    callbacks: list[L.Callback],
    root: Any,
    *,
    module: L.LightningModule | None = None,
    n: int = 32,
    loader: Any = None,
    ckpt_path: str | None = None,
    kind: type[L.Trainer] = L.Trainer,
    **trainer: Any,
) -> L.Trainer:
    """Fits a tiny GPT-2 with dropout on random tokens; the same seed gives the same run."""
    L.seed_everything(7, verbose=False)
    if module is None:
        module = CausalLMModule(tiny_gpt2().train(), optimizer="adamw")
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": twin("loggers.CSVLogger", kind)(root, flush_logs_every_n_steps=1),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": root,
    } | trainer
    trainer_ = kind(callbacks=callbacks, **settings)
    given = random_token_loader(n) if loader is None else loader
    # Lightning before 2.6 has no such argument, and loads all of a checkpoint.
    named = inspect.signature(trainer_.fit).parameters
    whole = {"weights_only": False} if "weights_only" in named else {}
    trainer_.fit(module, given, ckpt_path=ckpt_path, **whole)
    return trainer_


def footprint(trainer: L.Trainer) -> list[Tensor]:
    """Everything that must be bit-identical: weights, optimizer state, loss, RNG."""
    tensors = [p.detach() for p in trainer.lightning_module.state_dict().values()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, Tensor)]
    tensors += [trainer.callback_metrics["train_loss"], torch.get_rng_state()]
    return [t.clone() for t in tensors]


def logged_losses(trainer: L.Trainer) -> list[str]:
    """The train_loss column of the run's CSV, as written."""
    import csv
    from pathlib import Path

    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [row["train_loss"] for row in csv.DictReader(file) if row.get("train_loss")]


@dataclass(frozen=True)
class Kept:
    """What must be bit-identical, of a run that several others are compared with."""

    footprint: list[Tensor]
    losses: list[str]

    @classmethod
    def of(cls, trainer: L.Trainer) -> "Kept":
        """To be called as the run ends: the state of the random numbers is part of it."""
        return cls(footprint(trainer), logged_losses(trainer))


def assert_same(plain: L.Trainer | Kept, watched: L.Trainer) -> None:
    a = plain if isinstance(plain, Kept) else Kept.of(plain)
    b = Kept.of(watched)
    assert len(a.footprint) == len(b.footprint)
    assert all(torch.equal(x, y) for x, y in zip(a.footprint, b.footprint, strict=True))
    assert a.losses == b.losses
    assert a.losses
