"""What the looks of a run show together: newest values, who waits, the worst of a family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.look import PREFIX, Look, Outcome, Series, unknown
from lightning_fedleak.snapshots import Stage

MAX_WAITS = 20
"""Looks, or rounds, without what a result takes; then it is unknown."""
MOST_STEPS_WAITED = 1000
"""Optimizer steps in which an attack is tried again at once, see :class:`Waiting`; then unknown.

A warm-up from rate 0 takes two of them; one whose rate changes with the epoch, as Lightning's do
by default, a whole epoch. Larger: longer runs without a result; a try that finds nothing is cheap.
"""
WORST = f"{PREFIX[Stage.SHARED]}/worst"
"""Begins the names of the highest headlines, ``leakage/worst/<family>``."""


class Results:
    """What a monitor has found, over all its fits, and what a checkpoint keeps of it.

    Args:
        channels: the channel of each series, in the order of the logs.
        most_waited: steps (or rounds) after which an attack that is tried again and again is
            unknown.

    Attributes:
        playing: the series that have results in this fit.
        families: those of which the worst is logged.
        untested: families of which an attack that applies is not played for want of text, and why:
            their worst is unknown, unless another attack is certain.
        latest: the newest value by log name; NaN is unknown. Empty before the first look.
        look_values: the values of the newest look alone, by log name.
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
        self._asked: dict[Series, str] = {}
        self._answered: set[Series] = set()
        self.latest: dict[str, float] = {}
        self.look_values: dict[str, float] = {}
        self.pending: frozenset[str] = frozenset()
        self.looks = 0
        self.failures = 0
        self.last_step = -1
        self.deferrals = 0
        self._looks_before = 0

    def reset_families(self) -> None:
        """The worst is logged of every family that has attacks."""
        self.families = {
            channel.family: channel.headline
            for series, channel in self._channels.items()
            if _counts_for_worst(series)
        }

    def headlines(self, family: str) -> tuple[str, ...]:
        """The log names of which a family's worst is the highest."""
        return tuple(
            f"{series.log_name}/{channel.headline}"
            for series, channel in self._channels.items()
            if channel.family == family and _counts_for_worst(series)
        )

    def names(self, series: Iterable[Series] | None = None) -> list[str]:
        """Log names of the values of some series; of all without an argument."""
        ends = ("", "_low", "_high", "_worst_client")
        found = []
        for one in self._channels if series is None else series:
            found.append(f"{one.log_name}/exposed")
            metrics = self._channels[one].metrics
            found += [f"{one.log_name}/{m}{end}" for m in metrics for end in ends]
        worst = [f"{WORST}/{family}" for family in self.families] if series is None else []
        return found + worst

    def clear(self) -> None:
        """A new fit: earlier looks were at another run."""
        self.deferrals = 0
        self._waits.clear()
        self._since.clear()
        self._asked.clear()
        self._answered.clear()
        self._newest.clear()

    def begin(self) -> None:
        """Training begins: what an earlier fit had found is no result of this one."""
        self._looks_before = self.looks
        self._asked.clear()
        self._answered.clear()
        self._newest.clear()

    @property
    def waiting(self) -> frozenset[Series]:
        """The series that are to be tried again in the next step."""
        return frozenset(s for s in self._since if not self._late(s, self.last_step))

    def settled(
        self, look: Look, outcomes: dict[Series, Outcome] | None
    ) -> dict[Series, Outcome] | None:
        """The outcomes of a look that count; None where the next step is looked at instead.

        Args:
            look: of some series alone where these are tried again.
            outcomes: None where nothing was shared, which is *unknown* after too many such steps.
        """
        if look.scope is not None:
            tried = (outcomes or {}).items()
            return {s: o for s, o in tried if not o.soon or self._late(s, look.step)} or None
        if outcomes is None:
            self.deferrals += 1
            if self.deferrals <= MAX_WAITS:
                return None
            why = f"nothing was shared in {self.deferrals} steps in a row"
            outcomes = self._all_unknown(why)
        self.deferrals = 0
        return outcomes

    def missing(self, *, due: bool) -> dict[Series, Outcome]:
        """What a fit that ends leaves *unknown*.

        Args:
            due: its last step was to be looked at.
        """
        looks = self.looks - self._looks_before
        if looks > 0:
            why = "training ended before there was a first result: "
            silent = (s for s in self._channels if s in self._asked.keys() - self._answered)
            return {s: unknown(self._channels[s].metrics, why + self._asked[s]) for s in silent}
        if due or self.deferrals > 0:
            why = "training ended before anything that was shared could be looked at"
            return self._all_unknown(why)
        return {}

    def _all_unknown(self, why: str) -> dict[Series, Outcome]:
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
        """Takes a finished look.

        Args:
            look: the look.
            outcomes: by series.
            beside: other values of that step, by log name.
            shared: something is trained, and so shared.

        Returns:
            The outcomes, *unknown* where one has been pending for too long.
        """
        known = self._wait(outcomes, look.step)
        waits = (s for s in self._waits if not self._late(s, look.step))
        self.pending = frozenset(self.names(waits))
        self._newest |= known
        values: dict[str, float] = {}
        now: dict[str, float] = {}
        for series, outcome in known.items():
            values |= outcome.values(series.log_name)
            now |= outcome.values_now(series.log_name)
        asked = {self._channels[s].family for s in outcomes}
        for family, headline in self.families.items():
            # A look may ask some attacks of a family alone: of the others it is the newest result.
            of = [
                (series.log_name, outcome)
                for series, outcome in self._newest.items()
                if self._channels[series].family == family and _counts_for_worst(series)
            ]
            if family not in asked:
                continue
            complete = family not in self.untested or any(
                o.extra.get("certified") == 1.0 for _, o in of if o.exposed
            )
            values |= _worst(family, headline, of, shared, complete, of_look=False)
            now |= _worst(family, headline, of, shared, complete, of_look=True)
        self.failures += sum(outcome.unknown is not None for outcome in known.values())
        values |= beside
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        others = tuple(f"{s.log_name}/" for s in self._channels if s not in outcomes)
        others += tuple(f"{WORST}/{family}" for family in self.families if family not in asked)
        self.latest = {n: v for n, v in self.latest.items() if n.startswith(others)} | values
        self.look_values = values | now
        return known

    def _wait(self, outcomes: Mapping[Series, Outcome], step: int) -> dict[Series, Outcome]:
        """Counts who waits; in place of what has been pending for too long, *unknown*."""
        for series, outcome in outcomes.items():
            waited, since = self._waits.pop(series, 0), self._since.pop(series, step)
            if outcome.pending:
                self._waits[series] = waited + 1
            if outcome.soon:
                self._since[series] = since
        self._asked |= {series: outcome.pending or "" for series, outcome in outcomes.items()}
        late = {series for series in outcomes if self._late(series, step)}
        self._answered |= {s for s, o in outcomes.items() if not o.pending} | late
        return {
            s: unknown(self._channels[s].metrics, f"{o.pending}, {self._how_long(s)}")
            if s in late
            else o
            for s, o in outcomes.items()
        }

    def _late(self, series: Series, step: int) -> bool:
        if series in self._since:
            return step - self._since[series] > self._most_waited
        return self._waits.get(series, 0) > MAX_WAITS

    def _how_long(self, series: Series) -> str:
        if series in self._since:
            return f"for more than {self._most_waited} steps (or rounds)"
        return f"for more than {MAX_WAITS} looks"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and tensors."""
        kept = {s.log_name: channel.series_state(s) for s, channel in self._channels.items()}
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self.deferrals,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "ledger": {
                "waits": {series.log_name: n for series, n in self._waits.items()},
                "since": {series.log_name: n for series, n in self._since.items()},
                "kinds": kept,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.looks = state["looks"]
        self.failures = state["failures"]
        self.deferrals = state["deferrals"]
        self.last_step = state["last_step"]
        self.latest = dict(state["latest"])
        ledger = state.get("ledger", {})
        waits, since = ledger.get("waits", {}), ledger.get("since", {})
        kept = ledger.get("kinds", {})
        for series, channel in self._channels.items():
            channel.load_series_state(series, kept.get(series.log_name, {}))
        self._waits = {s: waits[s.log_name] for s in self._channels if s.log_name in waits}
        self._since = {s: since[s.log_name] for s in self._channels if s.log_name in since}


def _counts_for_worst(series: Series) -> bool:
    """Whether a series is of an attack on what is shared, and not of canaries or of a part."""
    return series.prefix == PREFIX[Stage.SHARED] and series.name == series.attack


def _worst(
    family: str,
    headline: str,
    of: Sequence[tuple[str, Outcome]],
    shared: bool,
    complete: bool,
    *,
    of_look: bool,
) -> dict[str, float]:
    """The highest headline of a family, or what it is at least; nothing where none is played.

    Unknown where an attack that is not played may read more (not ``complete``).
    """
    exposed = [(root, outcome) for root, outcome in of if outcome.exposed]
    name = f"{WORST}/{family}"
    if not of:
        return {}
    if not exposed:
        return {name: math.nan if shared else 0.0}
    known = []
    waits = any(outcome.pending is not None for _, outcome in exposed)
    for root, outcome in exposed:
        if outcome.pending is not None:
            continue
        values = outcome.values_now(root) if of_look else outcome.values(root)
        if not math.isnan(value := values[f"{root}/{headline}"]):
            known.append(value)
    missing = any(o.unknown is not None and o.applies for _, o in exposed) or not known
    if not missing and not waits and (complete or max(known) >= 1.0):
        return {name: max(known)}
    at_least = {f"{name}_at_least": max(known)} if known else {}
    return at_least if waits else {name: math.nan} | at_least
