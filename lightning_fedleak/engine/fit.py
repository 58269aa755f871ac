"""The parts of an engine that live as long as one run: taps, attacks, and the current look.

A *tap* is a hook that records the model calls or gradients of the user's own training step. A
*look* is a measurement at one step. The gradient passes *stages*: ``local`` before the client's
defences, ``shared`` as it is sent, ``aggregate`` after the reduction over clients. A *series* is
the results of one attack at one stage. An attack's *plan* says which parameters' gradients it
reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.defenses.base import copied
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.defenses.processes import reshard
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.channels.exchange import Exchange
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.lineup import Lineup
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import (
    AUTOCAST,
    BeforeDefense,
    Look,
    Refusal,
    Run,
    StageReached,
    is_of_signal,
    reason,
)
from lightning_fedleak.engine.scheduler import Phase, Scheduler
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.batches import BatchError, adapter_to_copy
from lightning_fedleak.model.snapshots import (
    AVERAGED,
    GradientSnapshot,
    Stage,
    UnusableObservation,
    shaped,
)
from lightning_fedleak.model.taps import StepTap


class Fit:
    """Hold everything of an engine that lives as long as one run, and capture the run's steps.

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
            say=lambda sentence: rank_zero_info(f"{run.watcher}: {sentence}"),
            reason=reason,
        )
        self.exchange = Exchange(run, series)
        self.accounting = accounting(run.defenses)
        self.look: Look | None = None
        self.failure: str | None = None
        # Whether the first batch, and the end of the first look, are still to come.
        self.is_before_batch = self.is_before_look = True
        self._options = options
        self._batch_error: Exception | None = None  # why the first batch cannot be read
        self._removers: list[Callable[[], None]] = []
        self._tapped: set[int] = set()  # the ids of the parameters whose gradients are recorded
        self._planned_for: tuple[object, ...] = ()  # what the plans were made for, see _trained

    def calibrate(
        self,
        restored: Mapping[str, object],
        stage_reached: StageReached,
        before_defense: BeforeDefense,
    ) -> None:
        """Install the taps and calibrate the attacks, see :meth:`Lineup.calibrate`.

        Args:
            restored: The calibrations in a checkpoint, by the attack's name.
            stage_reached: Called at each stage of ``p.grad``, see :meth:`Run.watch_release`.
            before_defense: Called right before a defence acts on the gradients.

        Raises:
            ValueError: An attack does not fit the model.
        """
        try:
            if self.run.unit == "step":
                self._removers += self.run.watch_release(stage_reached, before_defense)
            self.follow()
        except Exception:
            self.close()
            raise
        self.lineup.calibrate(restored, self.follow)

    @property
    def keeps_local(self) -> bool:
        """Return whether the tap copies local gradients, because DDP reduces them in backward."""
        per_rank = self.run.under_ddp and self.run.client == "rank"
        return self.run.unit == "step" and per_rank and not self.run.separates_stages

    # ---- trained parameters -----------------------------------------------------------------

    def _trained(self) -> tuple[object, ...]:
        """Return what plans depend on, to compare: trained parameters and their optimizers."""
        groups = ((o, p) for o in self.run.optimizers for g in o.param_groups for p in g["params"])
        owners = tuple((id(optimizer), id(p)) for optimizer, p in groups)
        adapter = str(getattr(self.run.anatomy.model, "active_adapter", None))
        trained = (id(p) for p in self.run.anatomy.root.parameters() if p.requires_grad)
        return owners, adapter, *trained

    def follow_changes(self) -> bool:
        """Plan again if other parameters are trained now; return whether other ones are read."""
        return self._planned_for != self._trained() and self.follow()

    def follow(self) -> bool:
        """Plan the attacks again, and return whether other parameters are read than before."""
        self._planned_for = self._trained()
        anatomy = self.run.anatomy
        with shaped(anatomy.root.parameters()):
            changed = self.lineup.follow()
        roles = dict.fromkeys(r for plan in self.lineup.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        tapped = {id(p) for p in parameters.values()}
        if tapped == self._tapped and (not changed or self.look is not None):
            return changed  # keep the taps, and the gradient copies of the current look
        self._tapped = tapped
        self.tap.read_gradients(parameters, self.run.gradient_of, keeps_local=self.keeps_local)
        return True

    def refresh(self, look: Look) -> None:
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

    # ---- the end of a run, and failures -----------------------------------------------------

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
        if is_of_signal(error) and self.look is not None:
            self.end_look(self.look)
        why = reason(error)  # which raises the error of a signal's handler
        self.failure = self.failure or why

    def each(self, *functions: Callable[[], object]) -> None:
        """Call all of the functions, also if one of them raises an error."""
        for function in functions:
            try:
                function()
            except Exception as error:
                self.fail(error)

    # ---- a look begins and ends -------------------------------------------------------------

    def check_first_batch(self, batch: Any) -> None:
        """Refuse the first batch if it cannot be read, on all processes at once.

        A batch whose tokens may be found in the step's graph is refused later, if at all, by
        :meth:`check_first_look`.

        Raises:
            Refusal: The first batch cannot be read; its error shows an adapter to copy.
        """
        self.is_before_batch, adapter = False, self._options.batch_adapter
        try:
            self.tap.read(batch)
        except Exception as error:
            self._batch_error = error
            if adapter is None and batch is not None:
                code = adapter_to_copy(batch, self.run.anatomy.kind, self.run.watcher)
                self._batch_error = BatchError(f"{error}\n{code}")
        needs_batch = self.tap.why_not is not None or batch is None or adapter is not None
        self._refuse_anywhere(needed=needs_batch)

    def check_first_look(self, look: Look) -> None:
        """Refuse, at the end of the first look, a batch that was not in the step's graph either.

        Raises:
            Refusal: The first batch cannot be read; its error shows an adapter to copy.
        """
        self.is_before_look = False
        self._refuse_anywhere(needed=look.training_step.error is not None)

    def _refuse_anywhere(self, *, needed: bool) -> None:
        """End the run if any process needs its first batch and could not read it."""
        if self.run.on_any_process(needed and self._batch_error is not None):
            other = BatchError("another process could not read its first batch")
            raise Refusal(self._batch_error or other)

    def begin_look(self, step: int) -> bool:
        """Start a look if one is due, and return whether one started."""
        if self.look is not None:
            return False
        try:
            self._begin_look(step)
        except Exception as error:
            self.fail(error)
            is_clear = self.look is None and self.scheduler.phase is not Phase.ACCUMULATING
            if is_clear and self.scheduler.cadence.due(step):
                self.look = Look(step)
        return self.look is not None

    def _begin_look(self, step: int) -> None:
        """Arm the taps, and adapt the attacks to the model."""
        exposed = {plan.attack.name for plan in self.lineup.exposed}
        look = self.look = self.scheduler.due_look(step, exposed)
        if look is None:
            return
        self.run.spent.clear()  # may hold the seconds of a look that was not written
        self.run.longest.clear()
        with look.clock(self.run.device):
            if look.scope is None:
                if self.lineup.is_sharded:  # FSDP2 leaves layers unsharded after an evaluation
                    reshard(self.run.anatomy.root)
                with shaped(self.run.anatomy.root.parameters()):
                    self.follow_changes()
                    self.refresh(look)
            look.training_step = self.tap.begin(step)
            for channel in self.channels_in(look):
                channel.arm()

    def end_look(self, look: Look) -> None:
        """End a look: the taps rest until the next one, and channels free what it used."""
        self.look = None
        if not self.accounting:  # under DP the choice of attacks must not depend on an example
            self.lineup.leave_out_slow(self.run.longest)
        self.each(self.tap.end, *(partial(channel.disarm, look) for channel in self.channels))

    def drop_look(self) -> None:
        """Forget a look that failed, and disarm its hooks in the user's forward pass."""
        self.look = None
        self.each(self.tap.end)

    def channels_in(self, look: Look) -> list[StepChannel]:
        """Return the channels whose attacks take part in a look."""
        if look.scope is None:
            return [*self.channels]
        return [c for c in self.channels if any(self.series[s] is c for s in look.scope)]

    # ---- captured gradients -----------------------------------------------------------------

    def note_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Add the noise of a defence to that of the current step, or a copy if it adds none."""
        if self.look is None:
            return
        step = self.look.training_step
        try:
            std = defense.noise_std(context)
            # This runs again after the reduction; the later value includes the earlier one.
            replaces = isinstance(defense, OptimizerDP)
            step.noise_std = std if replaces else math.hypot(step.noise_std, std)
            if replaces or defense.per_sample:
                step.example_norm = defense.example_norm(context)
            elif std == 0 and not defense.defers:
                step.acted.append((copied(defense), parameters, context))
        except Exception:
            step.noise_std = math.nan

    def owns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps any of the parameters that the attacks read."""
        owners = [p.optimizer for p in self.lineup.exposed if p.optimizer is not None]
        return not owners or any(o is optimizer for o in owners)

    def owner_of(self, parameter: nn.Parameter) -> Optimizer:
        """Return the optimizer that steps a parameter."""
        groups = ((o, g) for o in self.run.optimizers for g in o.param_groups)
        return next(o for o, g in groups if parameter in {*g["params"]})

    @property
    def shared_stages(self) -> tuple[Stage, ...]:
        """Return the stages that see the same gradient as stage shared, this one included."""
        is_only = self.run.client == "world" or self.run.processes == 1
        return (Stage.SHARED, Stage.AGGREGATE)[: 1 + is_only]

    def pool(
        self, results: Mapping[Series, Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the outcomes pooled over all processes, and the first process's next step."""
        exposed = {plan.attack.name: plan.exposed for plan in self.lineup.plans}
        ordered = {series: results[series] for series in self.series if series in results}
        shared = {series: exposed[series.attack] for series in ordered}
        return self.exchange.outcomes(ordered, shared, next_step)

    def capture(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, from_copies: bool = False
    ) -> Look | None:
        """Add the present gradient to the step of the look, and return the look.

        Args:
            stages: The stages at which the gradient is the same as now.
            optimizer: The optimizer that is about to step.
            from_copies: Whether to take the copies from before DDP's reduction, not ``p.grad``.

        Returns:
            The look; None without one, or if the attacks do not read this optimizer's parameters,
            or if this optimizer has already stepped in the look.
        """
        if not self.owns(optimizer):
            return None
        self.scheduler.phase = Phase.STEPPED
        look = self.look
        if look is None or id(optimizer) in look.stepped:
            return None
        if look.step_seconds == 0:
            look.step_seconds = max(0.0, look.stopwatch.seconds - look.seconds)
        run, step, scale = self.run, look.training_step, self.run.loss_scale
        one_client = run.client == "world" or Stage.SHARED in stages
        clients = 1 if one_client else run.processes  # their independent noise is averaged
        look.stages, look.optimizer = stages, optimizer
        look.wanted = tuple(stage for stage in stages if stage in self._options.stages)
        if Stage.LOCAL in stages and Stage.AGGREGATE not in stages:
            step.undefended = self._undefended(look, from_copies=from_copies)

        def take() -> GradientSnapshot:
            if (why := run.why_hidden(look.wanted, optimizer)) is not None:
                raise UnusableObservation(why)
            view = self.tap.gradients(
                look.step,
                look.wanted[0],
                copies=from_copies,
                client=run.number,
                scale=scale if from_copies else 1.0,
            )
            return replace(
                view,
                noise_std=0.0 if Stage.LOCAL in stages else step.noise_std / clients**0.5,
                compression=AVERAGED if step.compression and clients > 1 else step.compression,
                rounding=run.rounding(len(step.calls)),
            )

        step.gradients |= dict.fromkeys(stages, take)
        return look

    def _undefended(self, look: Look, *, from_copies: bool) -> GradientSnapshot | None:
        """Return a copy of the local gradient, for controls, before defences or DDP change it.

        Args:
            look: The look.
            from_copies: Whether the tap holds copies already, so that none is made.
        """
        controlled = any(map(self.controls.may_play, self.lineup.exposed))
        if not controlled or self.run.why_hidden((Stage.LOCAL,), look.optimizer) is not None:
            return None
        return self.tap.local_copy(look.step, from_copies=from_copies)
