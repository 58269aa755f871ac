"""Results: of all processes at a look, and of all looks of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fedleak.attacks import Attack
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.run import (
    PREFIX,
    Control,
    Found,
    Look,
    Outcome,
    Result,
    Run,
    Series,
    Trials,
    Unknown,
    Waiting,
    not_shared,
    pending,
    reason,
    unknown,
)
from lightning_fedleak.evaluation.metrics.within import over_looks
from lightning_fedleak.model.snapshots import Stage

MAX_WAITS = 20
"""Looks (or rounds) that a result may be pending before it is unknown; not tuned."""
MOST_STEPS_WAITED = 1000
"""Optimizer steps in which an attack is tried again at once, see :class:`Waiting`; then unknown.

A warm-up from rate 0 takes two of them; one whose rate changes with the epoch, as Lightning's do
by default, a whole epoch. Larger: longer runs without a result; a try that finds nothing is cheap.
"""
WORST = f"{PREFIX[Stage.SHARED]}/worst"
"""Begins the names of the highest headlines, ``leakage/worst/<family>``."""


class Results:
    """Collect the results of all fits of a monitor, and save them in checkpoints.

    Args:
        channels: the channel of each series, in the order of the logs.
        most_waited: steps (or rounds) after which an attack that is tried again and again is
            unknown.

    Attributes:
        playing: the series that have results in this fit.
        families: those of which the worst is logged.
        untested: families with an attack that applies and is not played because texts are missing,
            and why: their worst is unknown, unless another attack is certain.
        latest: the newest value by log name; NaN is unknown. Empty before the first look.
        look_values: the values of the newest look alone, by log name.
        trials: what those values are the means of, by log name, where that is known.
        controls: the newest control of each series.
        pending: log names that have no value at the newest look, and will have one later.
        looks: looks finished.
        failures: results that are unknown.
        last_step: optimizer step of the newest values.
        deferrals: steps in a row that were to be looked at and shared nothing.
    """

    def __init__(
        self, channels: Mapping[Series, Channel], *, most_waited: int = MOST_STEPS_WAITED
    ) -> None:
        self._channels = channels
        self._most_waited = most_waited
        self.playing = set(channels)
        self.untested: Mapping[str, str] = {}
        self.reset_families()
        self._waits: dict[Series, int] = {}
        self._since: dict[Series, int] = {}
        self._newest: dict[Series, Outcome] = {}
        self.controls: dict[Series, Control] = {}
        self._p_values: dict[Series, tuple[int, float]] = {}
        self._reasons: dict[Series, str] = {}
        self._answered: set[Series] = set()
        self.latest: dict[str, float] = {}
        self.look_values: dict[str, float] = {}
        self.trials: dict[str, Trials] = {}
        self.pending: frozenset[str] = frozenset()
        self.looks = 0
        self.failures = 0
        self.last_step = -1
        self.deferrals = 0
        self._looks_before = 0

    def reset_families(self) -> None:
        """Log the worst of every family that has attacks."""
        self.families = {
            channel.family: channel.headline
            for series, channel in self._channels.items()
            if _counts_for_worst(series)
        }

    def headlines(self, family: str) -> tuple[str, ...]:
        """Return the log names of which a family's worst is the highest."""
        return tuple(
            f"{series.log_name}/{channel.headline}"
            for series, channel in self._channels.items()
            if channel.family == family and _counts_for_worst(series)
        )

    def names(self, series: Iterable[Series] | None = None) -> list[str]:
        """Return the log names of the values of some series; of all without an argument."""
        ends = ("", "_low", "_high", "_worst_client")
        names = []
        for entry in self._channels if series is None else series:
            names.append(f"{entry.log_name}/exposed")
            metrics = self._channels[entry].metrics
            names += [f"{entry.log_name}/{m}{end}" for m in metrics for end in ends]
            if self._channels[entry].gives_control(entry.attack):
                names += [f"{entry.log_name}/{name}" for name in ("control", "control_of_a_part")]
            if self._channels[entry].tests_looks:
                names += [f"{entry.log_name}/{name}" for name in ("p_of_this_look", "p_over_looks")]
        worst = [f"{WORST}/{family}" for family in self.families] if series is None else []
        return names + worst

    def clear(self) -> None:
        """Forget what belongs to an earlier fit."""
        self.deferrals = 0
        self._waits.clear()
        self._since.clear()
        self._reasons.clear()
        self._answered.clear()
        self._newest.clear()
        self.controls.clear()
        self._p_values.clear()

    def begin(self) -> None:
        """Begin training: outcomes of an earlier fit are no result of this one."""
        self._looks_before = self.looks
        self._reasons.clear()
        self._answered.clear()
        self._newest.clear()

    @property
    def waiting(self) -> frozenset[Series]:
        """Return the series that are tried again in the next step."""
        return frozenset(s for s in self._since if not self._is_late(s, self.last_step))

    def settled(
        self, look: Look, outcomes: dict[Series, Outcome] | None
    ) -> dict[Series, Outcome] | None:
        """Return the outcomes that count; None where the next step is looked at instead.

        Args:
            look: the look; its scope names the series where some alone are tried again.
            outcomes: None where nothing was shared, which is *unknown* after too many such steps.
        """
        if look.scope is not None:
            tried = (outcomes or {}).items()
            return {s: o for s, o in tried if not o.soon or self._is_late(s, look.step)} or None
        if outcomes is None:
            self.deferrals += 1
            if self.deferrals <= MAX_WAITS:
                return None
            why = f"nothing was shared in {self.deferrals} steps in a row"
            outcomes = self.all_unknown(why)
        self.deferrals = 0
        return outcomes

    def missing(self, *, due: bool) -> dict[Series, Outcome]:
        """Return the outcomes that are *unknown* when a fit ends.

        Args:
            due: a look was due at its last step.
        """
        looks = self.looks - self._looks_before
        if looks > 0:
            why = "training ended before there was a first result: "
            silent = (s for s in self._channels if s in self._reasons.keys() - self._answered)
            return {s: unknown(self._channels[s].metrics, why + self._reasons[s]) for s in silent}
        if due or self.deferrals > 0:
            why = "training ended before anything that was shared could be looked at"
            return self.all_unknown(why)
        return {}

    def all_unknown(self, why: str) -> dict[Series, Outcome]:
        """Return that every series that is played is unknown."""
        return {
            s: unknown(channel.metrics, why)
            for s, channel in self._channels.items()
            if s in self.playing
        }

    def add(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        beside: Mapping[str, float],
        *,
        shared: bool = True,
    ) -> dict[Series, Outcome]:
        """Add a finished look.

        Args:
            look: the look.
            outcomes: outcomes by series.
            beside: other values of that step, by log name.
            shared: whether something is trained, and so shared.

        Returns:
            The outcomes, *unknown* where one has been pending for too long.
        """
        waited = self._wait(outcomes, look.step)
        counted = {s: self._tested(s, self._controlled(s, o)) for s, o in waited.items()}
        waits = (s for s in self._waits if not self._is_late(s, look.step))
        self.pending = frozenset(self.names(waits))
        self._newest |= counted
        values: dict[str, float] = {}
        now: dict[str, float] = {}
        for series, outcome in counted.items():
            values |= outcome.values(series.log_name)
            now |= outcome.values_now(series.log_name)
            values |= control_values(series, self._channels[series], outcome)
        families_read = {self._channels[s].family for s in outcomes}
        for family, headline in self.families.items():
            # A look may ask only some attacks of a family: of the others the newest result counts.
            members = [
                (series.log_name, outcome)
                for series, outcome in self._newest.items()
                if self._channels[series].family == family and _counts_for_worst(series)
            ]
            if family not in families_read:
                continue
            complete = family not in self.untested or any(
                o.extra.get("certified") == 1.0 for _, o in members if o.exposed
            )
            values |= _worst(family, headline, members, shared, complete, of_look=False)
            now |= _worst(family, headline, members, shared, complete, of_look=True)
        self.failures += sum(outcome.unknown is not None for outcome in counted.values())
        values |= beside
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        self.latest = self._without_news(outcomes, families_read) | values
        self.look_values = values | now
        self.trials = {
            f"{series.log_name}/{name}": trials
            for series, outcome in counted.items()
            for name, trials in outcome.trials.items()
        }
        return counted

    def _controlled(self, series: Series, outcome: Outcome) -> Outcome:
        """Return an outcome with the newest control of its attack."""
        if outcome.control is not None:
            self.controls[series] = outcome.control
        elif outcome.unknown is None and outcome.pending is None and outcome.exposed:
            return replace(outcome, control=self.controls.get(series))
        return outcome

    def _tested(self, series: Series, outcome: Outcome) -> Outcome:
        """Return an outcome with the lowest p-value so far, corrected for all looks."""
        looks, lowest = self._p_values.get(series, (0, 1.0))
        if not math.isnan(outcome.p_value):
            looks, lowest = looks + 1, min(lowest, over_looks(outcome.p_value, looks + 1))
            self._p_values[series] = looks, lowest
            return replace(outcome, p_over_looks=lowest)
        return outcome

    def _without_news(
        self, outcomes: Mapping[Series, Outcome], families_read: Collection[str]
    ) -> dict[str, float]:
        """Return the newest values of what a look did not ask."""
        others = tuple(f"{s.log_name}/" for s in self._channels if s not in outcomes)
        others += tuple(
            f"{WORST}/{family}" for family in self.families if family not in families_read
        )
        if any(s.stage == Stage.RELEASED and s not in outcomes for s in self._channels):
            others += tuple(f"{PREFIX[Stage.RELEASED]}/{name}/" for name in ("bound", "blind"))
        return {n: v for n, v in self.latest.items() if n.startswith(others)}

    def _wait(self, outcomes: Mapping[Series, Outcome], step: int) -> dict[Series, Outcome]:
        """Count the waits; return outcomes, *unknown* where one was pending for too long."""
        for series, outcome in outcomes.items():
            waited, since = self._waits.pop(series, 0), self._since.pop(series, step)
            if outcome.pending:
                self._waits[series] = waited + 1
            if outcome.soon:
                self._since[series] = since
        self._reasons |= {series: outcome.pending or "" for series, outcome in outcomes.items()}
        late = {series for series in outcomes if self._is_late(series, step)}
        self._answered |= {s for s, o in outcomes.items() if not o.pending} | late
        return {
            s: unknown(self._channels[s].metrics, f"{o.pending}, {self._describe_wait(s)}")
            if s in late
            else o
            for s, o in outcomes.items()
        }

    def _is_late(self, series: Series, step: int) -> bool:
        if series in self._since:
            return step - self._since[series] > self._most_waited
        return self._waits.get(series, 0) > MAX_WAITS

    def _describe_wait(self, series: Series) -> str:
        if series in self._since:
            return f"for more than {self._most_waited} steps (or rounds)"
        return f"for more than {MAX_WAITS} looks"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, strings and tensors."""
        states = {s.log_name: channel.series_state(s) for s, channel in self._channels.items()}
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self.deferrals,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "ledger": {
                "waits": {series.log_name: n for series, n in self._waits.items()},
                "since": {series.log_name: n for series, n in self._since.items()},
                "controls": {
                    series.log_name: {
                        "rates": dict(one.rates),
                        "part": dict(one.part),
                        "why": one.why,
                    }
                    for series, one in self.controls.items()
                },
                "p_values": {series.log_name: [*one] for series, one in self._p_values.items()},
                "kinds": states,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.looks = state["looks"]
        self.failures = state["failures"]
        self.deferrals = state["deferrals"]
        self.last_step = state["last_step"]
        self.latest = dict(state["latest"])
        ledger = state.get("ledger", {})
        waits, since = ledger.get("waits", {}), ledger.get("since", {})
        states = ledger.get("kinds", {})
        for series, channel in self._channels.items():
            channel.load_series_state(series, states.get(series.log_name, {}))
        self._waits = {s: waits[s.log_name] for s in self._channels if s.log_name in waits}
        self._since = {s: since[s.log_name] for s in self._channels if s.log_name in since}
        tested = ledger.get("p_values", {})
        self._p_values = {
            s: (int(tested[s.log_name][0]), float(tested[s.log_name][1]))
            for s in self._channels
            if s.log_name in tested
        }
        controls = ledger.get("controls", {})
        self.controls = {
            s: Control(**controls[s.log_name]) for s in self._channels if s.log_name in controls
        }


def _counts_for_worst(series: Series) -> bool:
    """Return whether a series is of an attack on what is shared, not of canaries or a part."""
    return series.prefix == PREFIX[Stage.SHARED] and series.name == series.attack


def control_values(series: Series, channel: Channel, outcome: Outcome) -> dict[str, float]:
    """Return the control of an attack's headline, by log name; unknown ones and none left out."""
    if outcome.control is None:
        return {}
    headline = channel.headline
    values = {
        f"{series.log_name}/control": outcome.control.rates.get(headline, math.nan),
        f"{series.log_name}/control_of_a_part": outcome.control.part.get(headline, math.nan),
    }
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _worst(
    family: str,
    headline: str,
    members: Sequence[tuple[str, Outcome]],
    shared: bool,
    complete: bool,
    *,
    of_look: bool,
) -> dict[str, float]:
    """Return the highest headline of a family, or a lower bound; nothing where none is played.

    The value is unknown where an attack that is not played may read more (not ``complete``).
    """
    exposed = [(root, outcome) for root, outcome in members if outcome.exposed]
    name = f"{WORST}/{family}"
    if not members:
        return {}
    if not exposed:
        return {name: math.nan if shared else 0.0}
    headlines = []
    waits = any(outcome.pending is not None for _, outcome in exposed)
    for root, outcome in exposed:
        if outcome.pending is not None:
            continue
        values = outcome.values_now(root) if of_look else outcome.values(root)
        if not math.isnan(value := values.get(f"{root}/{headline}", math.nan)):
            headlines.append(value)
    missing = any(o.unknown is not None and o.applies for _, o in exposed) or not headlines
    if not missing and not waits and (complete or max(headlines) >= 1.0):
        return {name: max(headlines)}
    at_least = {f"{name}_at_least": max(headlines)} if headlines else {}
    return at_least if waits else {name: math.nan} | at_least


