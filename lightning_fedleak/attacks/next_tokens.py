"""What the server's own top model makes of hidden states it was sent: which token comes next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy.text_layers import (
    Place,
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)
from lightning_fedleak.anatomy.wrappers import matrix_shape, unwrap
from lightning_fedleak.attacks.bottom import BottomModel
from lightning_fedleak.attacks.logit_map import LogitMap
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import cut_at, inputs_of, run_logits

_TRIAL_TOKENS = 8


class NextTokens:
    """Logits of the next token, read off the hidden states that crossed the split.

    The server runs its top model on them anyway. One forward gives the inputs of the head at all
    positions; the head itself runs where it is asked for.

    Args:
        bottom: the split.
        hidden: (B, L, d) as they were sent.
        attention_mask: (B, L) or None.
        position_ids: (B, L) or None.

    Raises:
        ValueError: the model predicts no next token of the vocabulary, or its logits are more than
            scale, shift and softcap of what its head gives.
    """

    def __init__(
        self,
        bottom: BottomModel,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        if not predicts_next(bottom):
            raise ValueError("this model has no head that predicts the next token")
        self._bottom = bottom
        anatomy = bottom.anatomy
        assert anatomy.head is not None
        self._head = unwrap(anatomy.head)
        place = place_of(anatomy, bottom.layer)
        run = cut_at(anatomy.model, Place("head", self._head, "input"))
        with torch.no_grad(), bottom.session():
            handle = _replaced(place, hidden)
            try:
                states = bottom.run_through(run, hidden.shape[:2], attention_mask, position_ids)
            finally:
                handle.remove()
            self._map = self._logit_map()
        self._states: Tensor = states[:, -hidden.shape[1] :]

    def after(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Logits (n, V) of what follows the positions (``rows``, ``columns``), both (n,)."""
        with torch.no_grad(), self._bottom.session():
            product: Tensor = self._head(self._states[rows, columns])
        return self._map(product.float())

    def of(self, rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
        """Of :meth:`after` only the logits of ``tokens`` (n, k): (n, k)."""
        if type(self._head) is not nn.Linear:
            return self.after(rows, columns).gather(1, tokens)
        weight, bias = self._head.weight.detach(), self._head.bias
        logits = torch.einsum("nkd,nd->nk", weight[tokens], self._states[rows, columns]).float()
        return self._map(logits if bias is None else logits + bias.detach()[tokens], tokens)

    def _logit_map(self) -> LogitMap:
        """Read off a run of the whole model on a short text."""
        anatomy = self._bottom.anatomy
        length = min(_TRIAL_TOKENS, self._bottom.context or _TRIAL_TOKENS)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._bottom.vocab_size, (2, length), generator=generator)
        with inputs_of(self._head) as seen:
            batch = TokenBatch(ids.to(anatomy.device), None, None, "causal")
            logits = run_logits(anatomy.model, batch)[:, -length:]
        states = seen[-1][:, -length:]
        return LogitMap.of(anatomy.model, states.flatten(0, 1), logits.flatten(0, 1), self._head)


def predicts_next(bottom: BottomModel) -> bool:
    """Whether the model's head gives the next token of the vocabulary that its embeddings read."""
    anatomy = bottom.anatomy
    if anatomy.kind != "causal" or anatomy.head is None:
        return False
    shape = matrix_shape(anatomy.head)
    return shape is not None and shape[0] == bottom.vocab_size


def _replaced(place: Place, hidden: Tensor) -> Any:
    """Has the split's states replaced by ``hidden``; returns the hook's handle."""

    def fitting(states: Tensor) -> Tensor:
        """Virtual tokens in front keep their own states."""
        new = hidden.to(states)
        return torch.cat([states[:, : -hidden.shape[1]], new], 1)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_states_in(args, kwargs, fitting(states_in(args, kwargs)))

    def behind(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_states_out(output, fitting(states_out(output)))

    if place.side == "input":
        return place.module.register_forward_pre_hook(before, with_kwargs=True)
    return place.module.register_forward_hook(behind)


__all__ = ["NextTokens", "predicts_next"]
