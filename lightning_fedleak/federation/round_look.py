"""What was read in one round: off a client's update, or off the model that it was sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_fedleak.engine import WORST, Channel, Look, Outcome, Series
from lightning_fedleak.federation.client_engine import ClientEngine


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
        too_few: why this round has too few candidates for a decision, by that name.
        seconds: that the look took, and in its round that at the model that was sent.
        look: with its clock.
        engine: of the client.
        outcomes: by series.
        before: state of results and channels before this look was counted; empty where it was not.
    """

    round_: int
    client: str | int
    values: Mapping[str, float]
    now: Mapping[str, float]
    unknown: Mapping[str, str]
    not_yet: Mapping[str, str]
    too_few: Mapping[str, str]
    seconds: float
    look: Look = field(repr=False, compare=False)
    engine: ClientEngine = field(repr=False, compare=False)
    outcomes: Mapping[Series, Outcome] = field(repr=False, compare=False)
    before: Mapping[str, Any] = field(repr=False, compare=False)
    utility: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)


def read_look(
    look: Look,
    engine: ClientEngine,
    outcomes: Mapping[Series, Outcome],
    client: str | int,
    before: Mapping[str, Any],
    utility: Mapping[str, float],
    *,
    scored: bool,
) -> RoundLook:
    """Return what users see of a look, and count it where it was scored.

    Args:
        look: with its clock.
        engine: of the client.
        outcomes: by series.
        client: whose round it was.
        before: state of the engine's results.
        utility: further values, by name.
        scored: whether the truth is known.
    """
    if scored:
        shared = bool(engine.fit and engine.fit.lineup.trained)
        outcomes = engine.results.add(look, outcomes, utility, shared=shared)
        values, now = engine.results.new_values(), dict(engine.results.look_values)
    else:
        further = {f"utility/{name}": float(value) for name, value in utility.items()}
        values = now = _facts(outcomes) | further | {"monitor/seconds": look.seconds}
    return RoundLook(
        look.step,
        client,
        values,
        now,
        {s.log_name: o.unknown for s, o in outcomes.items() if o.unknown is not None},
        _not_yet(outcomes, engine.series),
        {s.log_name: o.too_few for s, o in outcomes.items() if o.too_few is not None},
        look.seconds,
        look,
        engine,
        outcomes,
        before,
        utility,
    )


def failed_look(
    look: Look,
    engine: ClientEngine,
    client: str | int,
    before: Mapping[str, Any],
    why: str,
    utility: Mapping[str, float],
) -> RoundLook:
    """Return a look of which every result is unknown, without a function that may have failed."""
    results = engine.results
    names = {series.log_name for series in results.playing}
    metrics = [f"{s.log_name}/{m}" for s in results.playing for m in engine.series[s].metrics_of(s)]
    worst = [f"{WORST}/{family}" for family in results.families]
    values = dict.fromkeys([*metrics, *worst], math.nan)
    results.failures += len(names)
    unknown, outcomes = dict.fromkeys(names, why), results.all_unknown(why)
    return RoundLook(
        *(look.step, client, values, values, unknown, {}, {}),
        seconds=0.0,
        look=look,
        engine=engine,
        outcomes=outcomes,
        before=before,
        utility=utility,
    )


def _not_yet(
    outcomes: Mapping[Series, Outcome], channels: Mapping[Series, Channel]
) -> dict[str, str]:
    """Return why results wait, and why the worst of a family waits if all else in it is known.

    Games that still need candidate texts are excluded: their result could be had at once.
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


def _facts(outcomes: Mapping[Series, Outcome]) -> dict[str, float]:
    """Return what is logged where the truth is not known: no rate, not even an unknown one."""
    values = {f"{series.log_name}/exposed": float(o.exposed) for series, o in outcomes.items()}
    for series, outcome in outcomes.items():
        known = ((name, value) for name, value in outcome.extra.items() if not math.isnan(value))
        values |= {f"{series.log_name}/{name}": value for name, value in known}
    return values
