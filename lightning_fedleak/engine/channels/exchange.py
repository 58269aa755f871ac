"""Results of all processes at a look: gathered on the first process, and pooled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.outcomes import (
    Control,
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
from lightning_fedleak.engine.run import Run, reason

OTHER_WAITS = "another client waits"


class Exchange:
    """Exchange results between the processes of one fit after each look.

    Every process takes part in the same exchanges, whatever failed on it. A client's results go to
    process 0 and no further, and without its reasons.

    Args:
        run: the fit.
        channels: the channel of each series.
    """

    def __init__(self, run: Run, channels: Mapping[Series, Channel]) -> None:
        self._run = run
        self._many = run.processes > 1
        self._one_client = run.client == "world"
        self._channels = channels

    def outcomes(
        self, results: Mapping[Series, Result], exposed: Mapping[Series, bool], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the results of all processes together.

        Process 0 gets those of all clients and pools them. The others get what came out, without
        the values of single clients and without the reasons.

        Args:
            results: this process's, of the same series in the same order on every process.
            exposed: whether what a series is about leaves the client at all.
            next_step: to look at, as this process proposes it.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as process 0
            proposes it.
        """
        every = self._at_first([*results.values()])
        pooled: dict[Series, Outcome] | None = None
        if every is not None:
            by_series = dict(zip(results, zip(*every, strict=True), strict=True))
            silent = (
                all(isinstance(one, NothingShared) for one in clients)
                for series, clients in by_series.items()
                if exposed[series]
            )
            if not any(silent):
                pooled = {
                    series: self._outcome(series, exposed[series], clients, results[series])
                    for series, clients in by_series.items()
                }
        if self._many:
            joint = pooled and {s: _without_clients(outcome) for s, outcome in pooled.items()}
            joint, next_step = self._run.broadcast((joint, next_step))
            if every is None:
                pooled = joint and {s: _with_reason(one, results[s]) for s, one in joint.items()}
        return pooled, next_step

    def _at_first(self, results: list[Result]) -> list[list[Result]] | None:
        """Return the results of each client on the first process, None on the others."""
        if not self._many:
            return [results]
        is_first = dist.get_rank() == 0
        every: list[list[Result]] = [[] for _ in range(dist.get_world_size())]
        dist.gather_object([*map(_without_reason, results)], every if is_first else None, dst=0)
        return every if is_first else None

    def _outcome(
        self, series: Series, shared: bool, clients: Sequence[Result], local: Result
    ) -> Outcome:
        channel = self._channels[series]
        failed = any(isinstance(result, Unknown) for result in clients)
        if self._one_client and not channel.parted and not failed:
            clients = clients[:1]
        outcome = not_shared(channel.metrics)
        if shared:
            outcome = _combined(channel, series, clients, local)
        return replace(outcome, worst={}) if self._one_client else outcome


def _without_reason(result: Result) -> Result:
    """Return what a client sends of a result to process 0."""
    if isinstance(result, Found) and result.control is not None:
        return replace(result, control=replace(result.control, why=""))
    return replace(result, why="") if isinstance(result, Unknown | Waiting) else result


def _without_clients(outcome: Outcome) -> Outcome:
    """Return what process 0 tells the others: pooled numbers, and of no client its own or why."""
    return replace(
        outcome,
        worst={},
        trials={},
        p_value=math.nan,
        unknown=None if outcome.unknown is None else "the attack failed on another client",
        pending=None if outcome.pending is None else OTHER_WAITS,
        too_few=None,
        pool=None,
    )


def _with_reason(outcome: Outcome, local: Result) -> Outcome:
    """Return an outcome that process 0 has pooled, with this process's own reason if it has one."""
    if outcome.unknown is not None and isinstance(local, Unknown):
        return replace(outcome, unknown=local.why)
    if outcome.pending is not None and isinstance(local, Waiting):
        return replace(outcome, pending=local.why)
    return outcome


def _lowest(channel: Channel, controls: Sequence[Control], why: str) -> Control | None:
    """Return the lowest control of the clients that have one."""
    if not controls:
        return None

    def lowest(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        # NaN is lower than any number: that client's control could not be read.
        each = {name: [one.get(name, math.nan) for one in rates] for name in channel.metrics}
        return {n: math.nan if any(map(math.isnan, v)) else min(v) for n, v in each.items()}

    parts = [control.part for control in controls]
    part = lowest(parts) if any(parts) else {}
    return Control(lowest([control.rates for control in controls]), part, why)


def _combined(
    channel: Channel, series: Series, clients: Sequence[Result], local: Result
) -> Outcome:
    """Pool the results of clients, not all of which shared nothing.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    scored = {i: result for i, result in enumerate(clients) if isinstance(result, Found)}
    failed = {i: result for i, result in enumerate(clients) if isinstance(result, Unknown)}
    if failed:
        why = f"the attack failed on client {min(failed)}"
        why = local.why if isinstance(local, Unknown) else why
        applies = bool(scored) or any(result.applies for result in failed.values())
        return unknown(channel.metrics, why, applies=applies)
    if not scored:
        why = local.why if isinstance(local, Waiting) else OTHER_WAITS
        soon = any(isinstance(result, Waiting) and result.soon for result in clients)
        return pending(why, soon=soon)
    why = local.control.why if isinstance(local, Found) and local.control else ""
    controls = [result.control for result in scored.values() if result.control is not None]
    control = _lowest(channel, controls, why or "it failed on another client")
    scores = {client: result.score for client, result in scored.items()}
    try:
        return replace(channel.pooled(series, scores), control=control)
    except Exception as error:
        return unknown(channel.metrics, reason(error))
