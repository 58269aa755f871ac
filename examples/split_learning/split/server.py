"""The server of a split model, which has the top and receives what the client sends."""

from collections import deque

import torch
from torch import Tensor, nn

from lightning_fedleak.model.snapshots import ActivationSnapshot, Stage
from lightning_fedleak.validate import check_integer, check_number

from .client import MakeOptimizer, split_terms, trainable_parameters
from .connection import Connection, Kind, Message, PeerError
from .cut import SplitModel
from .halves import SplitError


class SplitServer:
    """The server's half of a split model, which answers one :class:`SplitClient`.

    Args:
        split: of the same model as the client's; only the server's part stays in memory.
        channel: to the client; the server closes it.
        optimizer: returns this side's optimizer of its parameters; None to let gradients add up.
        keep: the number of newest snapshots that ``received`` and ``returned`` hold; 0 for none.
        idle_timeout: seconds between two requests of the client, at most.

    Attributes:
        received: hidden states as they came, stage shared, by the name of the split.
        returned: with the head on the client, the gradient of its loss in the last block's output.
        steps: number of training steps so far.
        optimizer: this side's, or None.

    Raises:
        ValueError: ``keep`` is negative, or a timeout is not positive.
    """

    def __init__(
        self,
        split: SplitModel,
        channel: Connection,
        *,
        optimizer: MakeOptimizer | None = None,
        keep: int = 0,
        idle_timeout: float = 3600.0,
    ) -> None:
        check_integer("keep", keep, at_least=0, hint="a number of snapshots, 0 for none")
        self._idle_timeout = check_number("idle_timeout", idle_timeout, above=0, hint="in seconds")
        self._top = split.top
        self._names = split.layer_name, split.last_name
        self._has_head = split.tail is None
        self._width = split.width
        self._terms = split_terms(split)
        self._channel = channel
        self.received: deque[ActivationSnapshot] = deque(maxlen=keep)
        self.returned: deque[ActivationSnapshot] = deque(maxlen=keep)
        self.steps = 0
        parameters = self.parameters()
        self.optimizer = optimizer(parameters) if optimizer and parameters else None

    def parameters(self) -> list[nn.Parameter]:
        """Return this side's trainable parameters."""
        return trainable_parameters((self._top,))

    def serve(self) -> None:
        """Answer requests until the client closes.

        Raises:
            PeerError: the client has ended, or has sent no request for too long.
            SplitError: its request does not fit; the client gets the error too.
        """
        try:
            while (message := self._channel.receive(self._idle_timeout)).kind is not Kind.CLOSE:
                if not self._answer(message):
                    break
        except PeerError:
            raise
        except Exception as error:
            self._channel.send_error(error)
            raise
        finally:
            self._channel.drop()

    def _answer(self, message: Message) -> bool:
        """Answer one request; return False if the client closed in the middle of it."""
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
            self._record(hidden, mask, positions)
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
        self._record(hidden, mask, positions)
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

    def _read(self, message: Message) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device, tensors = self._top.device, message.tensors
        hidden = tensors["hidden"].to(device)
        if hidden.dim() != 3 or hidden.shape[-1] != self._width:
            raise SplitError(
                f"hidden states must be (B, L, {self._width}) at this split, {tuple(hidden.shape)} "
                "came"
            )
        names = ("attention_mask", "position_ids")
        mask, positions = (tensors[n].to(device) if n in tensors else None for n in names)
        for name, tensor in zip(names, (mask, positions), strict=True):
            if tensor is not None and tensor.shape != hidden.shape[:2]:
                shapes = f"{tuple(tensor.shape)}, but the hidden states are {tuple(hidden.shape)}"
                raise SplitError(f"{name} is {shapes}")
        return hidden, mask, positions

    def _record(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        if self.received.maxlen:
            self.received.append(self._snapshot(self._names[0], hidden, mask, positions))

    def _snapshot(
        self, name: str, tensor: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> ActivationSnapshot:
        context = {"attention_mask": mask, "position_ids": positions}
        return ActivationSnapshot(self.steps, Stage.SHARED, {name: tensor.detach()}, **context)
