"""The exchange of results between processes after each look (a measurement at a step).

A *series* is the results of one attack at one stage, and a *channel* the object that scores the
attacks of one family. Each process is a client, or all together are one.

1. Each process writes its results into one row of numbers, of the same length everywhere.
2. The rows are gathered on process 0, which reads the results again, without their reasons, and
   pools those of each series into an outcome.
3. Process 0 sends the outcomes to the others, without the values of single clients.

:func:`over_processes` divides the queries to a model among the processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.engine.channels.base import highest
from lightning_fedleak.engine.channels.steps import StepChannel
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


KINDS: tuple[Result, ...] = (
    NothingShared(),
    Found(()),
    Unknown(""),
    Unknown("", applies=False),
    Waiting(""),
    Waiting("", soon=False),
)
"""The results of a client without their trials and reasons; the place here is what is sent."""


class Exchange:
    """Pool the results of all processes of one fit after each look.

    Every process takes part in every exchange, even after a failure, because the others wait for
    it. The results of a client reach process 0 and no other process.

    Args:
        run: The fit.
        channels: The channel of each series.
    """

    def __init__(self, run: Run, channels: Mapping[Series, StepChannel]) -> None:
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
        sent = [_row(result, self._channels[series], series) for series, result in results.items()]
        gathered = self._gather(torch.cat(sent) if sent else torch.zeros(0, dtype=torch.float64))
        pooled: dict[Series, Outcome] | None = None
        if gathered is not None:
            rows = torch.split(gathered, [len(row) for row in sent], dim=1)
            clients = {
                series: [_read_row(row, self._channels[series], series) for row in of_series]
                for series, of_series in zip(results, rows, strict=True)
            }
            # If no client shared anything, this step has no outcome.
            if not any({*map(type, clients[s])} == {NothingShared} for s in clients if exposed[s]):
                pooled = {
                    series: self._outcome(series, clients[series], results[series])
                    if exposed[series]
                    else not_shared(self._channels[series].metrics_of(series))
                    for series in clients
                }
        if self._is_distributed:
            joint = pooled and {s: _without_clients(outcome) for s, outcome in pooled.items()}
            joint, next_step = self._run.broadcast((joint, next_step))
            pooled = joint if gathered is None else pooled
        return pooled and {s: _with_reason(o, results[s]) for s, o in pooled.items()}, next_step

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

    def _outcome(self, series: Series, clients: Sequence[Result], local: Result) -> Outcome:
        """Pool the results of clients, at least one of which shared something.

        The outcome is unknown if the attack failed on any client, where more may have leaked. It is
        pending if every client with something to read waits.
        """
        channel = self._channels[series]
        metrics = channel.metrics_of(series)
        failed = {i: result for i, result in enumerate(clients) if isinstance(result, Unknown)}
        if self._one_client and not channel.parted and not failed:
            clients = clients[:1]  # every process has the same result
        found = {i: result for i, result in enumerate(clients) if isinstance(result, Found)}
        if failed:
            applies = bool(found) or any(result.applies for result in failed.values())
            return unknown(metrics, f"the attack failed on client {min(failed)}", applies=applies)
        if not found:
            return pending(OTHER_WAITS, soon=Waiting("") in clients)
        why = local.control.why if isinstance(local, Found) and local.control else ""
        controls = [result.control for result in found.values() if result.control is not None]
        control = _lowest(controls, metrics, why or "it failed on another client")
        try:
            outcome = channel.pooled(series, {i: result.trials for i, result in found.items()})
        except Exception as error:
            return unknown(metrics, reason(error))
        return replace(outcome, control=control, worst={} if self._one_client else outcome.worst)


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
    """Return an outcome with the reason of this process if it has one."""
    if outcome.unknown is not None and isinstance(local, Unknown):
        return replace(outcome, unknown=local.why)
    if outcome.pending is not None and isinstance(local, Waiting):
        return replace(outcome, pending=local.why)
    return outcome


def _parts_of(row: Tensor, channel: StepChannel, series: Series) -> Sequence[Tensor]:
    """Return the parts of a series' row as views: the layout of the numbers that a client sends.

    The first part has the place in :data:`KINDS` and how many numbers the trials have. The second
    has the trials, and zeros up to ``channel.width`` numbers. The third has three facts: whether
    there is a control, its unexplained share, and its bound. The last two have for each metric the
    rate of the control, and of a part of it; NaN without one.
    """
    n_metrics = len(channel.metrics_of(series))
    return torch.split(row, [2, channel.width, 3, n_metrics, n_metrics])


def _row(result: Result, channel: StepChannel, series: Series) -> Tensor:
    """Return a client's result as one row of numbers, of a length that the series determines."""
    metrics, plain = channel.metrics_of(series), result
    row = torch.zeros(5 + channel.width + 2 * len(metrics), dtype=torch.float64)
    head, trials, facts, *rates = _parts_of(row, channel, series)
    if isinstance(result, Found):
        numbers = torch.as_tensor(result.trials, dtype=torch.float64).flatten()
        trials[: len(numbers)], head[1], plain = numbers, len(numbers), Found(())
        if (control := result.control) is not None:
            facts[:] = row.new_tensor([1, control.unexplained, control.bound])
            for part, values in zip(rates, (control.rates, control.part), strict=True):
                part[:] = row.new_tensor([values.get(name, math.nan) for name in metrics])
    elif isinstance(result, Unknown):
        plain = replace(result, why="")
    elif isinstance(result, Waiting):
        plain = replace(result, why="", zeros=())
    head[0] = KINDS.index(plain)
    return row


def _read_row(row: Tensor, channel: StepChannel, series: Series) -> Result:
    """Return the result that :func:`_row` wrote, without its reason."""
    head, trials, facts, *rates = (part.tolist() for part in _parts_of(row, channel, series))
    kind, n_numbers = map(int, head)
    result, control = KINDS[kind], None
    if facts[0]:
        whole, part = (dict(zip(channel.metrics_of(series), r, strict=True)) for r in rates)
        has_part = not all(map(math.isnan, part.values()))
        control = Control(whole, part if has_part else {}, "", *facts[1:])
    return Found(trials[:n_numbers], control) if isinstance(result, Found) else result


def _lowest(controls: Sequence[Control], metrics: Sequence[str], why: str) -> Control | None:
    """Return the lowest control of clients; None if no client has one.

    A *control* is the same step on known words. Its rates show whether an attack works at all.

    Args:
        controls: The controls.
        metrics: The names of the rates.
        why: Why the control could not be read, if it was not.
    """
    if not controls:
        return None
    rates, parts = [control.rates for control in controls], [control.part for control in controls]
    return Control(
        {name: _lower([values[name] for values in rates]) for name in metrics},
        {name: _lower([values.get(name, math.nan) for values in parts]) for name in metrics}
        if any(parts)
        else {},
        why,
        highest([control.unexplained for control in controls]),
        highest([control.bound for control in controls]),
    )


def _lower(values: Sequence[float]) -> float:
    """Return the lowest value; NaN is lower than any: that client's control could not be read."""
    return math.nan if any(map(math.isnan, values)) else min(values)
