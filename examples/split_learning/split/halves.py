"""A model in parts: consecutive blocks with what the model computes before or after them.

Each part runs the model's own ``forward`` over fewer blocks, so that the model itself handles
masks, positions, rotary angles, PEFT and the loss. A stand-in at the head of the list of blocks
supplies the hidden states of the part before, and one at its end returns them.
"""

from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy import states_in, with_states_out
from lightning_fedleak.model.model_runs import takes


class SplitError(ValueError):
    """A model cannot be run in two such halves; the message names the reason and a way out."""


class _Reached(Exception):
    """The end of a forward, no error: it carries the hidden states out."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class Arrive(nn.Module):
    """A stand-in for the blocks before, which returns the hidden states of the part before."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self._like = like
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the hidden states in the form that a block returns."""
        if self.states is None:
            raise RuntimeError("no hidden states have come")
        return with_states_out(self._like, self.states)


class Leave(nn.Module):
    """A stand-in for the blocks after, which ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an exception that carries the hidden states out."""
        raise _Reached(states_in(args, kwargs))


class Nothing(nn.Module):
    """A stand-in for an embedding on a side that gets hidden states: it adds nothing."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        weight = next(like.parameters())
        self.register_buffer("zero", weight.new_zeros(1).detach(), persistent=False)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return a zero (1,) that broadcasts to any shape."""
        return self.zero


class ModelPart(nn.Module):
    """Consecutive blocks of a model up to ``stop``, with the layers before or after them.

    It has the parameters that it needs, and shares them with the model. A part that begins at the
    tokens has the embeddings; one that ends at the logits has the norm and the head.

    Args:
        model: with fewer blocks.
        width: numbers in an embedding.
        arrive: the stand-in at its head, an :class:`Arrive`, or None.
        leave: the one at its end, a :class:`Leave`, or None.

    Attributes:
        stop: blocks up to its end.
    """

    def __init__(self, model: nn.Module, width: int, stop: int, arrive: Any, leave: Any) -> None:
        super().__init__()
        self.model = model
        self.stop = stop
        self._width = width
        self._arrive, self._leave = arrive, leave

    @property
    def device(self) -> torch.device:
        """The device of inputs."""
        return next(self.parameters()).device

    def states(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, d) after this part, which does not end at the logits.

        Args:
            inputs: (B, L) token ids, or (B, L, d) hidden states of the part before.
            attention_mask: (B, L) or None.
            position_ids: (B, L) or None for the model's own.
        """
        try:
            self.output(inputs, attention_mask, position_ids)
        except _Reached as reached:
            return reached.states
        raise SplitError(f"{type(self.model).__name__} never called the end of its blocks")

    def output(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the model's output: ``logits``, and with ``labels`` its own ``loss``.

        Arguments are as in :meth:`states`.
        """
        if self._arrive is None:
            arguments: dict[str, object] = {"input_ids": inputs}
        else:
            arguments = {"inputs_embeds": inputs.new_zeros((*inputs.shape[:2], self._width))}
            self._arrive.states = inputs
        optional = {"attention_mask": attention_mask, "position_ids": position_ids}
        optional["labels"] = labels
        arguments |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        if takes(self.model, "use_cache"):
            arguments["use_cache"] = False
        try:
            return copy_context().run(self.model, **arguments)
        finally:
            if self._arrive is not None:
                self._arrive.states = None
