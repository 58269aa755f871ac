"""The results of the attacks on one client's update in one round: :class:`RoundLook`.

A *look* is one run of the attacks, here on the update of a round. A *game* is a membership attack
on candidate texts, of which some were trained on. A *series* is one attack's results at one stage:
on a client's shared update, or on the aggregate of all. A *family* is the attacks with the same
goal, such as words. A *certificate* is a claim of an attack that can be checked without the texts.
"""

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
        client: the client; ``"sum"`` for the sum of all clients' updates.
        values: the values by log name. Rates of games are pooled over the client's rounds. NaN
            means unknown. Values that need more rounds are missing.
        now: the same values of only this round.
        unknown: the reasons why results are unknown, by series: the start of their log names.
        not_yet: the reasons why nothing can be recovered yet, by series, and by the log name of the
            worst value of a family of attacks.
        too_few: the reasons why this round has too few candidates for a decision, by series.
        seconds: the duration of the look. At the first look of a round it includes the time to
            adapt the attacks to the model that was sent.
        look: the look of the engine, with its clock.
        engine: the engine of the client.
        outcomes: the outcomes by series.
        before: the state of the engine's results before this look was counted; empty if the look
            failed before that.
        utility: further values of the round, such as a loss, by name.
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
        scored: whether the client's texts are known, so that the attacks' guesses were scored.
    """
    if scored:
        is_shared = bool(engine.fit and engine.fit.lineup.trained)
        outcomes = engine.results.add(look, outcomes, utility, shared=is_shared)
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
    cause: str,
    utility: Mapping[str, float],
) -> RoundLook:
    """Return a look whose results are all unknown, without calls that may have failed before.

    Args:
        look: the look of the engine, with its clock.
        engine: the engine of the client.
        client: the client.
        before: the state of the engine's results before the look.
        cause: the reason why the look failed.
        utility: further values, by name.
    """
    results = engine.results
    names = {series.log_name for series in results.playing}
    metrics = [f"{s.log_name}/{m}" for s in results.playing for m in engine.series[s].metrics_of(s)]
    worst = [f"{WORST}/{family}" for family in results.families]
    values = dict.fromkeys([*metrics, *worst], math.nan)
    results.failures += len(names)
    unknown, outcomes = dict.fromkeys(names, cause), results.all_unknown(cause)
    return RoundLook(
        # `values` and `now` are the same; nothing is "not yet" recovered or has too few candidates.
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
    """Return the reasons why nothing can be recovered from the update yet, by log name.

    The worst value of a family of attacks is included if one of its attacks has such a reason and
    no attack of the family has failed. Games that still need candidate texts are left out, because
    more texts in this round would give them a result.
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
    """Return the values that are logged if the client's texts are unknown.

    They are certificates, claims of an attack that can be checked without the texts, and whether
    the attack can read the update at all. They include no rates.
    """
    values = {f"{series.log_name}/exposed": float(o.exposed) for series, o in outcomes.items()}
    for series, outcome in outcomes.items():
        extra = ((name, value) for name, value in outcome.extra.items() if not math.isnan(value))
        values |= {f"{series.log_name}/{name}": value for name, value in extra}
    return values
