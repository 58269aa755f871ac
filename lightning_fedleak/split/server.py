"""The server of a split model: it has the top, and sees what the client sends."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from lightning_fedleak.snapshots import ActivationSnapshot, Stage
from lightning_fedleak.split.channel import Channel, Kind, Message, PeerError
from lightning_fedleak.split.client import MakeOptimizer, terms, trained
from lightning_fedleak.split.cut import SplitModel
from lightning_fedleak.split.halves import SplitError


class SplitServer:
    """Answers one :class:`SplitClient`, and keeps what it was sent if it is asked to.

    Args:
        split: of the same model as the client's; only the server's part is kept.
        channel: to the client; the server owns it from here on.
        optimizer: makes this side's optimizer of its parameters; None to let gradients add up.
        keep: snapshots kept at most in each of ``received`` and ``returned``, the newest; 0 keeps
            nothing.
        idle_timeout: seconds that the client may leave between two requests.

    Attributes:
        received: hidden states as they came, stage shared, by the name of the split. A generation
            is one, of prompt and reply (all but the last token, which never comes), and is there
            once it has ended.
        returned: with the head on the client, the gradient of its loss in the last block's output.
        steps: training steps so far.
        optimizer: this side's, or None.

    Raises:
        ValueError: ``keep`` is negative, or a timeout is not positive.
    """

    def __init__(
        self,
        split: SplitModel,
        channel: Channel,
        *,
        optimizer: MakeOptimizer | None = None,
        keep: int = 0,
        idle_timeout: float = 3600.0,
    ) -> None:
        if keep < 0:
            raise ValueError(f"keep must be a number of snapshots, 0 for none, got {keep}")
        if not idle_timeout > 0:
            raise ValueError(f"idle_timeout must be positive, got {idle_timeout!r}")
        self._top = split.top
        self._names = split.layer_name, split.last_name
        self._has_head = split.tail is None
        self._width = split.width
        self._terms = terms(split)
        self._channel = channel
        self._idle_timeout = idle_timeout
        self.received: deque[ActivationSnapshot] = deque(maxlen=keep)
        self.returned: deque[ActivationSnapshot] = deque(maxlen=keep)
        self.steps = 0
        parameters = self.parameters()
        self.optimizer = optimizer(parameters) if optimizer and parameters else None

    def parameters(self) -> list[nn.Parameter]:
        """This side's trainable parameters."""
        return trained((self._top,))

    def serve(self) -> None:
        """Answers until the client closes.

        Raises:
            PeerError: the client has gone, or has left the line idle for too long.
            SplitError: what it sent does not fit; the client is told.
        """
        try:
            while (message := self._channel.receive(self._idle_timeout)).kind is not Kind.CLOSE:
                if message.kind is Kind.BEGIN:
                    message = self._generate(message)
                    if message.kind is Kind.CLOSE:
                        break
                elif not self._answer(message):
                    break
        except PeerError:
            raise
        except Exception as error:
            self._channel.send_error(error)
            raise
        finally:
            self._channel.drop()

    def _answer(self, message: Message) -> bool:
        """Answers one request; False where the client closed in the middle of it."""
        if message.kind is Kind.HELLO:
            if not torch.equal(message.tensors["terms"], self._terms):
                raise SplitError(
                    "client and server have split another model, or in another way: (layer, width, "
                    f"blocks, head on the client) is {message.tensors['terms'].tolist()} there and "
                    f"{self._terms.tolist()} here"
                )
            self._channel.send(Kind.REPLY)
        elif message.kind is Kind.INFER:
            self._top.eval()
            hidden, mask, positions = self._read(message)
            self._remember(hidden, mask, positions)
            with torch.no_grad():
                self._channel.send(Kind.REPLY, self._forward(hidden, mask, positions))
        elif message.kind is Kind.TRAIN:
            return self._train(message)
        else:
            raise SplitError(f"a {message.kind.name} message came out of turn")
        return True

    def _forward(
        self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> dict[str, Tensor]:
        if self._has_head:
            return {"logits": self._top.output(hidden, mask, positions).logits}
        return {"hidden": self._top.states(hidden, mask, positions)}

    def _train(self, message: Message) -> bool:
        self._top.train()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        hidden, mask, positions = self._read(message)
        self._remember(hidden, mask, positions)
        hidden.requires_grad_()
        reply: dict[str, Tensor] = {}
        if self._has_head:
            if "labels" not in message.tensors:
                raise SplitError("the head is on the server, but no labels came")
            labels = message.tensors["labels"].to(hidden.device)
            loss = self._top.output(hidden, mask, positions, labels=labels).loss
            loss.backward()
            reply["loss"] = loss
        else:
            last = self._top.states(hidden, mask, positions)
            self._channel.send(Kind.REPLY, {"hidden": last})
            back = self._channel.receive()
            if back.kind is Kind.CLOSE:
                return False
            gradient = back.tensors["gradient"].to(last)
            self.returned.append(self._snapshot(self._names[1], gradient, mask, positions))
            last.backward(gradient)  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        if self.optimizer is not None:
            self.optimizer.step()
        self.steps += 1
        self._channel.send(Kind.REPLY, {**reply, "gradient": hidden.grad})
        return True

    @torch.no_grad()
    def _generate(self, message: Message) -> Message:
        """Goes on with one generation until it ends; gives the message that ended it."""
        self._top.eval()
        cache = self._top.new_cache()
        hidden, mask, positions = self._read(message)
        if mask is None:
            raise SplitError("a generation began without a mask")
        seen, places = [hidden], [positions]
        while True:
            if self._has_head:
                logits = self._top.output(hidden, mask, positions, cache, last_only=True).logits
                reply = {"logits": logits[:, -1:]}
            else:
                reply = {"hidden": self._top.states(hidden, mask, positions, cache)[:, -1:]}
            self._channel.send(Kind.REPLY, reply)
            message = self._channel.receive(self._idle_timeout)
            if message.kind is not Kind.NEXT:
                break
            hidden, _, _ = self._read(message)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = None if positions is None else positions[:, -1:] + 1
            if self.received.maxlen:
                seen.append(hidden)
                places.append(positions)
        whole = None if positions is None else torch.cat([p for p in places if p is not None], 1)
        self._remember(torch.cat(seen, 1), mask, whole)
        if message.kind not in (Kind.END, Kind.CLOSE):
            raise SplitError(f"a {message.kind.name} message came within a generation")
        return message

    def _read(self, message: Message) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device, given = self._top.device, message.tensors
        hidden = given["hidden"].to(device)
        if hidden.dim() != 3 or hidden.shape[-1] != self._width:
            raise SplitError(
                f"hidden states must be (B, L, {self._width}) at this split, {tuple(hidden.shape)} "
                "came"
            )
        mask, positions = (
            given[n].to(device) if n in given else None for n in ("attention_mask", "position_ids")
        )
        for name, tensor in (("attention_mask", mask), ("position_ids", positions)):
            if tensor is not None and tensor.shape != hidden.shape[:2]:
                raise SplitError(
                    f"{name} is {tuple(tensor.shape)}, but the hidden states are "
                    f"{tuple(hidden.shape)}"
                )
        return hidden, mask, positions

    def _remember(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        if self.received.maxlen:
            self.received.append(self._snapshot(self._names[0], hidden, mask, positions))

    def _snapshot(
        self, name: str, tensor: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> ActivationSnapshot:
        return ActivationSnapshot(
            self.steps,
            Stage.SHARED,
            {name: tensor.detach()},
            attention_mask=mask,
            position_ids=positions,
        )


__all__ = ["SplitServer"]
