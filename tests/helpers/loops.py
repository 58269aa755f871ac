"""A plain training loop under a watch: what it logs, and the state that it ends in."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.trainers import Threshold, Watch
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import grouped

Batch = Any
Loss = Callable[[Any, Batch], Tensor | None]


class RecordedWatch(Watch):
    """A watch whose log can be read back."""

    @property
    def looks(self) -> int:
        return self.engine.results.looks

    @property
    def failures(self) -> int:
        return self.engine.results.failures

    def lines(self, attack: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of ``leakage.jsonl``, of one attack or of all."""
        return lines_of(self.folder, attack)


def lines_of(folder: Path, attack: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of the ``leakage.jsonl`` below a folder, of one attack or of all."""
    (path,) = folder.rglob("leakage.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if attack in (None, line["attack"])]


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a Hugging Face model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def one_step(
    watch: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> None:
    """Train on one batch within a step of a watch."""
    with watch.step(batch):
        model_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def still_gpt2(**settings: Any) -> nn.Module:
    """Return a model without dropout, to be trained with a rate of 0."""
    return tiny_gpt2(**{"dropout": 0.0} | settings)


@dataclass
class Training:
    """What a loop ends with."""

    watch: Any
    losses: list[float]
    state: list[Tensor]
    steps: int


def train(
    folder: Path | None,
    attacks: Any = "auto",
    model: Any = None,
    *,
    batches: Iterable[Batch] | None = None,
    n: int = 32,
    loss: Loss = model_loss,
    optimizer: str = "sgd",
    lr: float = 1e-2,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    before_step: Callable[[Any], object] = lambda model: None,
    gates: Sequence[Threshold] = (),
    loader: Any = None,
    state: Any = None,
    configure: Callable[[Any], object] = lambda watch: None,
    **settings: Any,
) -> Training:
    """Train a model, and watch it at every step unless ``settings`` say otherwise.

    Args:
        folder: of the logs; None for a loop without a watch.
        attacks: the attacks.
        model: default a tied GPT-2 with dropout.
        batches: default ``n`` rows of random tokens in batches of four.
        n: rows.
        loss: the loss of a model on a batch; None where the batch trains nothing.
        optimizer: ``"sgd"`` or ``"adamw"``.
        lr: its rate.
        optimizers: optimizers of the test's own, which all step together.
        accumulate: batches of an optimizer step.
        before_step: what the loop does to the model between backward and step.
        gates: gates of the watch.
        loader: the loader of the watch, which gives the batches too.
        state: of an earlier watch, which this one goes on from.
        configure: is called with the watch before the run begins.
        **settings: of the watch.
    """
    torch.manual_seed(7)
    model = tiny_gpt2() if model is None else model
    model.train()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [kind(trained, lr=lr)] if optimizers is None else optimizers
    watch = None
    if folder is not None:
        settings = {"every_n_steps": 1, "tensorboard": False} | settings
        if settings.get("max_overhead") is not None:
            settings["every_n_steps"] = None
        watch = RecordedWatch(
            model, optimizers, attacks, gates, loader=loader, folder=folder, **grouped(settings)
        )
        configure(watch)
        if state is not None:
            watch.load_state_dict(state)
    autocast = settings.get("precision") == "bf16-mixed"
    if batches is None:
        batches = random_token_loader(n) if loader is None else loader
    losses: list[float] = []
    steps = 0
    with watch or nullcontext():
        for number, batch in enumerate(batches, 1):
            with watch.step(batch) if watch else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    batch_loss = loss(model, batch)
                if batch_loss is not None:
                    (batch_loss / accumulate).backward()
                    losses.append(batch_loss.item())
                if number % accumulate == 0 and batch_loss is not None:
                    before_step(model)
                    for one in optimizers:
                        one.step()
                        one.zero_grad()
                    steps += 1
            if watch is not None and watch.should_stop:
                break
    moments = [v for one in optimizers for entry in one.state.values() for v in entry.values()]
    tensors = [*model.state_dict().values(), *(v for v in moments if isinstance(v, Tensor))]
    state_at_end = [*(t.detach().clone() for t in tensors), torch.get_rng_state()]
    return Training(watch, losses, state_at_end, steps)


def watched(folder: Path, attacks: Any = "auto", model: Any = None, **settings: Any) -> Any:
    """Return the watch of a loop; see :func:`train`."""
    return train(folder, attacks, model, **settings).watch


def assert_same_training(one: Training, other: Training) -> None:
    """Check that two loops had the same losses, and end in the same state to the bit."""
    assert one.losses == other.losses
    assert one.losses
    assert len(one.state) == len(other.state)
    assert all(map(torch.equal, one.state, other.state))


def check_undisturbed(
    folder: Path, attacks: Any, make: Callable[[], Any] = tiny_gpt2, **settings: Any
) -> Any:
    """Check that a loop is the same to the bit with and without a watch, which is returned."""
    training = train(folder, attacks, make(), **settings)
    assert_same_training(train(None, None, make(), **settings), training)
    return training.watch


def work_for(seconds: float) -> None:
    """Keep a processor busy for a duration."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
