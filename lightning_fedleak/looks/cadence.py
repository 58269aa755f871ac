"""When to look: every so many steps, or as often as a share of the training time allows."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod


class Cadence(ABC):
    """Decides at which optimizer steps the monitor looks.

    The next look is fixed at the look before, so that under DDP rank 0's choice travels with that
    look's results and no step needs a message of its own.
    """

    def __init__(self) -> None:
        self.next_step = 0

    def due(self, step: int) -> bool:
        """Whether optimizer step ``step`` (from 0) is to be looked at."""
        return step >= self.next_step

    @abstractmethod
    def after_look(self, step: int, look_seconds: float, step_seconds: float) -> int:
        """Proposes the next step to look at.

        Args:
            step: the step just looked at.
            look_seconds: what that look cost.
            step_seconds: what a step without a look costs.
        """

    def after_try(self, try_seconds: float, step_seconds: float) -> int:
        """Proposes the next step to look at where attacks were tried again in between.

        Args:
            try_seconds: what that cost.
            step_seconds: what a step without a look costs.
        """
        return self.next_step

    @property
    @abstractmethod
    def argument(self) -> str:
        """The monitor's argument that asks for this."""


class EveryNSteps(Cadence):
    """Looks at steps 0, n, 2n, ..."""

    def __init__(self, n: int) -> None:
        super().__init__()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"every_n_steps must be a positive integer, got {n!r}")
        self.n = n

    def after_look(self, step: int, look_seconds: float, step_seconds: float) -> int:
        """The next multiple of n after ``step``."""
        return (step // self.n + 1) * self.n

    @property
    def argument(self) -> str:
        """``every_n_steps=50``."""
        return f"every_n_steps={self.n}"


class MaxOverhead(Cadence):
    """Looks so seldom that looks cost at most a share of the time spent training.

    A look that cost ``c`` seconds is followed by ``c / (share * s)`` steps of ``s`` seconds each.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"max_overhead must be a share in (0, 1], got {share!r}")
        self.share = share

    def after_look(self, step: int, look_seconds: float, step_seconds: float) -> int:
        """Waits until the look has been paid for."""
        if step_seconds <= 0:
            return step + 1
        return step + max(1, math.ceil(look_seconds / (self.share * step_seconds)))

    def after_try(self, try_seconds: float, step_seconds: float) -> int:
        """Waits so much longer."""
        return self.after_look(self.next_step, try_seconds, step_seconds)

    @property
    def argument(self) -> str:
        """``max_overhead=0.005``."""
        return f"max_overhead={self.share:g}"


def cadence_of(every_n_steps: int | None, max_overhead: float | None) -> Cadence:
    """What the user asked for; every 50 steps by default.

    Raises:
        ValueError: both, or a number out of range.
    """
    if every_n_steps is not None and max_overhead is not None:
        raise ValueError(
            "give every_n_steps or max_overhead, not both: one fixes how often to look, the "
            "other lets the cost decide"
        )
    if max_overhead is not None:
        return MaxOverhead(max_overhead)
    return EveryNSteps(50 if every_n_steps is None else every_n_steps)


class StepClock:
    """What an optimizer step without a look costs, as a running mean.

    Attributes:
        seconds: of a step; 0 until one is known.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: tuple[int, float] | None = None

    def starts(self, step: int) -> None:
        """A batch of optimizer step ``step`` starts, and none before it was looked at."""
        now = time.perf_counter()
        if self._since is not None and step > self._since[0]:
            passed = (now - self._since[1]) / (step - self._since[0])
            self.seconds = passed if self.seconds == 0 else 0.8 * self.seconds + 0.2 * passed
            self._since = None
        self._since = self._since or (step, now)

    def interrupted(self) -> None:
        """A look has come between."""
        self._since = None
