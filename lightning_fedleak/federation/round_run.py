"""A federation as attacks know it, and the rare settings of who observes its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fedleak.engine import AUTOCAST, Memorization, Run, WatchSettings


@dataclass(frozen=True)
class RoundSettings(WatchSettings):
    """The rare settings of a :class:`RoundObserver`, beside those that a monitor has too.

    Stages, clients and rounds are its own, and it writes neither texts nor a report.

    Attributes:
        fresh: whether clients begin each round with a fresh optimizer.
        federation: a name that all observers of one federation have: one run in a report. A client
            whose rounds run in several processes goes on with its own texts by it; a second
            federation needs another name.
        data: returns the loader of a client's training data, by the client, whose rows are read as
            it makes them. Only with it the models that are sent are asked about a client's texts.
        memorization: how the models that are sent are asked about a client's own texts.
    """

    fresh: bool = True
    federation: str | None = None
    data: Callable[[str | int], DataLoader[Any]] | None = None
    memorization: Memorization = field(default_factory=lambda: Memorization(most_texts=2000))

    def refuse(self, face: str, *names: str) -> None:
        """Refuse settings that a face does not have, and all faces but that of rounds.

        Raises:
            ValueError: the face watches no rounds, or names the first setting that is set.
        """
        if face != "RoundObserver":
            raise ValueError(f"{face} watches no rounds: pass settings=WatchSettings(...)")
        super().refuse(face, *names)


@dataclass(frozen=True, kw_only=True)
class RoundRun(Run):
    """Describe a federation to the engine: one process, in which a client is a number, its rank.

    Attributes:
        optimizers: the one that the server prescribed.
        local_steps: optimizer steps of a round.
        rounds: holds the number of the round at work.
        training_loader: of this client's data; None: not known.
        holds_base: whether the model that was sent is the first that this client got.
    """

    watcher: ClassVar[str] = "RoundObserver"
    unit: ClassVar[Literal["step", "round"]] = "round"

    client: str = "rank"
    optimizers: Sequence[Optimizer] = ()
    local_steps: int = 1
    rounds: list[int] = field(default_factory=lambda: [0])
    training_loader: object = None
    holds_base: bool = True

    @property
    def step(self) -> int:
        """Return the number of the round at work."""
        return self.rounds[0]

    @property
    def optimizer_step(self) -> int:
        """Return the number of local steps before this round."""
        return self.rounds[0] * self.local_steps

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast, where clients train in it."""
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
