"""The result of the attacks on one client's update in one round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_fedleak.engine import WORST, Channel, Look, Outcome, Series
from lightning_fedleak.federation.client_engine import ClientEngine


@dataclass(frozen=True)
class RoundLook:
    """The results of the attacks on one client's update in one round.

    Attributes:
        round_: the number of the round.
        client: the client; :data:`SUM` for the sum of all clients' updates.
        values: the values by log name. Rates of games are pooled over the client's rounds. NaN is
            unknown, and pending values are missing.
        now: the same values of only this round.
        unknown: the reasons of unknown results, by the start of their log names.
        not_yet: the reasons why nothing can be read yet, by the same names and the family's worst.
        too_few: the reasons why this round has too few candidates for a decision, by the same
            names.
        seconds: the duration of the look. At the first look of a round that includes adapting the
            attacks to the model that was sent.
        look: the look of the engine, with its clock.
        engine: the engine of the client.
        outcomes: the outcomes by series.
        before: the state of results and channels before this look was counted; empty if it was not
            counted.
        utility: further values, by name.
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
    """Return the user's view of a look, and count the look if it was scored.

    Args:
        look: the look of the engine, with its clock.
        engine: the engine of the client.
        outcomes: the outcomes by series.
        client: the client.
        before: the state of the engine's results before the look.
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
    """Return a look whose results are all unknown, and call nothing that may have failed."""
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
    """Return why results are pending, and why the worst of a family is if nothing else fails.

    Games that still need candidate texts are excluded: more texts in this round would give them a
    result.
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
    """Return the values that are logged without the truth: certificates, and no rates."""
    values = {f"{series.log_name}/exposed": float(o.exposed) for series, o in outcomes.items()}
    for series, outcome in outcomes.items():
        known = ((name, value) for name, value in outcome.extra.items() if not math.isnan(value))
        values |= {f"{series.log_name}/{name}": value for name, value in known}
    return values
