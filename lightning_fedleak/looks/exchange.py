"""What processes tell each other after a look: packed results, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.look import (
    Found,
    Outcome,
    Result,
    Series,
    Unknown,
    Waiting,
    not_shared,
    pending,
    reason,
    unknown,
)
from lightning_fedleak.looks.run import Run
from lightning_fedleak.metrics import Rate

# The first number of a packed result says what kind of result it is.
SCORED, FAILED, NOTHING, WAITING, INAPPLICABLE, SOON = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0


class Exchange:
    """Exchange counts between the processes of one fit after each look.

    Every process takes part in the same exchanges, whatever failed on it. A client's counts go to
    process 0 and no further.

    Args:
        run: the fit.
        channels: the channel of each series.
    """

    def __init__(self, run: Run, channels: Mapping[Series, Channel]) -> None:
        self._many = run.processes > 1
        self._one_client = run.client == "world"
        self._device = run.device
        self._channels = channels

    def outcomes(
        self, results: Mapping[Series, Result], exposed: Mapping[Series, bool], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the results of all processes together.

        Process 0 gets the rows of all clients and pools them. The others get what came out, as
        numbers, without the values of single clients and without the reasons.

        Args:
            results: this process's, of the same series in the same order on every process.
            exposed: whether what a series is about leaves the client at all.
            next_step: to look at, as this process proposes it.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as process 0
            proposes it.
        """
        widths = [1 + self._channels[series].width for series in results]
        rows = [_row(r, width) for r, width in zip(results.values(), widths, strict=True)]
        gathered = self._at_first(torch.tensor([*chain.from_iterable(rows)], dtype=torch.float64))
        pooled: dict[Series, Outcome] | None = None
        if gathered is not None:
            ends = list(accumulate(widths))
            tables = {
                series: gathered[:, end - width : end]
                for series, end, width in zip(results, ends, widths, strict=True)
            }
            silent = (bool((t[:, 0] == NOTHING).all()) for s, t in tables.items() if exposed[s])
            if not any(silent):
                pooled = {
                    series: self._outcome(series, exposed[series], table, results[series])
                    for series, table in tables.items()
                }
        if self._many:
            message = self._message(results, pooled, next_step).to(_exchange_device(self._device))
            dist.broadcast(message, src=0)
            if gathered is None:
                pooled, next_step = self._outcomes_in(message.tolist(), results)
        return pooled, next_step

    def _at_first(self, local: Tensor) -> Tensor | None:
        """(clients, numbers) of all processes on the first of them, None on the others."""
        if not self._many:
            return local[None]
        local = local.to(_exchange_device(self._device))
        if dist.get_rank() != 0:
            dist.gather(local, None, dst=0)
            return None
        all_rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.gather(local, all_rows, dst=0)
        return torch.stack(all_rows).cpu()

    def _outcome(self, series: Series, shared: bool, table: Tensor, local: Result) -> Outcome:
        channel = self._channels[series]
        if self._one_client and not channel.parted and not _failed(table):
            table = table[:1]
        outcome = not_shared(channel.metrics)
        if shared:
            outcome = _combined(channel, series, table, local)
        return replace(outcome, worst={}) if self._one_client else outcome

    def _message(
        self,
        series_in_order: Iterable[Series],
        pooled: Mapping[Series, Outcome] | None,
        next_step: int,
    ) -> Tensor:
        """What process 0 tells the others: pooled values, and no client's own."""
        numbers = [float(pooled is not None), float(next_step)]
        for series in series_in_order:
            channel = self._channels[series]
            outcome = not_shared(()) if pooled is None else pooled[series]
            state = SCORED if outcome.exposed else NOTHING
            if outcome.unknown is not None:
                state = FAILED if outcome.applies else INAPPLICABLE
            if outcome.pending is not None:
                state = SOON if outcome.soon else WAITING
            now = outcome.now or {}
            numbers += [state, float(outcome.n), float(outcome.now is not None)]
            for name in channel.metrics:
                rate = outcome.rates.get(name, Rate(math.nan, math.nan, math.nan))
                numbers += [rate.value, rate.low, rate.high, now.get(name, math.nan)]
            numbers += [outcome.extra.get(name, math.nan) for name in channel.extras]
        return torch.tensor(numbers, dtype=torch.float64)

    def _outcomes_in(
        self, message: Sequence[float], results: Mapping[Series, Result]
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """What :meth:`_message` says, on another process; reasons are its own results'."""
        shared, next_step, *rest = message
        numbers = iter(rest)
        pooled: dict[Series, Outcome] = {}
        for series, local in results.items():
            channel = self._channels[series]
            state, n, has_now = (next(numbers) for _ in range(3))
            each = {name: [next(numbers) for _ in range(4)] for name in channel.metrics}
            extra = {name: next(numbers) for name in channel.extras}
            if state == SCORED:
                rates = {name: Rate(*four[:3]) for name, four in each.items()}
                now = {name: four[3] for name, four in each.items()} if has_now else None
                pooled[series] = Outcome(rates, int(n), extra=extra, now=now)
            elif state in (FAILED, INAPPLICABLE):
                other = "the attack failed on another client"
                why = local.why if isinstance(local, Unknown) else other
                pooled[series] = unknown(channel.metrics, why, applies=state == FAILED)
            elif state in (WAITING, SOON):
                pooled[series] = _waits(local, soon=state == SOON)
            else:
                pooled[series] = not_shared(channel.metrics)
        return pooled if shared else None, int(next_step)


def _exchange_device(device: torch.device) -> torch.device:
    """Return the device on which the backend gathers: gloo works on the CPU alone."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else device


def _waits(local: Result, *, soon: bool) -> Outcome:
    why = local.why if isinstance(local, Waiting) else "another client waits"
    return pending(why, soon=soon)


def _row(result: Result, width: int) -> list[float]:
    """Return a client's result as ``width`` numbers, for the exchange between processes."""
    if isinstance(result, Found):
        numbers = [SCORED, *result.numbers]
    elif isinstance(result, Unknown):
        numbers = [FAILED if result.applies else INAPPLICABLE]
    elif isinstance(result, Waiting):
        numbers = [SOON if result.soon else WAITING]
    else:
        numbers = [NOTHING]
    return numbers + [0.0] * (width - len(numbers))


def _failed(rows: Tensor) -> list[int]:
    """Return the clients whose attack failed or does not apply."""
    return [i for i, state in enumerate(rows[:, 0].tolist()) if state in (FAILED, INAPPLICABLE)]


def _combined(channel: Channel, series: Series, rows: Tensor, local: Result) -> Outcome:
    """Pools the clients' rows (clients, width), not all of which are NOTHING.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    rows_of_clients = {i: r[1:] for i, r in enumerate(rows.tolist()) if r[0] == SCORED}
    failed = _failed(rows)
    if failed:
        why = (
            local.why if isinstance(local, Unknown) else f"the attack failed on client {failed[0]}"
        )
        applies = bool(rows_of_clients) or bool((rows[:, 0] == FAILED).any())
        return unknown(channel.metrics, why, applies=applies)
    if not rows_of_clients:
        return _waits(local, soon=bool((rows[:, 0] == SOON).any()))
    try:
        return channel.pooled(series, rows_of_clients)
    except Exception as error:
        return unknown(channel.metrics, reason(error))
