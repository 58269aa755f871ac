"""One look of the monitor: which attacks read what, what they said, and the numbers that follow."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.attacks.base import Attack, Guess, UnusableObservation
from lightning_fedleak.batches import BatchError, TokenBatch
from lightning_fedleak.callbacks.scoring import WORD_METRICS, Tally
from lightning_fedleak.metrics import Rate
from lightning_fedleak.snapshots import UpdateError

HEAD_ONLY = "head_only"
PREFIX = {"local": "leakage_local", "shared": "leakage", "aggregate": "leakage_aggregate"}


@dataclass(frozen=True)
class Plan:
    """An attack in one run.

    Attributes:
        attack: the attack.
        roles: whose gradients it reads.
        exposed: whether all of them are really shared.
        optimizer: the one that owns these parameters; None where they are not exposed.
    """

    attack: Attack
    roles: tuple[str, ...]
    exposed: bool
    optimizer: Optimizer | None


@dataclass
class Look:
    """What one look has gathered so far.

    Attributes:
        step: optimizer step looked at.
        batches: the step's micro-batches, by reference, before any defence touched them.
        batch: the micro-batch at work, which may yet turn out to train nothing.
        guesses: what an attack said at a stage, or why it said nothing.
        stepped: ids of the optimizers that were really about to step (none: nothing was shared).
        seconds: time spent so far.
        step_seconds: time that the step itself took so far; 0 until it is known.
        learning_rates: of what the attacks read, at each local step.
    """

    step: int
    batches: list[TokenBatch] = field(default_factory=list)
    batch: TokenBatch | None = None
    guesses: dict[tuple[str, str], Guess | str] = field(default_factory=dict)
    truth_error: str | None = None
    stepped: set[int] = field(default_factory=set)
    seconds: float = 0.0
    started: float = field(default_factory=lambda: time.perf_counter())
    step_seconds: float = 0.0
    learning_rates: list[set[float]] = field(default_factory=list)

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


@dataclass(frozen=True)
class Outcome:
    """One attack at one stage, over all clients.

    Attributes:
        rates: precision, recall and F1, pooled over clients; NaN where unknown.
        worst: each rate's value at the client where it is highest; empty for one client.
        type_count_error: of the estimated number of types; NaN without an estimate.
        n: true word types, added over clients.
        unknown: why there is no value; None where there is one.
    """

    exposed: bool
    rates: Mapping[str, Rate]
    worst: Mapping[str, float]
    type_count_error: float
    n: int
    unknown: str | None

    def values(self, prefix: str, attack: str) -> dict[str, float]:
        """The numbers under the names of the logs."""
        root = f"{prefix}/{attack}"
        out = {f"{root}/exposed": float(self.exposed)}
        for name, rate in self.rates.items():
            out[f"{root}/{name}"] = rate.value
            out[f"{root}/{name}_low"] = rate.low
            out[f"{root}/{name}_high"] = rate.high
        for name, value in self.worst.items():
            out[f"{root}/{name}_worst_client"] = value
        if not math.isnan(self.type_count_error):
            out[f"{root}/type_count_error"] = self.type_count_error
        return out


FOUND, FAILED, NOTHING = 0.0, 1.0, 2.0


def row(result: Tally | str | None) -> list[float]:
    """A client's result as numbers for the exchange between processes.

    Args:
        result: a tally, why there is none, or None where the client's batch was empty.
    """
    if isinstance(result, Tally):
        return [FOUND, *result.pack()]
    return [NOTHING if result is None else FAILED] + [0.0] * Tally.WIDTH


def combine(rows: Tensor, why: str | None) -> Outcome | None:
    """Pools the clients' rows (clients, 1 + width).

    Returns:
        None where no client had anything to find. Unknown where any client's attack failed: what
        leaks there is not known to be less.
    """
    found = [r[1:] for r in rows.tolist() if r[0] == FOUND]
    failed = [i for i, r in enumerate(rows.tolist()) if r[0] == FAILED]
    if failed:
        return unknown(why or f"the attack failed on client {failed[0]}")
    if not found:
        return None
    pooled = Tally.pooled(found)
    worst: dict[str, float] = {}
    if len(found) > 1:
        each = [Tally.pooled([r]).rates() for r in found]
        for name in WORD_METRICS:
            known = [rates[name].value for rates in each if not math.isnan(rates[name].value)]
            worst[name] = max(known) if known else math.nan
    return Outcome(
        True, pooled.rates(), worst, pooled.type_count_error, int(pooled.tp + pooled.fn), None
    )


def unknown(why: str) -> Outcome:
    """An outcome without a value: not safe, unknown."""
    nothing = Rate(math.nan, math.nan, math.nan)
    return Outcome(True, dict.fromkeys(WORD_METRICS, nothing), {}, math.nan, 0, why)


def not_shared() -> Outcome:
    """The attack's surface does not leave the client: metrics 0, ``exposed`` 0."""
    zero = Rate(0.0, 0.0, 0.0)
    return Outcome(False, dict.fromkeys(WORD_METRICS, zero), {}, math.nan, 0, None)


def any_failed(rows: Tensor) -> bool:
    """Whether any of the clients' rows (clients, 1 + width) is a failure."""
    return bool((rows[:, 0] == FAILED).any())


def reason(error: Exception) -> str:
    """Why there is no result, for logs: the error's kind, and its words or its place.

    Only words written here are repeated: another error's may quote the private batch.
    """
    kind = type(error).__name__
    if isinstance(error, (UnusableObservation, BatchError, UpdateError, torch.OutOfMemoryError)):
        return f"{kind}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{kind} at {PurePath(place.filename).name}:{place.lineno}"
