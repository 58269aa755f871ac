"""When to look: every so many steps, or as often as a share of the training time allows."""

from __future__ import annotations

import math
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
