"""One look: what is gathered in a step, what each attack gave, and why it gave nothing."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.batches import BatchError, TokenBatch
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.metrics import Rate
from lightning_fedleak.snapshots import GradientSnapshot, NotYet, Stage
from lightning_fedleak.taps.activations import ChangedInPlace
from lightning_fedleak.taps.gradients import UpdateError

PREFIX = {
    Stage.LOCAL: "leakage_local",
    Stage.SHARED: "leakage",
    Stage.AGGREGATE: "leakage_aggregate",
}


@dataclass(frozen=True)
class Series:
    """One attack's results at one stage, under one name in the logs.

    Attributes:
        prefix: the name's first part.
        name: its second part: the attack's name, or what its channel makes of it.
        attack: the attack's name.
        stage: where what it reads was seen.
    """

    prefix: str
    name: str
    attack: str
    stage: Stage

    @classmethod
    def at(cls, stage: Stage, attack: str) -> Series:
        """Return the series of an attack at a stage."""
        return cls(PREFIX[stage], attack, attack, stage)

    @property
    def log_name(self) -> str:
        """``leakage/flatchat``: what the names of its values begin with."""
        return f"{self.prefix}/{self.name}"


# ---- of one client --------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What an attack's guess is worth.

    Attributes:
        numbers: in the order and number that its channel packs them.
    """

    numbers: Sequence[float]


@dataclass(frozen=True)
class Unknown:
    """There is no result: not safe, unknown.

    Attributes:
        why: for the logs; holds no private text.
        applies: whether the attack's method is made for what was shared.
    """

    why: str
    applies: bool = True


@dataclass(frozen=True)
class Waiting:
    """No result yet; not a failure.

    Attributes:
        why: what is waited for.
        soon: the next step may bring it, so that the attack is tried again there.
        zeros: roles whose gradient is zero, as long as which there will be none.
    """

    why: str
    soon: bool = True
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class NothingShared:
    """Nothing left the client in this step."""


Result = Found | Unknown | Waiting | NothingShared


# ---- over all clients -----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One attack at one stage, over all clients.

    Attributes:
        rates: by name, pooled over clients (and, where that kind of result does so, over the last
            looks); NaN where unknown.
        n: what was counted: true word types added over clients, games, or texts.
        exposed: whether the attack's surface leaves the client at all.
        worst: each rate's value at the client where it is highest; empty for one client.
        extra: numbers that have no interval; NaN where there is none.
        now: each rate's value at this look alone; None where ``rates`` is of this look alone.
        too_few: why this look alone says too little to be judged by; None where it does not.
        unknown: why there is no value; None where there is one.
        applies: false where there is none since the method is not made for what was shared.
        pending: why there is no value *yet*; None otherwise.
        soon: where it is pending, the next step may bring one.
        by_position: of reconstructed texts: (right, all) tokens by range of places in their text.
    """

    rates: Mapping[str, Rate]
    n: int
    exposed: bool = True
    worst: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    now: Mapping[str, float] | None = None
    too_few: str | None = None
    unknown: str | None = None
    applies: bool = True
    pending: str | None = None
    soon: bool = False
    by_position: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def values(self, root: str) -> dict[str, float]:
        """The numbers under names of the logs that begin with ``root``; none where pending."""
        if self.pending is not None:
            return {}
        out = {f"{root}/exposed": float(self.exposed)}
        for name, rate in self.rates.items():
            out[f"{root}/{name}"] = rate.value
            out[f"{root}/{name}_low"] = rate.low
            out[f"{root}/{name}_high"] = rate.high
        for name, value in self.worst.items():
            out[f"{root}/{name}_worst_client"] = value
        for name, value in self.extra.items():
            if not math.isnan(value):
                out[f"{root}/{name}"] = value
        return out

    def values_now(self, root: str) -> dict[str, float]:
        """The numbers of this look alone, under the names of the logs."""
        values = self.values(root)
        if self.now is not None and values:
            values = {n: v for n, v in values.items() if not n.endswith(("_low", "_high"))}
            values |= {f"{root}/{name}": value for name, value in self.now.items()}
        return values


def unknown(metrics: Iterable[str], why: str, *, applies: bool = True) -> Outcome:
    """Return an outcome without a value: unknown, which is not safe."""
    nothing = Rate(math.nan, math.nan, math.nan)
    return Outcome(dict.fromkeys(metrics, nothing), 0, unknown=why, applies=applies)


def not_shared(metrics: Iterable[str]) -> Outcome:
    """The attack's surface does not leave the client: metrics 0, ``exposed`` 0."""
    return Outcome(dict.fromkeys(metrics, Rate(0.0, 0.0, 0.0)), 0, exposed=False)


