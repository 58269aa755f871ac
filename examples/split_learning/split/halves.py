"""A model in parts: consecutive blocks with what the model computes before or after them.

Each part runs the model's own ``forward`` over fewer blocks, so that the model itself handles
masks, positions, rotary angles, PEFT and the loss. A stand-in at the head of the list of blocks
supplies the hidden states of the part before, and one at its end returns them.
"""

from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_fedleak.model.anatomy import cache_argument, states_in, with_states_out
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


class _OwnLayers(DynamicCache):
    """Keys and values of a part's blocks, which are numbered as in the whole model."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states, layer_idx - self._first, *args, **kwargs)


class ModelPart(nn.Module):
    """Blocks ``start + 1`` to ``stop`` of a model, with the layers before or after them.

    It has the parameters that it needs, and shares them with the model. A part that begins at the
    tokens has the embeddings; one that ends at the logits has the norm and the head.

    Args:
        model: with fewer blocks.
        width: numbers in an embedding.
        arrive: the stand-in at its head, an :class:`Arrive`, or None.
        leave: the one at its end, a :class:`Leave`, or None.

    Attributes:
        start: blocks before this part.
        stop: blocks up to its end.
    """

    def __init__(
        self, model: nn.Module, width: int, start: int, stop: int, arrive: Any, leave: Any
    ) -> None:
        super().__init__()
        self.model = model
        self.start, self.stop = start, stop
        self._width = width
        self._arrive, self._leave = arrive, leave
        self._few_logits = takes(model, "logits_to_keep")

    @property
    def device(self) -> torch.device:
        """The device of inputs."""
        return next(self.parameters()).device

    @property
    def takes_positions(self) -> bool:
        """Whether the model takes positions."""
        return takes(self.model, "position_ids")

    def new_cache(self) -> DynamicCache | None:
        """Return an empty cache of keys and values; None for a part without blocks."""
        return _OwnLayers(self.start) if self.stop > self.start else None

    def states(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, d) after this part, which does not end at the logits.

        Args:
            inputs: (B, L) token ids, or (B, L, d) hidden states of the part before.
            attention_mask: (B, P + L) with the P tokens in ``cache``, or None.
            position_ids: (B, L) or None for the model's own.
            cache: of :meth:`new_cache`, filled on the way.
        """
        try:
            self._run(inputs, attention_mask, position_ids, cache)
        except _Reached as reached:
            return reached.states
        raise SplitError(f"{type(self.model).__name__} never called the end of its blocks")

    def output(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        *,
        labels: Tensor | None = None,
        last_only: bool = False,
    ) -> Any:
        """Return the model's output: ``logits``, and with ``labels`` its own ``loss``.

        Arguments are as in :meth:`states`; with ``last_only`` the logits are at least those of the
        last position.
        """
        extra: dict[str, object] = {} if labels is None else {"labels": labels}
        if last_only and self._few_logits:
            extra["logits_to_keep"] = 1
        return self._run(inputs, attention_mask, position_ids, cache, **extra)

    def _run(
        self, states_or_ids: Tensor, mask: Any, positions: Any, cache: Any, **extra: Any
    ) -> Any:
        if self._arrive is None:
            inputs: dict[str, object] = {"input_ids": states_or_ids}
        else:
            shape = (*states_or_ids.shape[:2], self._width)
            inputs = {"inputs_embeds": states_or_ids.new_zeros(shape)}
            self._arrive.states = states_or_ids
        if self.stop == self.start:
            cache, mask = None, None if mask is None else mask[:, -states_or_ids.shape[1] :]
        if mask is not None:
            inputs["attention_mask"] = mask
        if positions is not None:
            inputs["position_ids"] = positions
        if takes(self.model, "use_cache"):
            inputs["use_cache"] = cache is not None
        if cache is not None:
            inputs[cache_argument(self.model) or "past_key_values"] = cache
        try:
            return copy_context().run(self.model, **inputs, **extra)
        finally:
            if self._arrive is not None:
                self._arrive.states = None
