"""What was read in one round: off a client's update, or off the model that it was sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_fedleak.engine import WORST, Channel, Engine, Look, Outcome, Series


@dataclass(frozen=True)
class RoundLook:
    """What was read off one client's update in one round.

    Attributes:
        round_: number of the round.
        client: whose update it was; :data:`SUM` for that of all together.
        values: by log name, rates of games pooled over the client's rounds; NaN is unknown, and
            what is waited for is missing.
        now: the same of this round alone.
        unknown: why results are unknown, by the log name that their values begin with.
        not_yet: why nothing can be read so far, by that name, and by the family's worst.
        too_few: why rates of this round alone are no judgement of it, by that name.
        seconds: that the look took, and in its round that at the model that was sent.
        entry: what is needed to write it down, or to forget it.
    """

    round_: int
    client: str | int
    values: Mapping[str, float]
    now: Mapping[str, float]
    unknown: Mapping[str, str]
    not_yet: Mapping[str, str]
    too_few: Mapping[str, str]
    seconds: float
    entry: LookEntry = field(repr=False, compare=False)


@dataclass(frozen=True)
class LookEntry:
    """Holds what is needed to write a look down, or to forget it."""

    look: Look
    engine: Engine
    outcomes: Mapping[Series, Outcome]
    utility: Mapping[str, float]
    before: Mapping[str, object]

    def as_round_look(self, client: str | int, *, scored: bool, beside: float = 0.0) -> RoundLook:
        """Return what users see of the look, and count it where it was scored.

        Args:
            client: whose round it was.
            scored: whether the truth is known.
            beside: seconds that the round took for another look.
        """
        engine, outcomes = self.engine, self.outcomes
        if scored:
            outcomes = engine.add(self.look, outcomes, self.utility)
            values, now = engine.results.new_values(), dict(engine.results.look_values)
        else:
            further = {f"utility/{name}": float(value) for name, value in self.utility.items()}
            values = now = facts(outcomes) | further | {"monitor/seconds": self.look.seconds}
        return RoundLook(
            self.look.step,
            client,
            values,
            now,
            {s.log_name: o.unknown for s, o in outcomes.items() if o.unknown is not None},
            not_yet(outcomes, engine.series),
            {s.log_name: o.too_few for s, o in outcomes.items() if o.too_few is not None},
            self.look.seconds + beside,
            replace(self, outcomes=outcomes),
        )

    def as_failed_look(self, client: str | int, why: str) -> RoundLook:
        """Return a look of which every result is unknown, without a function of the engine."""
        results = self.engine.results
        names = {series.log_name for series in results.playing}
        metrics = [
            f"{s.log_name}/{m}" for s in results.playing for m in self.engine.series[s].metrics
        ]
        worst = [f"{WORST}/{family}" for family in results.families]
        values = dict.fromkeys([*metrics, *worst], math.nan)
        results.failures += len(names)
        unknown = dict.fromkeys(names, why)
        return RoundLook(self.look.step, client, values, values, unknown, {}, {}, 0.0, self)


def not_yet(
    outcomes: Mapping[Series, Outcome], channels: Mapping[Series, Channel]
) -> dict[str, str]:
    """Return why results wait, and why the worst of a family waits if all else in it is known.

    A game that waits for texts to ask about is none of them: its result could be had at once.
    """
    reasons = {
        series.log_name: outcome.pending
        for series, outcome in outcomes.items()
        if outcome.pending is not None and not channels[series].plays_games
    }
    for series in outcomes:
        family = channels[series].family
        of_family = [s for s in outcomes if channels[s].family == family]
        fails = any(outcomes[s].unknown is not None and outcomes[s].applies for s in of_family)
        if series.log_name in reasons and not fails:
            reasons[f"{WORST}/{family}"] = reasons[series.log_name]
    return reasons


def facts(outcomes: Mapping[Series, Outcome]) -> dict[str, float]:
    """Return what is logged where the truth is not known: no rate, not even an unknown one."""
    values = {}
    for series, outcome in outcomes.items():
        values[f"{series.log_name}/exposed"] = float(outcome.exposed)
        for name, value in outcome.extra.items():
            if not math.isnan(value):
                values[f"{series.log_name}/{name}"] = value
    return values