def pending(why: str, *, soon: bool = False) -> Outcome:
    """There will be a value at a later look, maybe in the next step."""
    return Outcome({}, 0, pending=why, soon=soon)


# ---- a look ---------------------------------------------------------------------------------


class Pages(Protocol):
    """Where a channel shows more of a look than numbers.

    Attributes:
        looks: written so far.
        boards: TensorBoard's loggers; may be empty.
        reveal: local files for recovered words and texts; None writes none.
    """

    looks: int
    boards: Sequence[Any]

    @property
    def reveal(self) -> Any:
        """Return the files, None where nothing is revealed."""


@dataclass
class Look:
    """What one look has gathered so far.

    Attributes:
        step: optimizer step looked at.
        batches: the step's micro-batches, by reference, before any defence touched them.
        batch: the micro-batch at work, which may yet turn out to train nothing.
        answers: what an attack answered in a series, or why it has no answer (yet).
        truth_error: why a batch could not be read; None where all were.
        stepped: ids of the optimizers that were really about to step (none: nothing was shared).
        seconds: time spent so far.
        processor_seconds: processor time spent so far, of all threads.
        step_seconds: time that the step itself took so far; 0 until it is known.
        learning_rates: of what the attacks read, at each local step.
        noise_std: of what defences have added to each number of this client's update so far; NaN
            where one of them did not say.
        loss_terms: ids of the parameters of which a loss of the step has a term of their own.
        notes: what channels keep until the look is published, by keys of their own.
        scope: the series that are tried again, where the look is of these alone; None: all.
    """

    step: int
    batches: list[TokenBatch] = field(default_factory=list)
    batch: TokenBatch | None = None
    answers: dict[Series, object] = field(default_factory=dict)
    truth_error: str | None = None
    stepped: set[int] = field(default_factory=set)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    started: float = field(default_factory=lambda: time.perf_counter())
    step_seconds: float = 0.0
    learning_rates: list[set[float]] = field(default_factory=list)
    noise_std: float = 0.0
    loss_terms: set[int] = field(default_factory=set)
    notes: dict[object, Any] = field(default_factory=dict)
    scope: frozenset[Series] | None = None

    def elapsed(self) -> float:
        """Seconds since the look began that were not its own."""
        return time.perf_counter() - self.started - self.seconds

    @contextmanager
    def clock(self, device: torch.device) -> Iterator[None]:
        """Adds the time of a block; waits for a GPU before and after, as looks may."""
        _wait(device)
        start, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            _wait(device)
            self.seconds += time.perf_counter() - start
            self.processor_seconds += time.process_time() - busy


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Moment:
    """A moment of a step at which what leaves the client is the same at all of ``stages``.

    Attributes:
        look: the look.
        stages: at all of which the gradient is now.
        wanted: those of them that are measured.
        optimizer: that is about to step; None: all that the round's update is of.
        scale: loss scale that is still in gradients which no GradScaler has unscaled.
        take: the gradients of what the attacks read, as they are now.
    """

    look: Look
    stages: tuple[Stage, ...]
    wanted: tuple[Stage, ...]
    optimizer: Optimizer | None
    scale: float
    take: Callable[[], GradientSnapshot]
    _view: GradientSnapshot | Unknown | Waiting | None = None

    def gradients(self) -> GradientSnapshot | Unknown | Waiting:
        """Return the gradients from :attr:`take`, called once, or why there are none."""
        if self._view is None:
            self._view = take_view(self.take)
        return self._view


def take_view(take: Callable[[], GradientSnapshot]) -> GradientSnapshot | Unknown | Waiting:
    """Return the view of a tap, or why it has none (yet)."""
    try:
        return take()
    except NotYet as error:
        return Waiting(str(error))
    except Exception as error:
        return Unknown(reason(error))


# ---- why there is no result ------------------------------------------------------------------


class NoTargets(ValueError):
    """The batch holds no sentence that could be asked for."""


_OWN_ERRORS = (
    UnusableObservation,
    BatchError,
    ChangedInPlace,
    NoTargets,
    UpdateError,
    torch.OutOfMemoryError,
)
_PACKAGE = Path(__file__).parents[1]


def reason(error: Exception) -> str:
    """Return why there is no result, for logs: the error's kind, and its message or its place.

    Only words written here are repeated: another error's may quote the private batch. So may a
    ``DefenseError`` of a defence of the user's own, or one that repeats another error.
    """
    kind = type(error).__name__
    if isinstance(error, _OWN_ERRORS):
        return f"{kind}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(place.filename)
    internal = path.is_relative_to(_PACKAGE) and error.__cause__ is None
    if isinstance(error, DefenseError) and internal:
        return f"{kind}: {error}"
    return f"{kind} at {path.name}:{place.lineno}"
