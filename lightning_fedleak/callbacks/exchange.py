"""What processes tell each other after a look: packed results, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from lightning_fedleak.callbacks.channels.base import Channel, Run, reason
from lightning_fedleak.callbacks.results import (
    Found,
    NothingShared,
    Outcome,
    Result,
    Series,
    Unknown,
    Waiting,
    not_shared,
    pending,
    unknown,
)

FOUND, FAILED, NOTHING, WAITING = 0.0, 1.0, 2.0, 3.0


class Exchange:
    """The processes of one fit, which exchange counts after each look.

    Every process takes part in the same exchanges, whatever failed on it.

    Args:
        run: the fit.
        channels: the channel of each series.
    """

    def __init__(self, run: Run, channels: Mapping[Series, Channel]) -> None:
        self._strategy = run.trainer.strategy
        self._many = run.trainer.world_size > 1
        self._one_client = run.client == "world"
        self._device = run.device
        self._channels = channels

    def outcomes(
        self, results: Mapping[Series, Result], exposed: Mapping[Series, bool], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """The results of all processes together.

        Args:
            results: this process's, of the same series in the same order on every process.
            exposed: whether what a series is about leaves the client at all.
            next_step: to look at, as this process proposes it.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as rank 0
            proposes it.
        """
        widths = [1 + self._channels[series].width for series in results]
        rows = (_row(r, width) for r, width in zip(results.values(), widths, strict=True))
        gathered = torch.tensor([*chain.from_iterable(rows), next_step], dtype=torch.float64)[None]
        if self._many:
            gathered = self._strategy.all_gather(gathered[0].to(self._device)).cpu()
        agreed = int(gathered[0, -1])
        ends = list(accumulate(widths))
        tables = [gathered[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
        both = list(zip(results, tables, strict=True))
        if any(exposed[s] and bool((t[:, 0] == NOTHING).all()) for s, t in both):
            return None, agreed
        outcomes: dict[Series, Outcome] = {}
        for series, table in both:
            channel = self._channels[series]
            if self._one_client and not channel.parted and not bool((table[:, 0] == FAILED).any()):
                table = table[:1]
            outcomes[series] = not_shared(channel.metrics)
            if exposed[series]:
                outcomes[series] = _combined(channel, series, table, results[series])
            if self._one_client:
                outcomes[series] = replace(outcomes[series], worst={})
        return outcomes, agreed


def _row(result: Result, width: int) -> list[float]:
    """A client's result as so many numbers, for the exchange between processes."""
    if isinstance(result, Found):
        known = [FOUND, *result.numbers]
    else:
        known = [{Unknown: FAILED, NothingShared: NOTHING, Waiting: WAITING}[type(result)]]
    return known + [0.0] * (width - len(known))


def _combined(channel: Channel, series: Series, rows: Tensor, mine: Result) -> Outcome:
    """Pools the clients' rows (clients, width), not all of which are NOTHING.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    found = {i: r[1:] for i, r in enumerate(rows.tolist()) if r[0] == FOUND}
    failed = [i for i, r in enumerate(rows.tolist()) if r[0] == FAILED]
    if failed:
        why = mine.why if isinstance(mine, Unknown) else f"the attack failed on client {failed[0]}"
        return unknown(channel.metrics, why)
    if not found:
        return pending(mine.why if isinstance(mine, Waiting) else "another client waits")
    try:
        return channel.pooled(series, found)
    except Exception as error:
        return unknown(channel.metrics, reason(error))


__all__ = ["Exchange"]
