"""The connection of client and server, which sends named tensors over its own gloo process group.

Nothing is pickled: a message is a header in JSON and the tensors' bytes. A side that waits gets an
error at once when the other side's process ends, and after a timeout when no message comes.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from lightning_fedleak.validate import check_choice, check_number

_CLIENT, _SERVER = 0, 1  # ranks of the two sides


class PeerError(RuntimeError):
    """The other side of a split model has failed, ended, or not answered in time."""


class Kind(IntEnum):
    """The kinds of messages: the client's requests, the server's replies, errors of either."""

    HELLO = 0  # compares the settings of both sides
    INFER = 1
    TRAIN = 2
    BACK = 3  # sends the gradient of the last hidden states, if the client has the head
    REPLY = 4
    ERROR = 5
    CLOSE = 6


@dataclass(frozen=True)
class Message:
    """A message between client and server.

    Attributes:
        kind: what the message asks for, or that it is a reply or an error.
        tensors: the contents by name, on the CPU.
    """

    kind: Kind
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Connection:
    """One side's end of the connection, created by :func:`connect`.

    Args:
        group: process group of the two sides.
        rank: this side's rank in the group.
        timeout: seconds that the other side may take for each exchange.
    """

    def __init__(self, group: ProcessGroup, rank: int, timeout: float) -> None:
        self._group: ProcessGroup | None = group
        self._peer = 1 - rank
        self._other = "server" if rank == _CLIENT else "client"
        self.timeout = timeout

    def send(self, kind: Kind, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message, and wait until the other side has received it.

        Raises:
            PeerError: the other side did not receive it.
        """
        contents = {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items()}
        specs = {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in contents.items()}
        text = json.dumps([kind, specs]).encode()
        header = torch.tensor(list(text), dtype=torch.uint8)
        for tensor in (torch.tensor(len(text)), header, *contents.values()):
            if tensor.numel():
                self._transfer(tensor, self.timeout, sending=True)

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for a message.

        Args:
            timeout: seconds until the message must begin; by default the connection's timeout.

        Raises:
            PeerError: no message came, or the other side reports that it has failed.
        """
        size = torch.tensor(0)
        self._transfer(size, self.timeout if timeout is None else timeout, sending=False)
        header = torch.empty(int(size), dtype=torch.uint8)
        self._transfer(header, self.timeout, sending=False)
        kind, specs = json.loads(bytes(header.tolist()))
        tensors: dict[str, Tensor] = {}
        for name, (dtype, *shape) in specs.items():
            tensors[name] = tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                self._transfer(tensor, self.timeout, sending=False)
        message = Message(Kind(kind), tensors)
        if message.kind is Kind.ERROR:
            reason = bytes(tensors["text"].tolist()).decode("utf-8", "replace")
            self.drop()
            raise PeerError(f"the {self._other} of the split model has failed: {reason}")
        return message

    def send_error(self, error: BaseException) -> None:
        """Send the reason why this side stops, if the other side still runs."""
        text = f"{type(error).__name__}: {error}".encode()
        with suppress(PeerError):
            self.send(Kind.ERROR, {"text": torch.tensor(list(text), dtype=torch.uint8)})

    def drop(self) -> None:
        """Close the connection without a message, so that the other side gets an error."""
        self._group = None

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        return self._group is not None

    def _transfer(self, tensor: Tensor, timeout: float, *, sending: bool) -> None:
        if self._group is None:
            raise PeerError(f"the connection to the {self._other} of the split model is closed")
        data = tensor.reshape(-1).view(torch.uint8)
        operation = self._group.send if sending else self._group.recv
        try:
            operation([data], self._peer, 0).wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            self.drop()
            reason = (
                f"did not answer within {timeout:g} s; if it is only slow, connect both sides with "
                "a longer timeout"
                if "Timed out" in str(error)
                else "is gone: its process has ended or closed the connection"
            )
            raise PeerError(f"the {self._other} of the split model {reason}") from error


def connect(url: str, role: str, *, timeout: float = 300.0) -> Connection:
    """Return this side's end of the connection once both sides have called this function.

    The process group belongs to the connection alone. The default group of ``torch.distributed`` is
    neither needed nor changed.

    Args:
        url: the address where the sides meet: ``"tcp://host:port"`` with a free port of the
            server's machine, or, if both run on one machine, ``"file:///path"`` of a file that does
            not exist yet.
        role: ``"client"`` or ``"server"``.
        timeout: seconds to wait for the other side, here and in every exchange.

    Raises:
        ValueError: another role, or a timeout that is not positive.
        PeerError: the other side does not connect in time.
    """
    check_choice("role", role, ("client", "server"))
    check_number("timeout", timeout, above=0, hint="in seconds")
    rank, wait = (_CLIENT if role == "client" else _SERVER), timedelta(seconds=timeout)
    # In the rendezvous rank 0 listens. It is the server, because its address is known.
    rendezvous_rank = 1 - rank
    try:
        store, _, _ = next(rendezvous(url, rendezvous_rank, 2, timeout=wait))
        store.set_timeout(wait)
        group: Any = ProcessGroupGloo(store, rank, 2, wait)
    except (RuntimeError, TimeoutError) as error:
        other = "server" if rank == _CLIENT else "client"
        raise PeerError(
            f"the {other} of the split model did not come to {url} within {timeout:g} s: {error}"
        ) from error
    return Connection(group, rank, timeout)
