"""One look of the monitor: which attacks read what, and what they said."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.activations import ChangedInPlace
from lightning_fedleak.attacks.base import Attack, Guess, UnusableObservation
from lightning_fedleak.attacks.inversion import InversionAttack
from lightning_fedleak.attacks.membership import MembershipAttack
from lightning_fedleak.batches import BatchError, TokenBatch
from lightning_fedleak.callbacks.kinds import Inverted, Played
from lightning_fedleak.callbacks.outcome import Waiting
from lightning_fedleak.callbacks.targets import NoTargets
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.snapshots import UpdateError


@dataclass(frozen=True)
class Plan:
    """An attack in one run.

    Attributes:
        attack: the attack.
        roles: whose gradients it reads; none where it reads layers that the server adds itself, or
            hidden states at the split.
        exposed: whether all of them are really shared.
        optimizer: the one that owns these parameters; None where they are not exposed, or no
            parameters of the client's.
    """

    attack: Attack
    roles: tuple[str, ...]
    exposed: bool
    optimizer: Optimizer | None

    @property
    def canary(self) -> MembershipAttack | None:
        """The attack, if it is one on layers of the server's own; None for others."""
        return self.attack if isinstance(self.attack, MembershipAttack) else None

    @property
    def inversion(self) -> InversionAttack | None:
        """The attack, if it is one on hidden states at the split; None for others."""
        return self.attack if isinstance(self.attack, InversionAttack) else None

    @property
    def on_gradients(self) -> bool:
        """Whether the attack reads gradients of the client's own parameters."""
        return self.canary is None and self.inversion is None


@dataclass
class Look:
    """What one look has gathered so far.

    Attributes:
        step: optimizer step looked at.
        batches: the step's micro-batches, by reference, before any defence touched them.
        batch: the micro-batch at work, which may yet turn out to train nothing.
        guesses: what an attack said at a stage, or why it said nothing (yet).
        stepped: ids of the optimizers that were really about to step (none: nothing was shared).
        seconds: time spent so far.
        step_seconds: time that the step itself took so far; 0 until it is known.
        learning_rates: of what the attacks read, at each local step.
        canary_scores: (m,) of all the user's canaries, by the attack's name.
    """

    step: int
    batches: list[TokenBatch] = field(default_factory=list)
    batch: TokenBatch | None = None
    guesses: dict[tuple[str, str], Guess | Played | Inverted | Waiting | str] = field(
        default_factory=dict
    )
    truth_error: str | None = None
    stepped: set[int] = field(default_factory=set)
    seconds: float = 0.0
    started: float = field(default_factory=lambda: time.perf_counter())
    step_seconds: float = 0.0
    learning_rates: list[set[float]] = field(default_factory=list)
    canary_scores: dict[str, Tensor] = field(default_factory=dict)

    def elapsed(self) -> float:
        """Seconds since the look began that were not its own."""
        return time.perf_counter() - self.started - self.seconds

    @contextmanager
    def clock(self, device: torch.device) -> Iterator[None]:
        """Adds the time of a block; waits for a GPU before and after, as looks may."""
        _wait(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            _wait(device)
            self.seconds += time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_OURS = (
    UnusableObservation,
    BatchError,
    ChangedInPlace,
    NoTargets,
    UpdateError,
    torch.OutOfMemoryError,
)
_PACKAGE = Path(__file__).parents[1]


def reason(error: Exception) -> str:
    """Why there is no result, for logs: the error's kind, and its words or its place.

    Only words written here are repeated: another error's may quote the private batch. So may a
    ``DefenseError`` of a defence of the user's own, or one that repeats another error.
    """
    kind = type(error).__name__
    if isinstance(error, _OURS):
        return f"{kind}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(place.filename)
    ours = path.is_relative_to(_PACKAGE) and error.__cause__ is None
    if isinstance(error, DefenseError) and ours:
        return f"{kind}: {error}"
    return f"{kind} at {path.name}:{place.lineno}"