# ---- of all processes -----------------------------------------------------------------------

# The first number of a packed result says what kind of result it is.
SCORED, FAILED, NOTHING, WAITING, INAPPLICABLE, SOON = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0
OTHER_WAITS = "another client waits"


class Exchange:
    """Exchange counts between the processes of one fit after each look.

    Every process takes part in the same exchanges, whatever failed on it. A client's counts go to
    process 0 and no further.

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

        Process 0 gets the rows of all clients and pools them. The others get what came out,
        without the values of single clients and without the reasons.

        Args:
            results: this process's, of the same series in the same order on every process.
            exposed: whether what a series is about leaves the client at all.
            next_step: to look at, as this process proposes it.

        Returns:
            The outcomes, None where nothing was shared; and the next step to look at as process 0
            proposes it.
        """
        rows = [_row(result, self._channels[series]) for series, result in results.items()]
        widths = [len(row) for row in rows]
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
            joint = pooled and {s: _without_clients(outcome) for s, outcome in pooled.items()}
            joint, next_step = self._run.broadcast((joint, next_step))
            if gathered is None:
                pooled = joint and {s: _with_reason(one, results[s]) for s, one in joint.items()}
        return pooled, next_step

    def _at_first(self, local: Tensor) -> Tensor | None:
        """(clients, numbers) of all processes on the first of them, None on the others."""
        if not self._many:
            return local[None]
        local = local.to(_exchange_device(self._run.device))
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


