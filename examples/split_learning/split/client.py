"""The client of a split model, which has the text, the bottom, and in the U shape the head."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .connection import Connection, Kind, PeerError
from .cut import SplitModel
from .halves import ModelPart, SplitError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def trainable_parameters(parts: Iterable[ModelPart | None]) -> list[nn.Parameter]:
    """Return the trainable parameters of the parts, each once."""
    parameters = (p for part in parts if part is not None for p in part.parameters())
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def split_terms(split: SplitModel) -> Tensor:
    """Return the numbers that both sides must share: split, width, blocks, head on the client."""
    stop, tail = split.top.stop, split.tail is not None
    return torch.tensor([split.layer, split.width, stop, int(tail)])


class SplitClient:
    """The client's half of a split model, which works with a :class:`SplitServer`.

    It is a context manager: leaving it, also by an exception, ends the server's ``serve``.

    The hidden states of the split leave the client, with the mask and positions that the caller
    passes. For training the labels leave too, or, with the head on the client, the gradient in the
    last hidden states in their place.
    The ids of the input never leave, but a language model's labels are its text: to train one,
    split it with ``head="client"``.

    Args:
        split: of the same model as the server's; only the client's parts stay in memory.
        channel: to the server; the client closes it.
        optimizer: returns this side's optimizer of its parameters, for example ``lambda p:
            torch.optim.SGD(p, 0.1)``; with None gradients add up in ``.grad``.
        on_send: returns the hidden states (B, L, d) to send in place of its argument, for noise.
            The gradient that comes back passes through it if it is differentiable.

    Attributes:
        optimizer: this side's, or None.

    Raises:
        PeerError: the server does not answer, or has another model.
    """

    def __init__(
        self,
        split: SplitModel,
        channel: Connection,
        *,
        optimizer: MakeOptimizer | None = None,
        on_send: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._bottom, self._tail, self._drifts = split.bottom, split.tail, split.drifts
        self._channel = channel
        self._on_send = on_send
        parameters = self.parameters()
        self.optimizer = optimizer(parameters) if optimizer and parameters else None
        self._ask(Kind.HELLO, {"terms": split_terms(split)})

    def parameters(self) -> list[nn.Parameter]:
        """Return this side's trainable parameters, each once."""
        return trainable_parameters((self._bottom, self._tail))

    def __enter__(self) -> "SplitClient":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with suppress(PeerError) if error is not None else nullcontext():
            self.close()

    def close(self) -> None:
        """End the server's ``serve``. May be called twice, and after a failure."""
        if self._channel.open:
            self._channel.send(Kind.CLOSE)
            self._channel.drop()

    def train_step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Train both sides for one step, in train mode.

        Args:
            input_ids: (B, L).
            labels: as the whole model takes them, (B, L) with -100 where no token is predicted.
            attention_mask: (B, L) or None.
            position_ids: (B, L) or None for the model's own.

        Returns:
            The loss before the step, of no dimension, detached.

        Raises:
            SplitError: the halves of a tied matrix would differ; see :func:`split_model`.
            PeerError: the server failed.
        """
        if self._drifts is not None:
            raise SplitError(self._drifts)
        self._mode(True)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        context = self._context(attention_mask, position_ids)
        with torch.enable_grad():
            hidden = self._bottom.states(self._ids(input_ids), *self._mask_and_positions(context))
            sent = self._sent(hidden)
            message = {"hidden": sent, **context}
            if self._tail is None:
                reply = self._ask(Kind.TRAIN, {**message, "labels": labels})
                loss, gradient = reply["loss"], reply["gradient"]
            else:
                loss, gradient = self._train_tail(message, context, labels)
            if sent.requires_grad:
                sent.backward(gradient.to(sent))  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def _train_tail(
        self, message: dict[str, Tensor], context: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self._tail is not None
        device = self._tail.device
        hidden = self._ask(Kind.TRAIN, message)["hidden"].to(device).requires_grad_()
        mask, positions = self._mask_and_positions(context)
        loss = self._tail.output(hidden, mask, positions, labels=labels.to(device)).loss
        loss.backward()
        assert hidden.grad is not None
        return loss, self._ask(Kind.BACK, {"gradient": hidden.grad})["gradient"]

    @torch.no_grad()
    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the model's logits, in eval mode: (B, L, V), of a classifier (B, classes).

        Raises:
            PeerError: the server failed.
        """
        self._mode(False)
        context = self._context(attention_mask, position_ids)
        hidden = self._bottom.states(self._ids(input_ids), *self._mask_and_positions(context))
        reply = self._ask(Kind.INFER, {"hidden": self._sent(hidden), **context})
        if self._tail is None:
            return reply["logits"].to(self._bottom.device)
        states = reply["hidden"].to(self._tail.device)
        output = self._tail.output(states, *self._mask_and_positions(context))
        return output.logits  # type: ignore[no-any-return]

    def _sent(self, hidden: Tensor) -> Tensor:
        if self._on_send is None:
            return hidden
        sent = self._on_send(hidden)
        if not isinstance(sent, Tensor) or (sent.shape, sent.dtype) != (hidden.shape, hidden.dtype):
            came = (
                f"{tuple(sent.shape)} of {sent.dtype}" if isinstance(sent, Tensor) else repr(sent)
            )
            raise SplitError(
                f"on_send must return hidden states like its argument, {tuple(hidden.shape)} "
                f"of {hidden.dtype}; it returned {came}"
            )
        return sent

    def _ask(self, kind: Kind, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        self._channel.send(kind, tensors)
        return dict(self._channel.receive().tensors)

    def _mode(self, train: bool) -> None:
        for part in (self._bottom, self._tail):
            if part is not None:
                part.train(train)

    def _ids(self, input_ids: Tensor) -> Tensor:
        if input_ids.dim() != 2 or not input_ids.numel():
            raise SplitError(
                f"input_ids must be (B, L) and not empty, got {tuple(input_ids.shape)}"
            )
        return input_ids.to(self._bottom.device)

    def _context(self, mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
        inputs = {"attention_mask": mask, "position_ids": positions}
        return {n: t.to(self._bottom.device) for n, t in inputs.items() if t is not None}

    @staticmethod
    def _mask_and_positions(context: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return context.get("attention_mask"), context.get("position_ids")
