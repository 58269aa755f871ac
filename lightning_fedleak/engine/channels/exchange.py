"""Results of all processes at a look: gathered on the first process, and pooled there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

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
    """Exchange scores between the processes of one fit after each look.

    Every process takes part in the same exchanges, whatever failed on it. A client's scores go to
    process 0 and no further, and its reasons stay on it.

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

        Process 0 gets the scores of all clients and pools them. The others get what came out,
        without the values of single clients and without the reasons.

        Args:
            results: this process's, of the same series in the same order on every process.
            exposed: whether what a series is about leaves the client at all.
            next_step: to look at, as this process proposes it.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as process 0
            proposes it.
        """
        gathered = self._at_first([*results.values()])
        pooled: dict[Series, Outcome] | None = None
        if gathered is not None:
            tables = {s: [each[i] for each in gathered] for i, s in enumerate(results)}
            silent = (_is_nothing(table) for s, table in tables.items() if exposed[s])
            if not any(silent):
                pooled = {
                    series: self._outcome(series, exposed[series], table, results[series])
                    for series, table in tables.items()
                }
        if self._many:
            joint = pooled and {s: _without_clients(outcome) for s, outcome in pooled.items()}
            joint, next_step = self._run.broadcast((joint, next_step))
            if gathered is None:
                pooled = joint and {s: _with_reason(one, results[s]) for s, one in joint.items()}
        return pooled, next_step

    def _at_first(self, local: Sequence[Result]) -> Sequence[Sequence[Result]] | None:
        """Return the results of all processes on the first of them, None on the others."""
        if not self._many:
            return [local]
        rank = dist.get_rank()
        gathered = None if rank else [None] * dist.get_world_size()
        dist.gather_object([_without_reason(result) for result in local], gathered, dst=0)
        return cast(Sequence[Sequence[Result]] | None, gathered)

    def _outcome(
        self, series: Series, shared: bool, table: Sequence[Result], local: Result
    ) -> Outcome:
        channel = self._channels[series]
        failed = any(isinstance(result, Unknown) for result in table)
        if self._one_client and not channel.parted and not failed:
            table = table[:1]
        outcome = not_shared(channel.metrics)
        if shared:
            outcome = _combined(channel, series, table, local)
        return replace(outcome, worst={}) if self._one_client else outcome


def _is_nothing(table: Sequence[Result]) -> bool:
    return all(isinstance(result, NothingShared) for result in table)


def _without_reason(result: Result) -> Result:
    """Return what a process sends of its result."""
    if isinstance(result, Found) and result.control is not None:
        return replace(result, control=replace(result.control, why=""))
    return replace(result, why="") if isinstance(result, Unknown | Waiting) else result


def _without_clients(outcome: Outcome) -> Outcome:
    """Return what process 0 tells the others: pooled numbers, and of no client its own or why."""
    return replace(
        outcome,
        worst={},
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


def _control_of(metrics: Sequence[str], results: Sequence[Found], why: str) -> Control | None:
    """Return the lowest control of the clients that have one."""
    controls = [result.control for result in results if result.control is not None]
    if not controls:
        return None
    parts = [control.part for control in controls]
    rates = _lowest(metrics, [control.rates for control in controls])
    return Control(rates, _lowest(metrics, parts) if any(parts) else {}, why)


def _lowest(metrics: Sequence[str], clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the lowest rate of all clients by metric; NaN where one of them could not be read."""
    columns = {name: [each.get(name, math.nan) for each in clients] for name in metrics}
    return {
        name: math.nan if any(map(math.isnan, rates)) else min(rates)
        for name, rates in columns.items()
    }


def _combined(channel: Channel, series: Series, table: Sequence[Result], local: Result) -> Outcome:
    """Return the clients' results together, not all of which are of nothing.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    scored = {i: result for i, result in enumerate(table) if isinstance(result, Found)}
    failed = {i: result for i, result in enumerate(table) if isinstance(result, Unknown)}
    if failed:
        why = f"the attack failed on client {min(failed)}"
        applies = bool(scored) or any(result.applies for result in failed.values())
        why = local.why if isinstance(local, Unknown) else why
        return unknown(channel.metrics, why, applies=applies)
    if not scored:
        why = local.why if isinstance(local, Waiting) else OTHER_WAITS
        soon = any(isinstance(result, Waiting) and result.soon for result in table)
        return pending(why, soon=soon)
    why = local.control.why if isinstance(local, Found) and local.control else ""
    why = why or "it failed on another client"
    control = _control_of(channel.metrics, [*scored.values()], why)
    try:
        pooled = channel.pooled(series, {i: result.score for i, result in scored.items()})
        return replace(pooled, control=control)
    except Exception as error:
        return unknown(channel.metrics, reason(error))