def _exchange_device(device: torch.device) -> torch.device:
    """Return the device on which the backend gathers: gloo works on the CPU alone."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else device


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
        by_position={},
        pool=None,
    )


def _with_reason(outcome: Outcome, local: Result) -> Outcome:
    """Return an outcome that process 0 has pooled, with this process's own reason if it has one."""
    if outcome.unknown is not None and isinstance(local, Unknown):
        return replace(outcome, unknown=local.why)
    if outcome.pending is not None and isinstance(local, Waiting):
        return replace(outcome, pending=local.why)
    return outcome


def _row(result: Result, channel: Channel) -> list[float]:
    """Return a client's result for the exchange between processes.

    Its kind, the channel's packed numbers, and the rates of the control and of a part of it.
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
        return [*numbers, *[0.0] * (2 + 2 * len(channel.metrics))]
    numbers += [1.0, float(bool(control.part))]
    for rates in (control.rates, control.part):
        numbers += [rates.get(name, math.nan) for name in channel.metrics]
    return numbers


def _control_of(channel: Channel, rows: Sequence[Sequence[float]], why: str) -> Control | None:
    """Return the lowest control of the clients that have one, from what :func:`_row` added."""
    added = [row[1 + channel.width :] for row in rows]
    whole = [row[2:] for row in added if row[0]]
    if not whole:
        return None
    parted = any(row[1] for row in added if row[0])
    # NaN is lower than any number: that client's control could not be read.
    lowest = torch.tensor(whole, dtype=torch.float64).amin(0).tolist()
    n = len(channel.metrics)
    rates = dict(zip(channel.metrics, lowest[:n], strict=True))
    part = dict(zip(channel.metrics, lowest[n:], strict=True)) if parted else {}
    return Control(rates, part, why)


def _failed(rows: Tensor) -> list[int]:
    """Return the clients whose attack failed or does not apply."""
    return [i for i, state in enumerate(rows[:, 0].tolist()) if state in (FAILED, INAPPLICABLE)]


def _combined(channel: Channel, series: Series, rows: Tensor, local: Result) -> Outcome:
    """Pools the clients' rows (clients, width), not all of which are NOTHING.

    Unknown where any client's attack failed: what leaks there is not known to be less. Pending
    where every client waits that has anything at all.
    """
    scored = {i: row for i, row in enumerate(rows.tolist()) if row[0] == SCORED}
    rows_of_clients = {i: row[1 : 1 + channel.width] for i, row in scored.items()}
    failed = _failed(rows)
    if failed:
        why = (
            local.why if isinstance(local, Unknown) else f"the attack failed on client {failed[0]}"
        )
        applies = bool(rows_of_clients) or bool((rows[:, 0] == FAILED).any())
        return unknown(channel.metrics, why, applies=applies)
    if not rows_of_clients:
        why = local.why if isinstance(local, Waiting) else OTHER_WAITS
        return pending(why, soon=bool((rows[:, 0] == SOON).any()))
    why = local.control.why if isinstance(local, Found) and local.control else ""
    control = _control_of(channel, [*scored.values()], why or "it failed on another client")
    try:
        return replace(channel.pooled(series, rows_of_clients), control=control)
    except Exception as error:
        return unknown(channel.metrics, reason(error))


def series_of(
    attacks: Sequence[Attack], channels: Sequence[Channel], stages: Sequence[Stage]
) -> dict[Series, Channel]:
    """Return the channel of each series, in the order of the logs."""
    owner = {attack.name: channel for channel in channels for attack in channel.attacks}
    series: dict[Series, Channel] = {}
    for stage in stages:
        for attack in attacks:
            channel = owner[attack.name]
            if (one := channel.series(attack, stage)) is not None:
                series[one] = channel
    return series | {s: channel for channel in channels for s in channel.further_series()}
