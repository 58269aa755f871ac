"""The token ids that the model itself was run on, where a defence replaces those of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.insertion import argument_of
from lightning_fedleak.batches import TokenBatch


class ModelIds:
    """Keeps the ``input_ids`` of every forward with gradient between :meth:`arm` and the next.

    Args:
        anatomy: of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._seen: list[Tensor | None] = []
        self._armed = False

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._armed and torch.is_grad_enabled():
                self._seen.append(argument_of(model, "input_ids", args, kwargs))

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)

    def arm(self, on: bool = True) -> None:
        """Forgets what was kept; keeps from now on, or (False) no longer."""
        self._seen = []
        self._armed = on

    def close(self) -> None:
        """Removes the hook."""
        self.arm(False)
        self._handle.remove()

    def written(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """The batches with the ids that the model was run on in place of their own.

        Raises:
            UnusableObservation: the model was not called once for each batch, or on other shapes.
        """
        found = [
            replace(batch, input_ids=ids)
            for batch, ids in zip(batches, self._seen, strict=False)
            if ids is not None and ids.shape == batch.input_ids.shape
        ]
        if len(self._seen) != len(batches) or len(found) != len(batches):
            raise UnusableObservation(
                "a defence replaces the batch, and which token ids the model was run on cannot be "
                f"told: it was called {len(self._seen)} times in {len(batches)} batches, and on "
                f"ids of the batch's shape in {len(found)} of them"
            )
        return found


__all__ = ["ModelIds"]
