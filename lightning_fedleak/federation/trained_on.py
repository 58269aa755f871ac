"""What a client's local steps were trained on: kept where they run, for who looks at the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lightning_fedleak.lightning_packages import EitherCallback

if TYPE_CHECKING:
    import lightning.pytorch as L

_BATCHES: ContextVar[list[Any] | None] = ContextVar("fedleak_trained_on", default=None)


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Keeps every batch that :func:`trained_on` is told of inside the block, by reference."""
    batches: list[Any] = []
    token = _BATCHES.set(batches)
    try:
        yield batches
    finally:
        _BATCHES.reset(token)


def trained_on(batch: Any) -> None:
    """Tells whoever looks at this round's update that it was trained on ``batch``.

    To be called in a loop of one's own, for every batch of every local step. It does nothing where
    nobody looks. A Lightning Trainer takes :class:`TrainedOn` in its place.
    """
    batches = _BATCHES.get()
    if batches is not None:
        batches.append(batch)


class TrainedOn(EitherCallback):
    """A callback that tells :func:`trained_on` of every batch of a fit."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch is about to be trained on."""
        trained_on(batch)


__all__ = ["TrainedOn", "recording", "trained_on"]
