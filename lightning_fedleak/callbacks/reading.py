"""What the client's batch holds, read before any defence touches it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L

from lightning_fedleak.anatomy import Kind
from lightning_fedleak.batches import BatchAdapter, BatchError, TokenBatch, read_batch


class BatchReader:
    """Reads the batches of one fit.

    Args:
        kind: what the model's labels mean.
        adapter: the user's own, for batches of an unknown form.
    """

    def __init__(self, kind: Kind, adapter: BatchAdapter | None) -> None:
        self._kind = kind
        self._adapter = adapter
        self._checked = False

    def check_first(self, trainer: L.Trainer, batch: Any) -> None:
        """Refuses a first batch that cannot be read, on all processes at once.

        Raises:
            BatchError: here or on another process.
        """
        if self._checked:
            return
        error: Exception | None = None
        try:
            self.read(batch)
        except Exception as refusal:
            error = refusal
        if trainer.strategy.reduce_boolean_decision(error is not None, all=False):
            raise error or BatchError("another process could not read its first batch")
        self._checked = True

    def read(self, batch: Any) -> TokenBatch:
        """The batch's tokens, by reference.

        Raises:
            BatchError: it has no known form.
        """
        if batch is None:
            raise BatchError(
                "the batch is not known before training_step. A step that takes dataloader_iter "
                "cannot be watched: write training_step(self, batch, batch_idx)."
            )
        if self._adapter is not None:
            return self._adapter(batch)
        return read_batch(batch, self._kind)
