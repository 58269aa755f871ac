"""Ground truth of a step of a model without an output head: the token ids at its embedding.

The loss of such a model is computed from hidden states, for example a contrastive loss of sentence
embeddings. A step may call the model several times, once for each text of a pair or triplet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Kind
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.taps.graph import GraphTap, read_inputs
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read
from lightning_fedleak.model.taps.step import ModelCall


class EncoderTap(GraphTap):
    """Hooks that record which calls of a model without a head got a gradient in a step.

    Args:
        anatomy: The parts of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__(anatomy)
        self._calls_with_gradient: list[ModelCall] = []
        if not model_runs.is_compiled(anatomy.root):  # a missing head is no obstacle here
            self.why_not = None

    def close(self) -> None:
        """Remove the hooks, and forget the calls."""
        super().close()
        self._calls_with_gradient = []

    def take(self, read: TokenBatch | None = None) -> list[ModelCall]:
        """Return the calls whose hidden states got a gradient since the last time; forget them.

        Args:
            read: Unused; part of the interface of :class:`GraphTap`.

        Raises:
            Exception: An exception that a hook raised during the user's forward or backward.
        """
        raise_kept(self)
        found, self._calls_with_gradient = self._calls_with_gradient, []
        calls = [call for call in self._calls if call in found]
        self._calls = [call for call in self._calls if call not in found]
        return calls

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: Any) -> None:
        if model_runs.is_observed() or not self._depth:
            return
        self._depth -= 1
        outputs = [*output.values()] if isinstance(output, Mapping) else output
        for states in outputs if isinstance(outputs, list | tuple) else [output]:
            if isinstance(states, Tensor) and states.requires_grad and self._calls:
                note = partial(self._note_gradient, self._calls[-1])
                states.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_gradient(self, call: ModelCall, gradient: Tensor) -> None:
        self._calls_with_gradient.append(call)

    def _read_reach(self, call: ModelCall, gradient: Tensor) -> None:
        super()._read_reach(call, gradient)
        self._calls_with_gradient.append(call)


def read_encoder_call(call: ModelCall, kind: Kind, read: TokenBatch | None = None) -> ModelCall:
    """Return the call with its token batch: ids, mask, and labels if the user's batch matches.

    Args:
        call: A call whose hidden states got a gradient.
        kind: The kind of the model.
        read: The user's batch, or None if it could not be read. Its labels are used if its ids have
            the call's shape.

    Raises:
        BatchError: No ids arrived at the model's input embedding.
    """
    batch = read_inputs(call, kind, read)
    has_same_shape = read is not None and read.input_ids.shape == batch.input_ids.shape
    batch = replace(batch, labels=read.labels if read and has_same_shape else None)
    return replace(call, batch=batch)
