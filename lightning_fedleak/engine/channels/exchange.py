"""The exchange of results between processes after each look (a measurement at a step).

A *series* is the results of one attack at one stage, and a *channel* the object that scores the
attacks of one family. Each process is a client, or all together are one.

1. Each process packs its results into one row of numbers, of the same width everywhere.
2. The rows are gathered on process 0, which pools those of each series into an outcome.
3. Process 0 sends the outcomes to the others, without the values of single clients.

:func:`over_processes` divides the queries to a model among the processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.outcomes import (
    Control,
    Found,
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

# The first number of a packed result says what kind of result it is: a score; a failed attack;
# nothing was shared; no result yet; a method that is not made for these gradients; no result yet,
# but maybe in the next step.
SCORED, FAILED, NOTHING, WAITING, INAPPLICABLE, SOON = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0
OTHER_WAITS = "another client waits"


class Exchange:
    """Pool the results of all processes of one fit after each look.

    Every process takes part in every exchange, even after a failure, because the others wait for
    it. The results of a client reach process 0 and no other process.

    Args:
        run: The fit.
        channels: The channel of each series.
    """

    def __init__(self, run: Run, channels: Mapping[Series, Channel]) -> None:
        self._run = run
        self._is_distributed = run.processes > 1
        self._one_client = run.client == "world"
        self._channels = channels

    def outcomes(
        self, results: Mapping[Series, Result], exposed: Mapping[Series, bool], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the results of all processes together.

        Process 0 gets the rows of all clients and pools them. Other processes get the pooled
        outcomes, without the values of single clients, and only their own reasons of failures.

        Args:
            results: The results of this process; the series have the same order on all processes.
            exposed: Whether the gradients of a series leave the client at all.
            next_step: The next step to look at, as this process proposes it.

        Returns:
            The outcomes, None if nothing was shared; and the next step to look at, as process 0
            proposes it.
        """
        rows = [_row(result, self._channels[series], series) for series, result in results.items()]
        widths = [len(row) for row in rows]
        gathered = self._gather(torch.tensor([*chain.from_iterable(rows)], dtype=torch.float64))
        pooled: dict[Series, Outcome] | None = None
        if gathered is not None:
            tables = dict(zip(results, torch.split(gathered, widths, dim=1), strict=True))
            # If no client shared anything, this step has no outcome.
            empty = (bool((t[:, 0] == NOTHING).all()) for s, t in tables.items() if exposed[s])
            if not any(empty):
                pooled = {
                    series: self._outcome(series, table, results[series])
                    if exposed[series]
                    else not_shared(self._channels[series].metrics_of(series))
                    for series, table in tables.items()
                }
        if self._is_distributed:
            joint = pooled and {s: _without_clients(outcome) for s, outcome in pooled.items()}
            joint, next_step = self._run.broadcast((joint, next_step))
            if gathered is None:
                pooled = joint and {s: _with_reason(o, results[s]) for s, o in joint.items()}
        return pooled, next_step

    def _gather(self, local: Tensor) -> Tensor | None:
        """Return the numbers of all processes, (clients, n), on process 0; None on the others."""
        if not self._is_distributed:
            return local[None]
        # gloo gathers on the CPU only.
        local = local.cpu() if "gloo" in dist.get_backend() else local.to(self._run.device)
        is_first = dist.get_rank() == 0
        rows = [torch.empty_like(local) for _ in range(self._run.processes)] if is_first else None
        dist.gather(local, rows, dst=0)
        return None if rows is None else torch.stack(rows).cpu()

    def _outcome(self, series: Series, rows: Tensor, local: Result) -> Outcome:
        """Pool the clients' rows (clients, width), at least one of which is not NOTHING.

        The outcome is unknown if the attack failed on any client, where more may have leaked. It is
        pending if every client with something to read waits.
        """
        channel, states = self._channels[series], rows[:, 0].tolist()
        failed = [i for i, state in enumerate(states) if state in (FAILED, INAPPLICABLE)]
        if self._one_client and not channel.parted and not failed:
            rows = rows[:1]  # every process has the same result
        scored = {i: row for i, row in enumerate(rows.tolist()) if row[0] == SCORED}
        rows_of_clients = {i: row[1 : 1 + channel.width] for i, row in scored.items()}
        if failed:
            why = f"the attack failed on client {failed[0]}"
            why = local.why if isinstance(local, Unknown) else why
            applies = bool(scored) or FAILED in states
            return unknown(channel.metrics_of(series), why, applies=applies)
        if not scored:
            why = local.why if isinstance(local, Waiting) else OTHER_WAITS
            return pending(why, soon=bool((rows[:, 0] == SOON).any()))
        why = local.control.why if isinstance(local, Found) and local.control else ""
        why = why or "it failed on another client"
        control = _control_of(channel, series, [*scored.values()], why)
        try:
            outcome = replace(channel.pooled(series, rows_of_clients), control=control)
        except Exception as error:
            return unknown(channel.metrics_of(series), reason(error))
        return replace(outcome, worst={}) if self._one_client else outcome


