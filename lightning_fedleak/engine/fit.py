"""The steps of one run: capture a step, let the attacks guess, and score the guesses.

::

    step -> attacks -> score

The sections of :class:`Fit` follow this order. A *tap* is a hook that records the model calls or
gradients of the user's own training step. A *look* is a measurement at one optimizer step. The
gradient passes *stages*: ``local`` before the client's defences, ``shared`` as it is sent,
``aggregate`` after the reduction over clients. A *series* is the results of one attack at one
stage. A *channel* runs and scores the attacks of one family. An attack's *plan* says which
parameters' gradients it reads. A *control* is the same step on known words, which shows whether an
attack with a low number works at all.
:mod:`~lightning_fedleak.engine.scheduler` decides when a look is due, and
:mod:`~lightning_fedleak.engine.lifecycle` begins and ends the run and records the results.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.attacks.public_text import share_work
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.defenses.base import copied
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.defenses.processes import reshard
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.channels.exchange import Exchange
from lightning_fedleak.engine.channels.steps import StepChannel, results_of
from lightning_fedleak.engine.lineup import Lineup
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown, Waiting, pending
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import (
    AUTOCAST,
    Look,
    Refusal,
    Run,
    contained,
    is_of_signal,
    reason,
)
from lightning_fedleak.engine.scheduler import Phase, Scheduler
from lightning_fedleak.model import snapshots
from lightning_fedleak.model.batches import BatchError, adapter_to_copy
from lightning_fedleak.model.model_state import saved_once
from lightning_fedleak.model.snapshots import Stage, is_shard
from lightning_fedleak.model.taps import Step, StepTap


class Fit:
    """Look at the steps of one run. An internal error makes results unknown and ends no training.

    Methods with the decorator :func:`~lightning_fedleak.engine.run.contained` catch such errors.

    Args:
        run: The run. Its strategy is set up, and the channels are open on it.
        lineup: The attacks of the run.
        options: The settings by which the run is watched.
        series: The channel of each series, in the order of the logs.
        channels: The channels that have attacks.

    Attributes:
        run, lineup, series, channels: The arguments.
        scheduler: Decides which steps are looked at.
        controls: Gives attacks the control of a look.
        tap: Records the step of each look.
        exchange: Pools the results of all processes.
        accounting: The defences with an account of their releases (DP).
        look: The current look; None between looks.
        failure: Why the current look, or else the next one, is unknown; None if nothing failed.
    """

    def __init__(
        self,
        run: Run,
        lineup: Lineup,
        options: Options,
        series: Mapping[Series, StepChannel],
        channels: Sequence[StepChannel],
    ) -> None:
        self.run = run
        self.lineup = lineup
        self.series = series
        self.channels = tuple(channels)
        self.scheduler = Scheduler(run, options.cadence, series)
        self.controls = Controls(run, series)
        why_not = "the defence '{}' replaces tokens on their way to the model"
        replacing = (why_not.format(d.name) for d in run.defenses if d.acts_on_batches)
        self.tap = StepTap(
            run.anatomy,
            run.forward_context,
            temperature=run.temperature,
            adapter=options.batch_adapter,
            autocast=AUTOCAST.get(run.precision),
            why_not=next(replacing, None),
            say=run.say,
            reason=reason,
        )
        self.exchange = Exchange(run, series)
        self.accounting = accounting(run.defenses)
        self.look: Look | None = None
        self.failure: str | None = None
        # Whether the first batch, and the end of the first look, are still to come.
        self._is_before_batch = self._is_before_look = True
        self._options = options
        self._batch_error: Exception | None = None  # why the first batch cannot be read
        self._removers: list[Callable[[], None]] = []
        self._tapped: set[int] = set()  # the ids of the parameters whose gradients are recorded
        self._planned_for: tuple[object, ...] = ()  # what the plans were made for, see _trained
        # Whether the tap copies local gradients, because DDP reduces them in backward.
        per_rank = run.under_ddp and run.client == "rank" and not run.separates_stages
        self._keeps_local = run.unit == "step" and per_rank

    # ---- the begin and the end of the run, and failures -------------------------------------

    def calibrate(self, restored: Mapping[str, object]) -> None:
        """Install the taps and calibrate the attacks, see :meth:`Lineup.calibrate`.

        Args:
            restored: The calibrations in a checkpoint, by the attack's name.

        Raises:
            ValueError: An attack does not fit the model.
        """
        if self.run.unit == "step":
            self._removers += self.run.watch_release(self._stage_reached, self._before_defense)
        self.follow()
        self.lineup.calibrate(restored, self.follow)

    def close(self) -> None:
        """Remove all taps except those of the channels, which the engine removes."""
        removers, self._removers = self._removers, []
        self.each(*removers, self.tap.close)
        self.look = None

    def fail(self, error: Exception) -> None:
        """Make the current look, or else the next one, unknown because of an internal error.

        Raises:
            Exception: The error itself, after the look has ended, if a signal's handler raised it.
        """
        if is_of_signal(error):
            self.end_look()
        self.keep_failure(reason(error))  # `reason` raises the error of a signal's handler

    def keep_failure(self, why: str | None) -> None:
        """Make the current look, or else the next one, unknown for a reason, if it has none yet."""
        self.failure = self.failure or why

    def take_failure(self) -> str | None:
        """Return why the current look, or else the next one, is unknown, and forget it."""
        why, self.failure = self.failure, None
        return why

    def each(self, *functions: Callable[[], object]) -> None:
        """Call all of the functions, also if one of them raises an error."""
        for function in functions:
            try:
                function()
            except Exception as error:
                self.fail(error)

    # ---- a step -----------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> bool:
        """Start a look if one is due, and read the batch before any defence acts.

        Returns:
            Whether a look has started.

        Raises:
            Refusal: The first batch cannot be read; an adapter's own error is raised as it is.
        """
        if self._is_before_batch:
            self._check_first_batch(batch)
        begins = self.look is None and self._begin_look(self.run.step)
        if self.look is not None:
            self.tap.batch_begins(self.look.training_step, batch)
        return begins

    def optimizer_steps(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer steps, so gradients no longer accumulate.

        Returns:
            Whether it steps any of the parameters that the attacks read; else nothing is noted.
        """
        owners = [p.optimizer for p in self.lineup.exposed if p.optimizer is not None]
        is_read = not owners or any(o is optimizer for o in owners)
        if is_read:
            self.scheduler.optimizer_steps()
        return is_read

    def _check_first_batch(self, batch: Any) -> None:
        """Refuse the first batch if it cannot be read, on all processes at once.

        A batch whose tokens may be found in the step's graph is refused later, if at all, by
        :meth:`batch_ends`.

        Raises:
            Refusal: The first batch cannot be read; its error shows an adapter to copy.
        """
        self._is_before_batch, adapter = False, self._options.batch_adapter
        try:
            self.tap.read(batch)
        except Exception as error:
            self._batch_error = error
            if adapter is None and batch is not None:
                code = adapter_to_copy(batch, self.run.anatomy.kind, self.run.watcher)
                self._batch_error = BatchError(f"{error}\n{code}")
        needs_batch = self.tap.why_not is not None or batch is None or adapter is not None
        self._refuse_anywhere(needed=needs_batch)

    def _refuse_anywhere(self, *, needed: bool) -> None:
        """End the run if any process needs its first batch and could not read it."""
        if self.run.on_any_process(needed and self._batch_error is not None):
            other = BatchError("another process could not read its first batch")
            raise Refusal(self._batch_error or other)

    def _begin_look(self, step: int) -> bool:
        """Start a look if one is due, and return whether one started."""
        try:
            exposed = {plan.attack.name for plan in self.lineup.exposed}
            self.look = self.scheduler.due_look(step, exposed)
            if self.look is not None:
                self._prepare(self.look)
        except Exception as error:
            self.fail(error)
            is_clear = self.look is None and self.scheduler.phase is not Phase.ACCUMULATING
            if is_clear and self.scheduler.cadence.due(step):
                self.look = Look(step)
        return self.look is not None

    def _prepare(self, look: Look) -> None:
        """Arm the taps, and adapt the attacks to the model."""
        self.run.spent.clear()  # may hold the seconds of a look that was not written
        self.run.longest.clear()
        with look.clock(self.run.device):
            if look.scope is None:
                if self.lineup.is_sharded:  # FSDP2 leaves layers unsharded after an evaluation
                    reshard(self.run.anatomy.root)
                with snapshots.shaped(self.run.anatomy.root.parameters()):
                    self._follow_changes()
                    self._refresh(look)
            look.training_step = self.tap.begin(look.step)
            for channel in self.channels_in(look):
                channel.arm()

    def channels_in(self, look: Look) -> list[StepChannel]:
        """Return the channels whose attacks take part in a look."""
        if look.scope is None:
            return [*self.channels]
        return [c for c in self.channels if any(self.series[s] is c for s in look.scope)]

    def _trained(self) -> tuple[object, ...]:
        """Return what plans depend on, to compare: trained parameters and their optimizers."""
        groups = ((o, p) for o in self.run.optimizers for g in o.param_groups for p in g["params"])
        owners = tuple((id(optimizer), id(p)) for optimizer, p in groups)
        adapter = str(getattr(self.run.anatomy.model, "active_adapter", None))
        trained = (id(p) for p in self.run.anatomy.root.parameters() if p.requires_grad)
        return owners, adapter, *trained

    def _follow_changes(self) -> bool:
        """Plan again if other parameters are trained now; return whether other ones are read."""
        return self._planned_for != self._trained() and self.follow()

    def follow(self) -> bool:
        """Plan the attacks again, and return whether other parameters are read than before."""
        self._planned_for = self._trained()
        anatomy = self.run.anatomy
        with snapshots.shaped(anatomy.root.parameters()):
            changed = self.lineup.follow()
        roles = dict.fromkeys(r for plan in self.lineup.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        tapped = {id(p) for p in parameters.values()}
        if tapped == self._tapped and (not changed or self.look is not None):
            return changed  # keep the taps, and the gradient copies of the current look
        self._tapped = tapped
        self.tap.read_gradients(parameters, self.run.gradient_of, keeps_local=self._keeps_local)
        return True

    def _refresh(self, look: Look) -> None:
        """Adapt the attacks of a look to the present weights of the model, once in a look."""
        if look.followed:
            return
        look.followed = True
        scope = self.series if look.scope is None else look.scope
        look.seconds += self.lineup.calibrating_seconds  # calibrations do not count as looking
        failed = self.lineup.refresh(look.step, {series.attack for series in scope})
        look.seconds -= self.lineup.calibrating_seconds
        for series in scope:
            if series.attack in failed:
                look.answers[series] = Unknown(failed[series.attack])

    # ---- the gradient on its way ------------------------------------------------------------

    @contained
    def _stage_reached(self, stage: Stage, optimizer: Optimizer) -> None:
        """Attack ``p.grad`` at a stage. At the last stage the optimizer is about to step.

        Without defences the gradient is the same at all stages, and only the last one is reported.
        """
        if self.look is not None and stage is Stage.LOCAL:
            step = self.look.training_step
            step.noise_std, step.compression = 0.0, ""
            step.sizes.clear()
            step.acted.clear()
        if self.run.separates_stages:
            self._capture((stage,), optimizer)
        elif stage is Stage.AGGREGATE and self._keeps_local:
            self._capture((Stage.LOCAL, Stage.SHARED), optimizer, from_copies=True)
            self._capture((Stage.AGGREGATE,), optimizer)
        elif stage is Stage.AGGREGATE:
            self._capture(snapshots.ON_THE_WAY, optimizer)

    @contained
    def _before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Note the noise and compression of a defence that acts next, and tell the channels."""
        if self.look is not None:
            _note_defense(self.look.training_step, defense, parameters, context)
        for channel in self.channels:
            channel.before_defense(defense, parameters, context)
        if self.look is not None and defense.compression:
            if defense.defers:  # it shares the rest of this gradient in later steps: read it now
                groups = ((o, g) for o in self.run.optimizers for g in o.param_groups)
                owner = next(o for o, g in groups if parameters[0] in {*g["params"]})
                is_only = self.run.client == "world" or self.run.processes == 1
                # The stages that see the same gradient as stage shared.
                self._capture((Stage.SHARED, Stage.AGGREGATE)[: 1 + is_only], owner)
            method = snapshots.AVERAGED if defense.defers else defense.compression.method
            self.look.training_step.compression = method

    @contained
    def _capture(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, from_copies: bool = False
    ) -> None:
        """Let the attacks read the present gradient, once for all ``stages`` at which it is equal.

        Nothing happens without a look, or if the attacks do not read this optimizer's parameters,
        or if this optimizer has already stepped in the look.

        Args:
            stages: The stages at which the gradient is the same as now.
            optimizer: The optimizer that is about to step.
            from_copies: Whether to take the copies from before DDP's reduction, not ``p.grad``.
        """
        is_read, look = self.optimizer_steps(optimizer), self.look
        if not is_read or look is None or id(optimizer) in look.stepped:
            return
        if look.step_seconds == 0:
            look.step_seconds = max(0.0, look.stopwatch.seconds - look.seconds)
        run, step = self.run, look.training_step
        scale = run.loss_scale if from_copies else 1.0
        one_client = run.client == "world" or Stage.SHARED in stages
        clients = 1 if one_client else run.processes  # their independent noise is averaged
        look.stages, look.optimizer = stages, optimizer
        look.wanted = tuple(stage for stage in stages if stage in self._options.stages)
        if Stage.LOCAL in stages and Stage.AGGREGATE not in stages:  # a defence or DDP changes it
            controlled = any(map(self.controls.may_play, self.lineup.exposed))
            if not controlled or run.why_hidden((Stage.LOCAL,), optimizer) is not None:
                step.undefended = None
            else:
                step.undefended = self.tap.local_copy(look.step, from_copies=from_copies)

        def take() -> snapshots.GradientSnapshot:
            if (why := run.why_hidden(look.wanted, optimizer)) is not None:
                raise snapshots.UnusableObservation(why)
            view = self.tap.gradients.view(
                look.step, look.wanted[0], copies=from_copies, client=run.number, scale=scale
            )
            is_mean = bool(step.compression) and clients > 1
            return replace(
                view,
                noise_std=0.0 if Stage.LOCAL in stages else step.noise_std / clients**0.5,
                compression=snapshots.AVERAGED if is_mean else step.compression,
                rounding=run.rounding(len(step.calls)),
            )

        try:
            step.gradients |= dict.fromkeys(stages, take)
            self.attack(look)
        finally:
            if Stage.AGGREGATE in stages:
                look.stepped.add(id(optimizer))
                look.work.clear()

    # ---- attacks ----------------------------------------------------------------------------

    def attack(self, look: Look) -> None:
        """Let every attack guess from the present gradient, and from a control if one is due."""
        step = look.training_step
        with look.clock(self.run.device), share_work(look.work):
            if look.optimizer is not None:
                self.tap.settle(step)
                look.followed &= not self._follow_changes()
            if self.scheduler.still_waits(look):
                return
            self._refresh(look)
            is_last = self._options.local_steps is None and Stage.AGGREGATE in look.stages
            with saved_once(not self.lineup.is_sharded):
                for channel in self.channels_in(look):
                    try:
                        channel.at_stages(look)
                    except Exception as error:
                        failed = [s for s, owner in self.series.items() if owner is channel]
                        look.answers |= dict.fromkeys(failed, Unknown(reason(error)))
                if is_last or step.round is not None:
                    with look.clock(self.run.device, is_control=True):
                        self.controls.play(look, self.lineup.exposed)

    # ---- score ------------------------------------------------------------------------------

    def batch_ends(self, *, trained: bool) -> tuple[Look, dict[Series, Outcome] | None] | None:
        """End a batch, and score the look that ends with it.

        Args:
            trained: Whether a gradient was computed for the batch.

        Returns:
            The look and its outcomes, which are None if nothing was shared; None without a look.

        Raises:
            Refusal: At the first look, the batch was not in the step's graph either.
        """
        stepped, look = self.scheduler.batch_ends(trained), self.look
        if look is None:
            return None
        self._take_batch(look, trained)
        if not stepped:
            return None
        if self._is_before_look:
            self._is_before_look = False
            self._refuse_anywhere(needed=look.training_step.error is not None)
        return look, self._score(look)

    @contained
    def _take_batch(self, look: Look, trained: bool) -> None:
        """Add the batch that has ended to the truth that the look is scored against."""
        with look.clock(self.run.device):
            batch = self.tap.batch_ends(look.training_step, trained=trained)
        for channel in self.channels_in(look):
            channel.batch_ends(batch)

    def _score(self, look: Look) -> dict[Series, Outcome] | None:
        """Score the attacks of a look, pool over processes, and set the step of the next look.

        Returns:
            The outcomes by series; None if nothing was shared.
        """
        cadence, results = self.scheduler.cadence, self._results(look) or {}
        self.end_look()
        self.each(self._leave_out_slow)
        no_result = all(isinstance(result, Waiting) for result in results.values())
        try:
            cadence.next_step = self.scheduler.next_step(look, no_result=no_result)
        except Exception as error:
            self.fail(error)
            cadence.next_step = look.step + 1
        if self.failure is not None:
            scope = self.series if look.scope is None else look.scope
            results = dict.fromkeys(scope, Unknown(self.failure))
        outcomes, look.next_look = self.pool(results, cadence.next_step)
        cadence.next_step = look.next_look
        shared = ((s, o) for s, o in (outcomes or {}).items() if s.stage is Stage.SHARED)
        failed = {s.attack for s, o in shared if o.unknown is not None}
        spared = {a.name for a in self.lineup.spared if a.second_to in failed}
        waits = {s: pending("it runs next", soon=True) for s in self.series if s.attack in spared}
        return outcomes and {**outcomes, **waits}

    @contained
    def _results(self, look: Look) -> dict[Series, Result]:
        """Return this process's result of every series of the look."""
        results = dict[Series, Result]()
        scope, waits = look.scope or self.series.keys(), self.scheduler.waits
        # Series that were not tried, because what they wait for has not happened.
        waiting = {s: w for s, w in waits.items() if s in scope and look.answers.get(s) is w}
        with look.clock(self.run.device):
            for channel in self.channels_in(look) if waiting.keys() != scope else ():
                results |= results_of(channel, look)
        results = {s: r for s, r in results.items() if s in scope} | waiting
        waits |= {s: r for s, r in results.items() if isinstance(r, Waiting)}
        return results

    def pool(
        self, results: Mapping[Series, Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the outcomes pooled over all processes, and the first process's next step."""
        exposed = {plan.attack.name: plan.exposed for plan in self.lineup.plans}
        ordered = {series: results[series] for series in self.series if series in results}
        shared = {series: exposed[series.attack] for series in ordered}
        return self.exchange.outcomes(ordered, shared, next_step)

    def _leave_out_slow(self) -> None:
        """Leave out slow attacks, on all processes at once."""
        if not self.accounting:  # under DP the choice of attacks must not depend on an example
            self.lineup.leave_out_slow(self.run.longest)

    def end_look(self) -> None:
        """End the current look, also one that failed: taps rest, and channels free what it used."""
        look, self.look = self.look, None
        disarming = (partial(channel.disarm, look) for channel in self.channels if look is not None)
        self.each(self.tap.end, *disarming, self.tap.end)  # again, if the first call failed


def _note_defense(
    step: Step, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
) -> None:
    """Add the noise of a defence to that of a step, or a copy of the defence if it adds none."""
    try:
        std = defense.noise_std(context)
        # This runs again after the reduction; the later value includes the earlier one.
        replaces = isinstance(defense, OptimizerDP)
        step.noise_std = std if replaces else math.hypot(step.noise_std, std)
        if replaces or defense.per_sample:
            step.example_norm = defense.example_norm(context)
        elif std != 0 and not step.sizes:
            gradients = ((id(p), p.grad) for p in parameters if p.grad is not None)
            step.sizes = {key: float(g.float().norm()) for key, g in gradients if not is_shard(g)}
        elif std == 0 and not defense.defers:
            step.acted.append((copied(defense), parameters, context))
    except Exception:
        step.noise_std = math.nan
