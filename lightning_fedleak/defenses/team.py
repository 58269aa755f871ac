"""The processes that together are one client: what they add up, and what they agree on.

Where one of them refuses, all must: the others would wait for it in their next collective. So
whatever may raise in one of them runs in :meth:`Team.together`, and everything that all of them
compute from sums raises in all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_fedleak.defenses.base import DefenseContext, DefenseError


class Team:
    """The processes of one client; every method with a result is a collective of all of them.

    Attributes:
        size: number of processes. With one nothing is sent anywhere.
        process: number of this one.
    """

    def __init__(self, context: DefenseContext | None = None) -> None:
        self.size = 1 if context is None else context.processes
        self.process = 0 if context is None else context.process
        self._device = torch.device("cpu") if context is None else context.device

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each number the largest over processes; of booleans whether one of them is True."""
        if self.size == 1:
            return [float(value) for value in values]
        numbers = torch.tensor([*map(float, values)], dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        found: list[float] = numbers.tolist()
        return found

    def told_by_first(self, value: Any) -> Any:
        """What process 0 gives; of the others it is not looked at."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, device=self._device)
        return told[0]

    def check_alike(self, **numbers: float) -> None:
        """Refuses numbers that differ between processes.

        Raises:
            DefenseError: says which, on all of them.
        """
        if self.size == 1:
            return
        values = [*numbers.values()]
        found = self.largest([*values, *(-value for value in values)])
        for name, high, low in zip(numbers, found, found[len(values) :], strict=False):
            if high != -low:
                raise DefenseError(
                    f"DPSGD: the processes of the client have different values of {name}, from "
                    f"{-low} to {high}. Build the same defence, loader and Trainer in all of them."
                )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is raised inside is raised by all processes; in it no collective may wait for one.

        Raises:
            DefenseError: another process refused; says which and why.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        if not self.largest([error is not None])[0]:
            return
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, None if error is None else f"{error}")
        if error is not None:
            raise error
        first = next(number for number, reason in enumerate(told) if reason is not None)
        raise DefenseError(f"process {first} of this client refused: {told[first]}")


__all__ = ["Team"]
