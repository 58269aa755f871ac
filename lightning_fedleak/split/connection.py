"""The line between client and server: named tensors over a separate gloo process group.

Nothing is pickled: a message is a header in JSON and the tensors' bytes. A waiting side
gets an error at once when the other's process ends, and after a timeout when no message comes.
"""

from __future__ import annotations

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
    """The request or answer that a message is."""

    HELLO = 0
    INFER = 1
    TRAIN = 2
    BEGIN = 3
    NEXT = 4
    END = 5
    BACK = 6
    REPLY = 7
    ERROR = 8
    CLOSE = 9


@dataclass(frozen=True)
class Message:
    """A message between client and server.

    Attributes:
        kind: the request or answer.
        tensors: by name, on the CPU.
    """

    kind: Kind
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Connection:
    """One end of the line, created by :func:`connect`.

    Args:
        group: process group of the two sides.
        rank: of this end.
        timeout: seconds that the other side may take for each exchange.
    """

    def __init__(self, group: ProcessGroup, rank: int, timeout: float) -> None:
        self._group: ProcessGroup | None = group
        self._peer = 1 - rank
        self._other = "server" if rank == _CLIENT else "client"
        self.timeout = timeout

    def send(self, kind: Kind, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message; return when the other side has received it.

        Raises:
            PeerError: the other side did not receive it.
        """
        contents = {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items()}
        forms = {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in contents.items()}
        text = json.dumps([kind, forms]).encode()
        header = torch.tensor(list(text), dtype=torch.uint8)
        for tensor in (torch.tensor(len(text)), header, *contents.values()):
            if tensor.numel():
                self._move(tensor, self.timeout, sending=True)

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for a message.

        Args:
            timeout: seconds until it must begin; by default the connection's.

        Raises:
            PeerError: none came, or the other side reports that it has failed.
        """
        size = torch.tensor(0)
        self._move(size, self.timeout if timeout is None else timeout, sending=False)
        header = torch.empty(int(size), dtype=torch.uint8)
        self._move(header, self.timeout, sending=False)
        kind, forms = json.loads(bytes(header.tolist()))
        tensors: dict[str, Tensor] = {}
        for name, (dtype, *shape) in forms.items():
            tensors[name] = tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                self._move(tensor, self.timeout, sending=False)
        message = Message(Kind(kind), tensors)
        if message.kind is Kind.ERROR:
            reason = bytes(tensors["text"].tolist()).decode("utf-8", "replace")
            self.drop()
            raise PeerError(f"the {self._other} of the split model has failed: {reason}")
        return message

    def send_error(self, error: BaseException) -> None:
        """Send the other side, if it still runs, the reason why this one stops."""
        text = f"{type(error).__name__}: {error}".encode()
        with suppress(PeerError):
            self.send(Kind.ERROR, {"text": torch.tensor(list(text), dtype=torch.uint8)})

    def drop(self) -> None:
        """Drop the connection; the other side gets an error."""
        self._group = None

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        return self._group is not None

    def _move(self, tensor: Tensor, timeout: float, *, sending: bool) -> None:
        if self._group is None:
            raise PeerError(f"the connection to the {self._other} of the split model is closed")
        data = tensor.reshape(-1).view(torch.uint8)
        act = self._group.send if sending else self._group.recv
        try:
            act([data], self._peer, 0).wait(timedelta(seconds=timeout))
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
    """Return this end of the line once both sides have called.

    The process group belongs to the connection alone. The default group of ``torch.distributed`` is
    neither needed nor changed.

    Args:
        url: the meeting point: ``"tcp://host:port"`` with a free port of the server's machine, or
            ``"file:///path"`` of a file that does not exist yet, on one machine.
        role: ``"client"`` or ``"server"``.
        timeout: seconds to wait for the other side, here and in every exchange.

    Raises:
        ValueError: another role, or a timeout that is not positive.
        PeerError: the other side does not come.
    """
    check_choice("role", role, ("client", "server"))
    check_number("timeout", timeout, above=0, hint="in seconds")
    rank, wait = (_CLIENT if role == "client" else _SERVER), timedelta(seconds=timeout)
    # The server is the one whose address is known: rank 0 listens.
    seat = 1 - rank
    try:
        store, _, _ = next(rendezvous(url, seat, 2, timeout=wait))
        store.set_timeout(wait)
        group: Any = ProcessGroupGloo(store, rank, 2, wait)
    except (RuntimeError, TimeoutError) as error:
        other = "server" if rank == _CLIENT else "client"
        raise PeerError(
            f"the {other} of the split model did not come to {url} within {timeout:g} s: {error}"
        ) from error
    return Connection(group, rank, timeout)
