"""Results of all looks of a run, and what they are worth at a gate's threshold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from lightning_fedleak.attacks import Attack
from lightning_fedleak.engine.channels.base import Channel, gives_control
from lightning_fedleak.engine.outcomes import PREFIX, Control, Outcome, Series, unknown
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics.within import over_looks
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.report import records

MAX_WAITS = 20
"""Looks (or rounds) that a result may be pending before it is unknown; not tuned."""
MOST_STEPS_WAITED = 1000
"""Optimizer steps in which an attack is tried again at once, see :class:`Waiting`; then unknown.

A warm-up from rate 0 takes two of them; one whose rate changes with the epoch, as Lightning's do
by default, a whole epoch. Larger: longer runs without a result; a try that finds nothing is cheap.
"""
UNEXPLAINED = f"{PREFIX[Stage.SHARED]}/step/unexplained"
"""Name of the share of a gradient that the step made again does not explain, from 0 to 1."""
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
        controls: the newest control of each series.
        looks: looks finished.
        failures: results that are unknown, but for those of methods that are not made for what was
            shared, or for as much as it holds.
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
            metrics = self._channels[entry].metrics_of(entry)
            names += [f"{entry.log_name}/{m}{end}" for m in metrics for end in ends]
            if gives_control(self._channels[entry], entry.attack):
                names += [f"{entry.log_name}/{name}" for name in ("control", "control_of_a_part")]
            if self._channels[entry].tests_looks:
                names += [f"{entry.log_name}/{name}" for name in ("p_of_this_look", "p_over_looks")]
        worst = [f"{WORST}/{family}" for family in self.families] if series is None else []
        return names + worst

    # ---- what a gate asks -------------------------------------------------------------------

    def channel_of(self, name: str) -> Channel | None:
        """Return the channel of a logged value, or of a family's worst; None: nobody's."""
        root, _, family = name.rpartition("/")
        for series, channel in self._channels.items():
            if root == series.log_name or (root == WORST and channel.family == family):
                return channel
        return None

    def is_looks_dependent(self, name: str) -> bool:
        """Return whether the looks of a logged value are of the same texts."""
        channel = self.channel_of(name)
        return channel is not None and channel.at_weights

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the log names that ``leakage/worst/<family>`` is the highest of, or none."""
        root, _, family = name.rpartition("/")
        if root != WORST or name not in self.names():
            return ()
        return self.headlines(family)

    def judge(self, name: str, value: float, at_most: float) -> records.Judgement:
        """Return what a logged value counts for at a gate's threshold.

        See :func:`~lightning_fedleak.report.records.judged`.

        Args:
            name: of the value in the logs.
            value: at the newest look.
            at_most: the gate's threshold.
        """
        root, _, metric = name.removesuffix("_worst_client").rpartition("/")
        metric = metric.removesuffix("_low").removesuffix("_high")
        series = next((s for s in self._channels if s.log_name == root), None)
        control = None if series is None else self.controls.get(series)
        if series is None or control is None:
            return records.Judgement(value)
        channel = self._channels[series]
        return records.judged(
            value,
            control.rates.get(metric),
            part=control.part.get(metric, math.nan),
            at_most=at_most,
            chance=channel.ranges.get(metric, (0.0, 1.0, 0.0))[2],
            known=channel.leak.known,
            failure=control.why,
            unexplained=control.unexplained,
        )

    # ---- looks ------------------------------------------------------------------------------

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
            return {
                s: unknown(self._channels[s].metrics_of(s), why + self._reasons[s]) for s in silent
            }
        if due or self.deferrals > 0:
            why = "training ended before anything that was shared could be looked at"
            return self.all_unknown(why)
        return {}

    def all_unknown(self, why: str) -> dict[Series, Outcome]:
        """Return that every series that is played is unknown."""
        return {
            s: unknown(channel.metrics_of(s), why)
            for s, channel in self._channels.items()
            if s in self.playing
        }

    def add(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        utility: Mapping[str, float],
        further: Mapping[str, float] = MappingProxyType({}),
        *,
        shared: bool = True,
    ) -> dict[Series, Outcome]:
        """Add a finished look.

        Args:
            look: the look.
            outcomes: outcomes by series.
            utility: the user's metrics of that step, by name.
            further: other values of that step, by log name.
            shared: whether something is trained, and so shared.

        Returns:
            The outcomes, *unknown* where one has been pending for too long.
        """
        self.playing |= outcomes.keys()
        waited = self._wait(outcomes, look.step)
        counted = {s: self._tested(s, self._controlled(s, o)) for s, o in waited.items()}
        self._newest |= counted
        values: dict[str, float] = {}
        now: dict[str, float] = {}
        for series, outcome in counted.items():
            values |= outcome.values(series.log_name)
            now |= outcome.values_now(series.log_name)
            values |= control_values(series, self._channels[series], outcome)
        families_read = {self._channels[s].family for s in outcomes}
        for family, headline in self.families.items():
            # A look may run only some attacks of a family: of the rest the newest result counts.
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
        self.failures += sum(o.unknown is not None and o.applies for o in counted.values())
        again = [o.control.unexplained for o in outcomes.values() if o.control is not None]
        if known := [share for share in again if not math.isnan(share)]:
            values[UNEXPLAINED] = max(known)
        values |= {f"utility/{name}": float(value) for name, value in utility.items()}
        values |= further
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        self.latest = self._without_news(outcomes, families_read) | values
        self.look_values = values | now
        return counted

    def new_values(self) -> dict[str, float]:
        """Return the newest values by log name, of what the newest look is of."""
        return {name: value for name, value in self.latest.items() if name in self.look_values}

    def lose_look(self, names: Sequence[str]) -> None:
        """Count a look whose results could not even be added: values of these names are unknown."""
        self.latest = dict.fromkeys(names, math.nan)
        self.failures += len(self.playing)
        self.latest["monitor/failures"] = float(self.failures)
        self.look_values = self.latest
        self.looks += 1

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
        others += (UNEXPLAINED,)  # as long as the controls that it belongs to
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
            s: unknown(
                self._channels[s].metrics_of(s), f"{o.pending}, for more than {self._limit(s)}"
            )
            if s in late
            else o
            for s, o in outcomes.items()
        }

    def _is_late(self, series: Series, step: int) -> bool:
        if series in self._since:
            return step - self._since[series] > self._most_waited
        return self._waits.get(series, 0) > MAX_WAITS

    def _limit(self, series: Series) -> str:
        steps = f"{self._most_waited} steps (or rounds)"
        return steps if series in self._since else f"{MAX_WAITS} looks"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, strings and tensors."""
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self.deferrals,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "series": {series.log_name: self._state_of(series) for series in self._channels},
        }

    def _state_of(self, series: Series) -> dict[str, Any]:
        control, tested = self.controls.get(series), self._p_values.get(series)
        return {
            "waits": self._waits.get(series),
            "since": self._since.get(series),
            "control": None if control is None else asdict(control),
            "p_value": None if tested is None else [*tested],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: an earlier version wrote the state.
        """
        if "series" not in state:
            raise ValueError(
                "the checkpoint is of an earlier version of lightning-fedleak: load the model's "
                "weights alone and begin a new run"
            )
        self.looks = state["looks"]
        self.failures = state["failures"]
        self.deferrals = state["deferrals"]
        self.last_step = state["last_step"]
        self.latest = dict(state["latest"])
        saved = {s: state["series"].get(s.log_name, {}) for s in self._channels}

        def known(name: str) -> dict[Series, Any]:
            return {s: each[name] for s, each in saved.items() if each.get(name) is not None}

        self._waits, self._since = known("waits"), known("since")
        self._p_values = {s: (int(n), float(p)) for s, (n, p) in known("p_value").items()}
        self.controls = {s: Control(**one) for s, one in known("control").items()}


def _counts_for_worst(series: Series) -> bool:
    """Return whether a series is of an attack on what is shared, not of canaries or a part."""
    return series.prefix == PREFIX[Stage.SHARED] and series.name == series.attack


def control_values(series: Series, channel: Channel, outcome: Outcome) -> dict[str, float]:
    """Return the control of an attack's headline, by log name; unknown ones and none left out."""
    if outcome.control is None:
        return {}
    headline = channel.headline_of(series)
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


def series_of(
    attacks: Sequence[Attack], channels: Sequence[Channel], stages: Sequence[Stage]
) -> dict[Series, Channel]:
    """Return the channel of each series, in the order of the logs; each channel gets its own."""
    owner = {attack.name: channel for channel in channels for attack in channel.attacks}
    series: dict[Series, Channel] = {}
    for stage in (*stages, Stage.RELEASED):
        for attack in attacks:
            channel = owner[attack.name]
            series |= dict.fromkeys(channel.series(attack, (stage,)), channel)
    for channel in channels:
        channel.all_series = tuple(one for one, its in series.items() if its is channel)
    return series
