"""The attacks on one client's update in one round: the engine that makes them, and their results.

An engine runs attacks, scores their guesses and logs the results. One engine of the federation
calibrates the attacks; each client has a :class:`ClientEngine` for its updates and its log. A
:class:`RoundLook` holds the results of one round.

A *look* is one run of the attacks on one update. The *line-up* decides which attacks run, with a
*plan* of the parameters that each of them reads. A *series* is the results of one attack at one
*stage*: on the update of one client, or on the aggregate of all. A *channel* is the part of the
engine for one kind of attack: it arms the attacks before a look, scores their guesses and disarms
them. A *family* is the attacks with the same goal, such as words. A *game* is a membership attack
on candidate texts, of which some were trained on; channels pool the games over rounds. A *control*
is the same attack on words that are known, to show that the attack works. A *certificate* is a
claim of an attack that can be checked without the texts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine import AUTOCAST, WORST, Engine, Look, Run, contained, reason
from lightning_fedleak.engine.channels.base import exclude, family_of
from lightning_fedleak.engine.channels.steps import StepChannel, results_of
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.log import Destination, Report
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown, unknown
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage
from lightning_fedleak.model.taps import NOT_TESTED, LocalRound, ModelCall, Step, plain_call

# Reasons of unknown results, as the logs show them.
_NOT_SCORED = (
    "the observer does not hold the client's texts, so guesses from the update cannot be scored"
)
_NO_LOSS = "the client's batches hold no token that a loss was computed on"


class ClientEngine(Engine):
    """An engine that attacks the updates of one client, with attacks calibrated by another engine.

    Args:
        origin: the engine of the federation, whose run has begun. It has calibrated the attacks.
        run: the run of ``origin``, with the rank of this client.
        stage: the stage of the updates: shared for a client's, aggregate for their sum.
        destination: the loggers and the folder of this client's results.

    Attributes:
        spent: the client, and the defences whose spent privacy its last line of the log shows.
    """

    def __init__(self, origin: Engine, run: Run, stage: Stage, destination: Destination) -> None:
        # Results are in the order of the channels: the parts of an engine for one kind of attack.
        order = [type(channel) for channel in origin.channels]
        attacks = sorted(origin.selection.attacks, key=lambda a: order.index(family_of(a)))
        super().__init__(
            replace(origin.selection, attacks=tuple(attacks)),
            replace(origin.options, stages=(stage,)),
        )
        self.spent: tuple[str | int | None, Sequence[Defense]] = None, ()
        self.jsonl, self.record, self.listeners = origin.jsonl, origin.record, origin.listeners
        self.report = Report(
            run, destination, self.series, self.selection.attacks, self.jsonl, None
        )
        self.report.record = self.record
        lineup = origin.current.lineup  # the attacks that run, with the plan of each
        plans = {plan.attack.name: plan for plan in lineup.plans}
        channels = [c for c in self.channels if c.attacks and isinstance(c, StepChannel)]
        for channel in channels:
            channel.open(run)
            exclude(channel, {attack.name for attack in channel.attacks} - plans.keys())
            channel.plans = tuple(plans[attack.name] for attack in channel.attacks)
        channels = [channel for channel in channels if channel.attacks]
        self.fit = Fit(run, lineup, self.options, self.step_series, channels)
        self._origin = origin
        self.results.playing = {s for s in self.series if s.attack in lineup.playing}
        self.results.untested = lineup.untested
        self.results.begin()
        try:
            self._show(self.report, run)
        except Exception as error:  # a full disk must not end a round
            self.report.leave_boards(error)

    def read_update(
        self, look: Look, batches: Sequence[Any] | None, take: Callable[[], GradientSnapshot]
    ) -> dict[Series, Outcome]:
        """Attack the update of a client's round, and score the guesses.

        Args:
            look: the look: one run of the attacks, on the update of this round.
            batches: the batches of the local steps; None if they are unknown.
            take: a function that returns the update.

        Returns:
            The outcomes by series: the results of one attack at one stage. Without batches they are
            unknown, except certificates, which can be checked without the client's texts.
        """
        fit = self.current
        # What a control must reach follows from the thresholds of the federation's gates so far.
        fit.controls.needs = self._origin.results.needs(self._origin.gates)
        all_series = [series for series in fit.series if series.attack in fit.lineup.playing]
        # `followed`: the observer has adapted the attacks to the sent model already.
        look.followed, look.training_step = True, Step(look.step)
        if batches is None:  # membership games have no candidate texts
            look.scope = frozenset(s for s in all_series if not fit.series[s].plays_games)
        else:
            self._read_batches(look, batches)
        look.stages = look.wanted = self.options.stages
        look.training_step.gradients |= dict.fromkeys(look.stages, take)
        try:
            outcomes = self._round_outcomes(look, all_series, scored=batches is not None)
        finally:
            fit.each(*(partial(channel.disarm, look) for channel in fit.channels))
        failure = fit.take_failure()
        if failure is not None or outcomes is None:
            return {s: unknown(fit.series[s].metrics_of(s), failure or "") for s in all_series}
        return outcomes

    def _read_batches(self, look: Look, batches: Sequence[Any]) -> None:
        """Read the batches of a round's local steps, as the truth that guesses are scored against.

        If a batch cannot be read, the look has an error, and its results are unknown.
        """
        fit, step = self.current, look.training_step
        try:
            if not batches:
                raise BatchError("no batch of the round was reported")
            for batch in [b if isinstance(b, TokenBatch) else fit.tap.read(b) for b in batches]:
                if batch.crossing is None and batch.is_packed:
                    raise BatchError(NOT_TESTED.format("the round's training is not seen here"))
                fit.tap.check(step, batch)
                step.calls.append(ModelCall(batch=batch))
        except Exception as error:
            step.error = reason(error)
        if any(map(fit.controls.may_play, fit.lineup.exposed)):
            try:
                self._record_round(step, batches)
            except Exception as error:  # makes only the controls of the attacks unknown
                step.round = LocalRound({}, why_not=reason(error))

    def _record_round(self, step: Step, batches: Sequence[Any]) -> None:
        """Record what is needed to repeat a client's round from the sent model.

        Controls need this: the repeated round is attacked with known words in place of its texts.

        Args:
            step: the round as a step of the engine, with the batches that were read.
            batches: the batches of one client, with the learning rate of each step if it was
                reported; for a sum of updates, one batch for each step of each client.
        """
        run, summed = self.run, Stage.AGGREGATE in self.options.stages
        local = step.round = LocalRound.begin([*run.anatomy.root.parameters()])
        steps = self.options.local_steps or 1
        local.clients = max(1, len(batches) // steps) if summed else 1
        n_per_step, remainder = divmod(len(batches), local.clients * steps)
        if remainder or not n_per_step:
            local.why_not = "it is unknown on which of the batches each step was computed"
        rates = getattr(batches, "rates", ()) or [None] * (local.clients * steps)
        dtype = AUTOCAST.get(run.precision)
        for n_steps, rate in enumerate(rates, 1):
            local.add_step(run.optimizers[0], n_steps * n_per_step, rate)
        step.calls = [
            plain_call(run.anatomy, call.texts, dtype, trained_elsewhere=True)
            for call in step.calls
        ]

    @contained
    def _round_outcomes(
        self, look: Look, all_series: Sequence[Series], *, scored: bool
    ) -> dict[Series, Outcome]:
        """Attack the update of a round; return the outcomes by series, scored if that is asked."""
        fit, results = self.current, dict[Series, Result]()
        for channel in fit.channels_in(look):
            channel.arm()
        fit.attack(look)
        look.stepped.add(0)  # ids of optimizers; not empty means that an update was shared
        if not scored:
            return {series: self._without_truth(look, series) for series in all_series}
        with look.clock(fit.run.device):
            for channel in fit.channels:
                results |= results_of(channel, look)
        return fit.pool(results, look.step)[0] or {
            s: unknown(fit.series[s].metrics_of(s), _NO_LOSS) for s in all_series
        }

    def _without_truth(self, look: Look, series: Series) -> Outcome:
        """Return a series' outcome without the client's texts: no rate, but certificates."""
        channel, answer = self.current.series[series], look.answers.get(series)
        metrics = channel.metrics_of(series)
        if series.attack not in {plan.attack.name for plan in self.current.lineup.exposed}:
            outcome = unknown(metrics, "the parameters that the attack reads are not shared")
            return replace(outcome, exposed=False)
        if isinstance(answer, Unknown):
            return unknown(metrics, answer.why, applies=answer.applies)
        claims = {name: getattr(answer, name, None) for name in channel.extras}
        certificates = {name: float(value) for name, value in claims.items() if value is not None}
        return replace(unknown(metrics, _NOT_SCORED), extra=certificates)

    def state_of_looks(self) -> dict[str, Any]:
        """Return a copy of the state that a look changes: results, pooled games and controls."""
        states = [copy.deepcopy(channel.state_dict()) for channel in self.current.channels]
        controls = set(self.current.controls.controlled)
        return {"results": self.results.state_dict(), "channels": states, "controls": controls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_of_looks` returned."""
        self.results.load_state_dict(state["results"])
        for channel, saved in zip(self.current.channels, state["channels"], strict=True):
            channel.load_state_dict(saved)
        self.current.controls.controlled = set(state["controls"])

    @contained
    def rounds_end(self) -> None:
        """Log the privacy that defences spent in all rounds of this client, also without a look."""
        client, defenses = self.spent
        if self.report is not None:
            self.results.latest |= self.report.write_between_looks({}, defenses, client)


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
            failed before that, and once it was logged or discarded.
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
    before: dict[str, Any] = field(repr=False, compare=False)
    utility: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)

    def log(
        self, beside: Mapping[str, float] | None = None, defenses: Sequence[Defense] = ()
    ) -> None:
        """Log the look.

        Args:
            beside: further values to log, by log name.
            defenses: the defences whose spent privacy is logged, besides those of the observer.
        """
        self.before.clear()
        engine, values = self.engine, {**self.values, **(beside or {})}
        observed = engine.run.defenses
        spending = [*observed, *(d for d in defenses if d not in observed)]
        engine.spent = self.client, spending
        assert engine.report is not None
        results = self.look, self.outcomes, values, self.utility, spending
        engine.report.write(*results, engine.results.failures, self.client)

    def forget(self) -> None:
        """Discard this look, the client's newest one, unless it was logged: no rate counts it."""
        if self.before:
            self.engine.restore(self.before)
            self.before.clear()

    def __enter__(self) -> RoundLook:
        """Return this look. :meth:`forget` is called at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


def read_look(
    look: Look,
    engine: ClientEngine,
    outcomes: Mapping[Series, Outcome],
    client: str | int,
    before: dict[str, Any],
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
        is_shared = bool(engine.current.lineup.trained)
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
        _not_yet(outcomes, engine.step_series),
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
    before: dict[str, Any],
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
    outcomes: Mapping[Series, Outcome], channels: Mapping[Series, StepChannel]
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
