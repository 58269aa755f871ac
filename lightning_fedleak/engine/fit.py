"""One run of an engine: when it looks, and what it asks of the channels at a look."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.engine.channels.base import Channel, Plan
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.lineup import Lineup
from lightning_fedleak.engine.log import accounting
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.results import Exchange
from lightning_fedleak.engine.run import (
    AUTOCAST,
    Look,
    Moment,
    Outcome,
    Result,
    Run,
    Series,
    StepClock,
    Unknown,
    Waiting,
    contained,
    reason,
    unknown,
)
from lightning_fedleak.engine.truth import StepTruth
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.compression import AVERAGED
from lightning_fedleak.model.snapshots import (
    ON_THE_WAY,
    GradientSnapshot,
    Stage,
    UnusableObservation,
)
from lightning_fedleak.model.taps import (
    NOT_TESTED,
    GradientTap,
    LocalRound,
    UpdateError,
    UpdateTap,
    is_uneven,
    loss_terms,
    plain_call,
)

TURN = 2
"""Steps that the next attack's calibration waits for while others can read nothing yet.

Behind a warm-up from rate 0 the first words are read two steps after the first look. Larger: what
is calibrated next looks later, where nothing can be read for long.
"""

_UNKNOWN_HERE = (
    "whoever looks here does not hold the client's texts, so that what was read off the update "
    "cannot be scored"
)
_NO_LOSS = "the client's batches hold nothing that a loss was computed on"


class Fit:
    """Hold everything of an engine that lives only as long as one run.

    Args:
        run: the run; its strategy is set up, and its channels are open.
        lineup: the attacks that are played.
        options: how the run is watched.
        series: the channel of each series, in the order of the logs.
        channels: those that have attacks.

    Attributes:
        look: the one at work; None between looks.
        tried: an optimizer stepped, or skipped its step, in the batch at work.
        failure: why the look at work, or the next one, has no result; None where nothing failed.
        waiting: the series that are tried again in the next step; set by whoever keeps results.
        lineup: as above.
        controls: gives attacks the control of a look.
    """

    def __init__(
        self,
        run: Run,
        lineup: Lineup,
        options: Options,
        series: Mapping[Series, Channel],
        channels: Sequence[Channel],
    ) -> None:
        self.run = run
        self.lineup = lineup
        self._series = series
        self._channels = tuple(channels)
        self._stages = options.stages
        self._cadence = options.cadence
        self._local_steps = options.local_steps
        self.controls = Controls(run, series, options.games.held_out)
        self._truth = StepTruth(run, options.batch_adapter)
        self._remembering: list[Channel] = []
        self._batch: Any = None
        self._exchange = Exchange(run, series)
        self._removers: list[Callable[[], None]] = []
        self._keeps_local = False
        self._clock = StepClock()
        self.tried = self._midway = False
        self.look: Look | None = None
        self.failure: str | None = None
        self.waiting: frozenset[Series] = frozenset()
        self._waits: dict[Series, Waiting] = {}
        self._followed = True
        self._unpaid = 0.0
        self._turn: int | None = None
        self._processor_seconds = 0.0
        self._watched: set[int] = set()
        self._trained: tuple[str, ...] = ()
        self._tap = GradientTap({})
        self._update_tap: UpdateTap | None = None
        self._fresh = True

    def calibrate(self, restored: Mapping[str, object]) -> None:
        """Install the taps and calibrate the attacks, see :meth:`Lineup.calibrate`.

        Args:
            restored: of a checkpoint, by the attack's name.

        Raises:
            ValueError: an attack does not fit the model.
        """
        try:
            if self._local_steps is None:
                self._removers += self.run.watch_release(self._stage_reached, self._before_defense)
                per_rank = self.run.under_ddp and self.run.client == "rank"
                self._keeps_local = per_rank and not self.run.separates_stages
            self.follow()
        except Exception:
            self.close()
            raise
        self.lineup.calibrate(restored, self.follow)

    def follow(self) -> bool:
        """Follow what is trained now, and return whether something else is read than before."""
        self._trained = self.lineup.trained
        anatomy, changed = self.run.anatomy, self.lineup.follow()
        roles = dict.fromkeys(r for plan in self.lineup.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        watched = {id(p) for p in parameters.values()}
        if watched == self._watched and (not changed or self.look is not None):
            return changed  # what is recorded, and the copies of a look, stay
        self._watched = watched
        self._tap.close()
        self._tap = GradientTap(parameters, tied=anatomy.tied)
        if self._keeps_local:
            self._tap.keep_local()
        if self._local_steps is not None:
            self._update_tap = UpdateTap(parameters, tied=anatomy.tied)
        return True

    @property
    def processor_seconds(self) -> float:
        """Processor time of the looks so far, the one at work included, of all threads."""
        return self._processor_seconds + (self.look.processor_seconds if self.look else 0.0)

    def close(self) -> None:
        """Removes every tap but those of the channels, which their monitor closes."""
        removers, self._removers = self._removers, []
        self._each(*removers, self._tap.close, self._truth.close)
        self.look = None

    def fail(self, error: Exception) -> None:
        """Let the look at work, or the next one, have no result, because of an error of ours."""
        self.failure = self.failure or reason(error)

    def _each(self, *functions: Callable[[], object]) -> None:
        """Call all of the functions, whatever one of them raises."""
        for function in functions:
            try:
                function()
            except Exception as error:
                self.fail(error)

    # ---- a step -----------------------------------------------------------------------------

    def batch_starts(self, step: int, batch: Any) -> None:
        """Starts a look where one is due, and takes the truth before any defence does.

        Shortly before a look a batch that is not looked at is read too, where a channel wants
        it: as text that the batch of the look will not hold.
        """
        self._truth.check_first(batch)
        try:
            self._step_starts(step)
        except Exception as error:
            self.fail(error)
            if self.look is None and not self._midway and self._cadence.due(step):
                self.look = Look(step)
        self._remembering = [
            channel
            for channel in (self._channels if self.look is None else ())
            if channel.wants_batch(self._cadence.next_step - step)
        ]
        self._batch = batch if self._remembering else None
        if self._remembering:
            self._truth.arm()
        if self.look is not None:
            self._truth.batch_begins(self.look, batch)

    def _step_starts(self, step: int) -> None:
        """Times the steps without a look, and starts a look where one is due.

        Never between two batches whose gradients add up: the truth would be half of it.
        """
        if self.look is not None or not self._series:
            return
        self._clock.starts(step)
        if self._midway:
            return
        self._take_turn(step)
        queued = [series for series in self._series if series.attack in self.lineup.queue]
        scope: frozenset[Series] | None = None
        if not self._cadence.due(step):
            exposed = {plan.attack.name for plan in self.lineup.exposed}
            scope = frozenset(s for s in self.waiting.difference(queued) if s.attack in exposed)
            if not scope:
                return
        self.look = look = Look(step, scope=scope)
        with look.clock(self.run.device):
            look.answers |= dict.fromkeys(queued, Waiting("its calibration waits for its turn"))
            if scope is None:
                self.follow()
            else:
                others = self._series.keys() - scope
                look.answers |= dict.fromkeys(others, Waiting("not asked in this step"))
            self._followed = False
            if scope is None or self._local_steps is not None:
                self._refresh(look)
            self._tap.arm()
            self._truth.arm()
            if self._update_tap is not None:
                self._update_tap.begin()
                if self.controls.may_play(self.lineup.exposed):
                    look.local = LocalRound.begin([*self.run.anatomy.root.parameters()])
                    if self.run.processes > 1:
                        look.local.why_not = "rounds of several processes are not made again"
            for channel in self._channels_in(look):
                channel.arm()

    def _take_turn(self, step: int) -> None:
        """Lets the next attack be calibrated, once the others have a result, or after some steps.

        All processes find the same.
        """
        queue = self.lineup.queue
        waiting = {series.attack for series in self.waiting}
        if queue and queue[0] in waiting:
            self._turn = step + TURN if self._turn is None else self._turn
            if waiting <= set(queue) or step >= self._turn:
                self._turn = None
                rank_zero_info(f"{self.run.watcher}: '{queue.pop(0)}' is calibrated now")

    def _channels_in(self, look: Look) -> list[Channel]:
        """The channels that a look is of."""
        scope = self._series if look.scope is None else look.scope
        return [c for c in self._channels if any(self._series[s] is c for s in scope)]

    def _refresh(self, look: Look) -> None:
        """Lets the attacks that a look is of follow the model, once in a look."""
        if self._followed:
            return
        self._followed = True
        scope = self._series if look.scope is None else look.scope
        look.seconds += self.lineup.calibrating_seconds  # which are no look's
        failed = self.lineup.refresh(look.step, {series.attack for series in scope})
        look.seconds -= self.lineup.calibrating_seconds
        for series in scope:
            if series.attack in failed:
                look.answers[series] = Unknown(failed[series.attack])

    def _still_waits(self, moment: Moment) -> bool:
        """Whether the gradients are zero still that a try waits for; the same on all processes."""
        look = moment.look
        if look.scope is None or self._local_steps is not None:
            return False
        zeros = [self._waits[s].zeros if s in self._waits else () for s in look.scope]
        still = all(zeros)
        if still and moment.wanted:
            view, roles = moment.gradients(), {role for each in zeros for role in each}
            still = isinstance(view, GradientSnapshot) and all(
                role in view.tensors and not bool(view.tensors[role].any()) for role in roles
            )
        still = self.run.on_all_processes(still)
        for series in look.scope if still else ():
            if series.stage in moment.wanted:
                look.answers.setdefault(series, self._waits[series])
        return still

    def _gathered(self, plan: Plan) -> bool:
        """Whether an optimizer holds what earlier steps left of the parameters an attack reads."""
        if plan.optimizer is None:
            return False
        parameters = (self.run.anatomy.parameter(role) for role in plan.roles)
        return any(p is not None and bool(plan.optimizer.state.get(p)) for p in parameters)

    def before_backward(self, loss: Tensor) -> None:
        """A loss of the step is known, with its graph."""
        if self.look is not None:
            with self.look.clock(self.run.device):
                self.look.loss_terms |= loss_terms(loss)

    def _loss_terms(self, look: Look) -> frozenset[str]:
        """Roles of the parameters that a loss of the look's steps has a term of."""
        roles = {role for plan in self.lineup.exposed for role in plan.roles}
        return frozenset(r for r in roles if id(self.run.anatomy.parameter(r)) in look.loss_terms)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, or to skip its step."""
        if not self._owns(optimizer):
            return
        self.tried = True
        if self.look is not None and self._local_steps is not None:
            if not self.look.learning_rates:
                # Not when the batch starts: another callback may clear the state then.
                self._fresh = not any(self._gathered(plan) for plan in self.lineup.exposed)
            groups = [g for g in optimizer.param_groups if self._watched & {*map(id, g["params"])}]
            self.look.learning_rates.append({float(g["lr"]) for g in groups})
            if self.look.local is not None:
                self._truth.settle(self.look)
                n_calls = len(self.look.calls) + len(self.look.current)
                self.look.local.add_step(optimizer, n_calls)

    def _owns(self, optimizer: Optimizer) -> bool:
        owners = [p.optimizer for p in self.lineup.exposed if p.optimizer is not None]
        return not owners or any(o is optimizer for o in owners)

    @contained
    def _stage_reached(self, stage: Stage, optimizer: Optimizer) -> None:
        """``p.grad`` is what there is at a stage; at the last one the optimizer is about to step.

        Without defences that act in between, the last stage is the only one that is reported.
        """
        if self.look is not None and stage is Stage.LOCAL:
            self.look.noise_std, self.look.compression = 0.0, ""
        if self.run.separates_stages:
            self._ask((stage,), optimizer)
        elif stage is Stage.AGGREGATE and self._keeps_local:
            self._ask((Stage.LOCAL, Stage.SHARED), optimizer, kept=True)
            self._ask((Stage.AGGREGATE,), optimizer)
        elif stage is Stage.AGGREGATE:
            self._ask(ON_THE_WAY, optimizer)

    @contained
    def _before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        if self.look is not None:
            try:
                std = defense.noise_std(context)
                all_of_it = isinstance(defense, OptimizerDP)  # whatever was there before it
                self.look.noise_std = std if all_of_it else math.hypot(self.look.noise_std, std)
            except Exception:
                self.look.noise_std = math.nan
        for channel in self._channels:
            channel.before_defense(defense, parameters, context)
        if (look := self.look) is not None and defense.compression:
            if defense.defers:  # all that it gets leaves in time
                groups = ((o, g) for o in self.run.optimizers for g in o.param_groups)
                owner = next(o for o, g in groups if parameters[0] in {*g["params"]})
                alone = self.run.client == "world" or self.run.processes == 1
                self._ask((Stage.SHARED, Stage.AGGREGATE)[: 1 + alone], owner)
            look.compression = AVERAGED if defense.defers else defense.compression.method

    def _ask(self, stages: tuple[Stage, ...], optimizer: Optimizer, *, kept: bool = False) -> None:
        """Shows a gradient that is the same at all of ``stages`` to every channel, once."""
        if not self._owns(optimizer):
            return
        self.tried = True
        look = self.look
        if look is None or id(optimizer) in look.stepped:
            return
        if look.step_seconds == 0:
            look.step_seconds = look.elapsed()
        scale = self.run.loss_scale
        alone = self.run.client == "world" or Stage.SHARED in stages
        clients = 1 if alone else self.run.processes  # whose noise is independent, and averaged
        wanted = tuple(s for s in stages if s in self._stages)

        def take() -> GradientSnapshot:
            if (why := self.run.why_hidden(wanted, optimizer)) is not None:
                raise UnusableObservation(why)
            view = self._tap.view(
                look.step,
                wanted[0],
                copies=kept,
                client=self.run.number,
                scale=scale if kept else 1.0,
            )
            return replace(
                view,
                noise_std=0.0 if Stage.LOCAL in stages else look.noise_std / clients**0.5,
                compression=AVERAGED if look.compression and clients > 1 else look.compression,
                input_noise=look.input_noise,
                loss_terms=self._loss_terms(look),
            )

        self._show(Moment(look, stages, wanted, optimizer, scale, take))
        if Stage.AGGREGATE in stages:
            look.stepped.add(id(optimizer))

    @contained
    def _show(self, moment: Moment) -> None:
        look = moment.look
        self._truth.settle(look)
        with look.clock(self.run.device):
            if moment.optimizer is not None and self._trained != self.lineup.trained:
                self._followed &= not self.follow()  # the step itself switched an adapter, say
            if self._still_waits(moment):
                return
            self._refresh(look)
            self._admit_held(look)
            for channel in self._channels_in(look):
                try:
                    channel.at_moment(moment)
                except Exception as error:
                    own = [series for series, owner in self._series.items() if owner is channel]
                    look.answers |= dict.fromkeys(own, Unknown(reason(error)))
            controlled = self._local_steps is None and Stage.AGGREGATE in moment.stages
            if controlled or look.local is not None:
                asked = {series.attack for series in look.scope or self._series}
                plans = [p for p in self.lineup.exposed if p.attack.name in asked]
                self.controls.play(moment, plans)

    def _admit_held(self, look: Look) -> None:
        """Let attacks that are held choose themselves where labels weigh unevenly in the loss.

        Under DP none does, since the moment would depend on the data.
        """
        held = self.lineup.held
        if not held or look.scope is not None or accounting(self.run.defenses):
            return
        reads = [read for read in (*look.calls, *look.current) if read.placed is not None]
        if self.run.on_any_process(bool(reads) and is_uneven(reads)):
            self.lineup.held = set()
            self.follow()
            self.lineup.refresh(look.step, held)

    @contained
    def _show_update(self, look: Look, local_steps: int, tap: UpdateTap) -> None:
        look.step_seconds = look.elapsed() / local_steps

        def take() -> GradientSnapshot:
            if any(len(rates) != 1 for rates in look.learning_rates):
                raise UpdateError("what the attacks read is trained at different learning rates")
            rate = sum(next(iter(rates)) for rates in look.learning_rates) / local_steps
            update = tap.end(look.step, Stage.SHARED, learning_rate=rate, local_steps=local_steps)
            compressed = any(defense.compression for defense in self.run.defenses)
            return replace(
                update,
                fresh=self._fresh,
                compression=AVERAGED if compressed else "",
                input_noise=look.input_noise,
                loss_terms=self._loss_terms(look),
            )

        self._show(Moment(look, (Stage.SHARED,), (Stage.SHARED,), None, 1.0, take))
        look.stepped.add(0)

    # ---- results ----------------------------------------------------------------------------

    def step_ends(self, trained: bool) -> tuple[Look, dict[Series, Outcome] | None] | None:
        """Ends the look once its optimizer step is over.

        Args:
            trained: the batch gave a gradient (false: ``training_step`` returned None).

        Returns:
            None while there is no finished look; the look and its outcomes, or None in their
            place where nothing was shared.
        """
        tried, self.tried = self.tried, False
        self._midway = (self._midway or trained) and not tried
        look = self.look
        if look is None:
            self._remember()
            return None
        self._take_batch(look, trained)
        if not tried:
            return None
        self._truth.check_unread(look)
        if self._update_tap is not None and self._local_steps is not None:
            failed = self.failure is not None and self.run.processes == 1
            if len(look.learning_rates) < self._local_steps and not failed:
                return None
            self._show_update(look, self._local_steps, self._update_tap)
        try:
            return look, self._finish(look)
        finally:
            self.drop_look()

    @contained
    def _take_batch(self, look: Look, trained: bool) -> None:
        """Add the batch that has ended to what the look is scored against."""
        held = self._truth.batch_ends(look, trained=trained)
        for channel in self._channels_in(look):
            channel.batch_ends(held)

    def drop_look(self) -> None:
        """Forget a look that failed, with its hooks in the user's forward."""
        self.look = None
        self._each(self._truth.disarm)

    def _let_go(self, look: Look) -> None:
        """End a look: the taps rest until the next one."""
        self.look = None
        self._processor_seconds += look.processor_seconds
        disarm = (partial(channel.disarm, look) for channel in self._channels)
        self._each(self._clock.interrupted, self._tap.disarm, self._truth.disarm, *disarm)

    def _remember(self) -> None:
        """Let channels keep the texts of a batch that is not looked at."""
        if not self._remembering:
            return
        with suppress(Exception):
            for batch in self._truth.seen(self._batch):
                for channel in self._remembering:
                    channel.remember(batch)
        self._truth.disarm()
        self._remembering, self._batch = [], None

    def _finish(self, look: Look) -> dict[Series, Outcome] | None:
        """Score every attack that the look is of, pool over processes, and fix the next look."""
        scope = self._series.keys() if look.scope is None else look.scope
        results = self._results(look, scope) or {}
        self._let_go(look)
        nothing = all(isinstance(result, Waiting) for result in results.values())
        next_step = self._next_step(look, nothing=nothing) or look.step + 1
        self._cadence.next_step = next_step
        if self.failure is not None:
            results = dict.fromkeys(scope, Unknown(self.failure))
        outcomes, self._cadence.next_step = self._pool(results, next_step)
        return outcomes

    @contained
    def _results(self, look: Look, scope: Collection[Series]) -> dict[Series, Result]:
        """Return this process's result of every series that the look is of."""
        results: dict[Series, Result] = {}
        still = {s: w for s, w in self._waits.items() if s in scope and look.answers.get(s) is w}
        with look.clock(self.run.device):
            for channel in self._channels_in(look) if still.keys() != scope else ():
                results |= channel.results(look)
        results = {s: r for s, r in results.items() if s in scope} | still
        self._waits |= {s: r for s, r in results.items() if isinstance(r, Waiting)}
        return results

    def _pool(
        self, results: Mapping[Series, Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the outcomes over all processes, and the first one's next step to look at."""
        exposed = {plan.attack.name: plan.exposed for plan in self.lineup.plans}
        ordered = {series: results[series] for series in self._series if series in results}
        shared = {series: exposed[series.attack] for series in ordered}
        return self._exchange.outcomes(ordered, shared, next_step)

    @contained
    def _next_step(self, look: Look, *, nothing: bool) -> int:
        step_seconds = self._clock.seconds or look.step_seconds
        self._unpaid += look.seconds
        if look.scope is not None and nothing:
            return self._cadence.next_step
        cost, self._unpaid = self._unpaid, 0.0
        if look.scope is None:
            proposed = self._cadence.after_look(look.step, cost, step_seconds)
            return max(proposed, look.step + (self._local_steps or 1))
        return self._cadence.after_try(cost, step_seconds)

    # ---- a round ----------------------------------------------------------------------------

    def read_update(
        self, look: Look, batches: Sequence[Any] | None, take: Callable[[], GradientSnapshot]
    ) -> dict[Series, Outcome]:
        """Let the attacks read the update of a round, and score what they guess.

        Args:
            look: the look.
            batches: what the update was made of; None where whoever looks does not hold it.
            take: returns the update.

        Returns:
            The outcomes: where the truth is not known, unknown but for the attacks' certificates.
        """
        played = [series for series in self._series if series.attack in self.lineup.playing]
        if batches is None:  # of which texts should a game ask?
            look.scope = frozenset(s for s in played if not self._series[s].plays_games)
        else:
            self._read_truth(look, batches)
        self._arm(look)
        self._show(Moment(look, self._stages, self._stages, None, 1.0, take))
        look.stepped.add(0)
        outcomes = self._round_outcomes(look, played, scored=batches is not None)
        self._each(*(partial(channel.disarm, look) for channel in self._channels))
        failure, self.failure = self.failure, None
        if failure is not None or outcomes is None:
            return {s: unknown(self._series[s].metrics, failure or "") for s in played}
        return outcomes

    @contained
    def _arm(self, look: Look) -> None:
        for channel in self._channels_in(look):
            channel.arm()

    @contained
    def _round_outcomes(
        self, look: Look, played: Sequence[Series], *, scored: bool
    ) -> dict[Series, Outcome]:
        if not scored:
            return {series: self._without_truth(look, series) for series in played}
        results: dict[Series, Result] = {}
        with look.clock(self.run.device):
            for channel in self._channels:
                results |= channel.results(look)
        return self._pool(results, look.step)[0] or {
            series: unknown(self._series[series].metrics, _NO_LOSS) for series in played
        }

    def _read_truth(self, look: Look, batches: Sequence[Any]) -> None:
        try:
            if not batches:
                raise BatchError("no batch of the round was handed over")
            for batch in [b if isinstance(b, TokenBatch) else self._truth.read(b) for b in batches]:
                if batch.crossing is None and batch.is_packed:
                    raise BatchError(NOT_TESTED.format("the round's training is not seen here"))
                self._truth.check(batch, look)
        except Exception as error:
            look.truth_error = reason(error)
        if self.controls.may_play(self.lineup.exposed):
            try:
                self._keep_round(look, batches)
            except Exception as error:  # the numbers are known, and their control is not
                look.local = LocalRound({}, why_not=reason(error))

    def _keep_round(self, look: Look, batches: Sequence[Any]) -> None:
        """Keep what a client's round is made again from; the model is the one that it got.

        Args:
            look: with the batches as they were read.
            batches: of one client, with the rate of each step where that is known; or one of each
                step of each client, whose updates were summed.
        """
        run, summed = self.run, Stage.AGGREGATE in self._stages
        local = look.local = LocalRound.begin([*run.anatomy.root.parameters()], copy=False)
        steps = self._local_steps or 1
        local.clients = max(1, len(batches) // steps) if summed else 1
        in_step, rest = divmod(len(batches), local.clients * steps)
        if rest or not in_step:
            local.why_not = "which of its batches each step was computed on is not known"
        rates = getattr(batches, "rates", ()) or [None] * (local.clients * steps)
        dtype = AUTOCAST.get(run.precision)
        for number, rate in enumerate(rates, 1):
            local.add_step(run.optimizers[0], number * in_step, rate)
        look.calls = [
            plain_call(run.anatomy, batch, dtype, trained_elsewhere=True) for batch in look.batches
        ]

    def _without_truth(self, look: Look, series: Series) -> Outcome:
        """Return why a guess has no rate without the truth, and the certificates that it has."""
        channel, answer = self._series[series], look.answers.get(series)
        if series.attack not in {plan.attack.name for plan in self.lineup.exposed}:
            outcome = unknown(channel.metrics, "what it reads is not shared")
            return replace(outcome, exposed=False)
        if isinstance(answer, Unknown):
            return unknown(channel.metrics, answer.why, applies=answer.applies)
        certificates = channel.without_truth(answer)
        return replace(unknown(channel.metrics, _UNKNOWN_HERE), extra=certificates)
