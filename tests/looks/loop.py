"""A third face of the engine: a training loop of one's own, with neither Lightning nor Flower."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.looks import Destination, Engine, Processes, Run


@dataclass(frozen=True)
class LoopRun(Run):
    """One process that trains a model with one optimizer."""

    optimizer: Optimizer
    steps: list[int] = field(default_factory=lambda: [0])
    rank, processes, defenses, tokenizers = 0, 1, (), ()
    precision, clip_value = "32-true", math.inf
    device = property(lambda self: self.anatomy.device)
    optimizers = property(lambda self: [self.optimizer])
    step = property(lambda self: self.steps[0])

    def forward_context(self) -> Any:
        return nullcontext()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Mapping[str, torch.Tensor]],
    engine: Engine,
    folder: Path,
    accumulated: int = 1,
) -> Sequence[float]:
    """Return the losses of a loop that the engine watches."""
    engine.reset()
    engine.check(Processes(1, "rank", None), lambda: find_anatomy(model))
    run = LoopRun(find_anatomy(model), "rank", engine.assume, optimizer)
    engine.open(run)
    engine.begin(run, Destination(folder))
    engine.training_begins()
    losses = []
    for number, batch in enumerate(batches, 1):
        engine.batch_begins(batch)
        loss = model(**batch).loss / accumulated
        engine.loss_computed(loss)
        loss.backward()
        if number % accumulated == 0:
            engine.optimizer_steps(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            run.steps[0] += 1
        engine.batch_ends(trained=True)
        losses.append(float(loss))
    engine.training_ends()
    engine.end("finished")
    engine.close()
    return losses
