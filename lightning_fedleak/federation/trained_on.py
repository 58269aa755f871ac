"""Records what a client's local steps were trained on, for whoever looks at the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lightning_fedleak.lightning_packages import EitherCallback

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch.optim import Optimizer


class Recorded(list[Any]):
    """The batches of a round's local steps, by reference.

    Attributes:
        rates: the learning rate of each optimizer step; None where it was not reported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float | None] = []

    @property
    def learning_rate(self) -> float | None:
        """The mean over the local steps; None where no step reported one, NaN where not all did."""
        rates = [rate for rate in self.rates if rate is not None]
        if not rates:
            return None
        return math.fsum(rates) / len(rates) if len(rates) == len(self.rates) else math.nan


_BATCHES: ContextVar[Recorded | None] = ContextVar("fedleak_trained_on", default=None)


@contextmanager
def recording() -> Iterator[Recorded]:
    """Keep every batch that :func:`trained_on` reports inside the block, by reference."""
    batches = Recorded()
    token = _BATCHES.set(batches)
    try:
        yield batches
    finally:
        _BATCHES.reset(token)


def trained_on(batch: Any, *, learning_rate: float | None = None, step: bool = True) -> None:
    """Report to whoever looks at this round's update that it was trained on ``batch``.

    To be called in a loop of one's own, for every batch of every local step. It does nothing where
    nobody looks. A Lightning Trainer takes :class:`TrainedOn` in its place.

    Args:
        batch: as the model takes it.
        learning_rate: of the step, where a schedule changes it over steps or rounds; None: the one
            that the observer's optimizer has.
        step: whether an optimizer step follows; False for a batch whose gradient is accumulated.
    """
    batches = _BATCHES.get()
    if batches is not None:
        batches.append(batch)
        if step:
            batches.rates.append(learning_rate)


class TrainedOn(EitherCallback):
    """A callback that reports every batch and every optimizer step of a fit, with its rate."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report the batch that is about to be trained on."""
        trained_on(batch, step=False)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the step's learning rate; it is NaN where parameters have several."""
        batches = _BATCHES.get()
        if batches is not None:
            rates = {float(group["lr"]) for group in optimizer.param_groups}
            batches.rates.append(rates.pop() if len(rates) == 1 else math.nan)
