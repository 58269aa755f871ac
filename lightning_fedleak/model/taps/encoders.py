"""The truth of a step of a model without an output head: the ids at its embedding, and no labels.

Its loss is of hidden states, as a contrastive one of sentence embeddings is, and a step may call it
once for each text of a pair or triplet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Kind
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.taps.graph import GraphTap, read_inputs
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read
from lightning_fedleak.model.taps.step import ModelCall


class EncoderTap(GraphTap):
    """Hooks that read which calls of a model without a head a step was trained on.

    Args:
        anatomy: the parts of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__(anatomy)
        self._trained: list[ModelCall] = []
        if not model_runs.is_compiled(anatomy.root):
            self.why_not = None

    def close(self) -> None:
        """Remove the hooks, and forget the calls."""
        super().close()
        self._trained = []

    def take(self, read: TokenBatch | None = None) -> list[ModelCall]:
        """Return the calls whose states got a gradient since the last time, and forget them.

        Args:
            read: not needed.

        Raises:
            Exception: what a hook raised in the user's forward or backward.
        """
        raise_kept(self)
        trained, self._trained = self._trained, []
        calls = [call for call in self._calls if call in trained]
        self._calls = [call for call in self._calls if call not in trained]
        return calls

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: Any) -> None:
        if model_runs.is_observed() or not self._depth:
            return
        self._depth -= 1
        parts = [*output.values()] if isinstance(output, Mapping) else output
        for states in parts if isinstance(parts, list | tuple) else [output]:
            if isinstance(states, Tensor) and states.requires_grad and self._calls:
                trains = partial(self._note_trained, self._calls[-1])
                states.register_hook(trains)  # type: ignore[no-untyped-call]

    def _note_trained(self, call: ModelCall, gradient: Tensor) -> None:
        self._trained.append(call)

    def _read_reach(self, call: ModelCall, gradient: Tensor) -> None:
        super()._read_reach(call, gradient)
        self._trained.append(call)


def read_encoder_call(call: ModelCall, kind: Kind, read: TokenBatch | None = None) -> ModelCall:
    """Return a call of a model without a head, with its ids and mask.

    Args:
        call: whose states got a gradient.
        kind: of the model.
        read: the user's batch as it could be read, whose labels are the call's if it has its shape.

    Raises:
        BatchError: no ids arrived at the model's input embedding.
    """
    if call.ids is None:
        raise BatchError("no ids arrived at the model's input embedding (inputs_embeds?)")
    batch = read_inputs(call, call.ids, kind, read)
    same = read is not None and read.input_ids.shape == call.ids.shape
    batch = replace(batch, labels=read.labels if read and same else None)
    return replace(call, batch=batch)