def over_processes(run: Run, n: int, ask: Callable[[list[int]], list[Tensor]]) -> list[Tensor]:
    """Return tensors of n rows; each process computes some of them, or all if it is sharded.

    A sharded model needs all processes for each forward.

    Args:
        run: The fit.
        n: The number of rows.
        ask: Returns the tensors of the rows with the given indices.

    Raises:
        UnusableObservation: ``ask`` failed, on this process or on another one.
    """
    parts: list[Tensor] = []
    computes_all = run.processes == 1 or run.is_sharded
    rows = list(range(n) if computes_all else range(run.rank, n, run.processes))
    failure: Exception | None = None
    try:
        with run.forward_context():
            parts = ask(rows)
    except Exception as error:
        failure = error
    if run.on_any_process(failure is not None):
        why = "another process failed" if failure is None else reason(failure)
        raise UnusableObservation(f"the model cannot be asked: {why}") from failure
    if computes_all:
        return parts
    results = []
    for values in parts:  # each process fills its rows, so that the sum has all
        joint = torch.zeros(n, *values.shape[1:])
        joint[rows] = values.float()
        joint = run.summed(joint.to(run.device)).cpu()
        results.append(joint > 0.5 if values.dtype == torch.bool else joint)
    return results


def _without_clients(outcome: Outcome) -> Outcome:
    """Return an outcome without values or reasons of single clients, for other processes."""
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
    """Return an outcome of process 0, with the reason of this process if it has one."""
    if outcome.unknown is not None and isinstance(local, Unknown):
        return replace(outcome, unknown=local.why)
    if outcome.pending is not None and isinstance(local, Waiting):
        return replace(outcome, pending=local.why)
    return outcome


def _row(result: Result, channel: Channel, series: Series) -> list[float]:
    """Return a client's result as one row of numbers, of a width that the series determines.

    The row holds the kind of result, ``channel.width`` packed numbers, four facts of the control
    (whether there is one, whether a part was read, the unexplained share, the bound), and for each
    metric the rates of the control and of the part.
    """
    control = None
    if isinstance(result, Found):
        numbers, control = [SCORED, *result.numbers], result.control
    elif isinstance(result, Unknown):
        numbers = [FAILED if result.applies else INAPPLICABLE]
    elif isinstance(result, Waiting):
        numbers = [SOON if result.soon else WAITING]
    else:
        numbers = [NOTHING]
    numbers += [0.0] * (1 + channel.width - len(numbers))
    if control is None:
        return [*numbers, *[0.0] * (4 + 2 * len(channel.metrics_of(series)))]
    numbers += [1.0, float(bool(control.part)), control.unexplained, control.bound]
    for rates in (control.rates, control.part):
        numbers += [rates.get(name, math.nan) for name in channel.metrics_of(series)]
    return numbers


def _control_of(
    channel: Channel, series: Series, rows: Sequence[Sequence[float]], why: str
) -> Control | None:
    """Return the lowest control of the clients that have one, from what :func:`_row` added.

    A *control* is the same step on known words. Its rates show whether an attack works at all.
    """
    added = [row[1 + channel.width :] for row in rows]
    rates_of_clients = [row[4:] for row in added if row[0]]
    if not rates_of_clients:
        return None
    has_part = any(row[1] for row in added if row[0])
    # NaN is lower than any number: that client's control could not be read.
    lowest = torch.tensor(rates_of_clients, dtype=torch.float64).amin(0).tolist()
    metrics = channel.metrics_of(series)
    n = len(metrics)
    rates = dict(zip(metrics, lowest[:n], strict=True))
    part = dict(zip(metrics, lowest[n:], strict=True)) if has_part else {}
    facts = torch.tensor([row[2:4] for row in added if row[0]], dtype=torch.float64)
    highest = facts.nan_to_num(-1.0).amax(0).tolist()
    unexplained, bound = (math.nan if value < 0 else value for value in highest)
    return Control(rates, part, why, unexplained, bound)
