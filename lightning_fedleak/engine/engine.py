"""One look: capture a step, let the attacks guess, score the guesses, and record the results.

::

    step -> attacks -> score -> record

The sections of :class:`StepEngine` follow this order. A *look* is a measurement at one optimizer
step. The gradient passes *stages*: ``local`` before the client's defences, ``shared`` as it is
sent, ``aggregate`` after the reduction over clients. A *series* is the results of one attack at one
stage. A *channel* runs and scores the attacks of one family. A *control* is the same step on known
words, which shows whether an attack with a low number works at all.
:mod:`~lightning_fedleak.engine.scheduler` decides when a look is due,
:mod:`~lightning_fedleak.engine.fit` holds the taps that record its step, and
:mod:`~lightning_fedleak.engine.lifecycle` begins and ends a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.attacks.public_text import share_work
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.engine.channels.released.weights import WeightLooks
from lightning_fedleak.engine.channels.steps import results_of
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.log import Report, UserMetrics
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown, Waiting
from lightning_fedleak.engine.record import privacy_values
from lightning_fedleak.engine.results import Results
from lightning_fedleak.engine.run import Look, Refusal, contained, reason
from lightning_fedleak.engine.scheduler import Phase
from lightning_fedleak.model.model_state import saved_once
from lightning_fedleak.model.snapshots import AVERAGED, ON_THE_WAY, Stage
from lightning_fedleak.report.records.lines import is_validation


class StepEngine:
    """Look at the steps of a run. An internal error makes results unknown and ends no training.

    Methods with the decorator :func:`~lightning_fedleak.engine.run.contained` catch such errors.

    Attributes:
        options: The settings by which a run is watched.
        fit: The parts that live as long as the current run; None between runs.
        results: The results of all looks of the newest run.
        report: The writer of the results; None outside of a run.
        weights: The looks at the trained weights; None if no attack reads these.
    """

    options: Options
    fit: Fit | None
    results: Results
    report: Report | None
    weights: WeightLooks | None
    _metrics: UserMetrics
    _metric_names: Sequence[str] | None
    _has_news: bool

    @property
    def _fit(self) -> Fit:
        if self.fit is None:
            raise RuntimeError("no run has begun: Engine.begin(run, destination) comes first")
        return self.fit

    def fail(self, error: Exception) -> None:
        """Make the current look, or else the next one, unknown because of an internal error."""
        if self.fit is not None:
            self.fit.fail(error)

    # ---- step -------------------------------------------------------------------------------

    @contained
    def batch_begins(self, batch: Any) -> None:
        """Start a look if one is due, and read the batch before any defence acts.

        Raises:
            BatchError: The first batch cannot be read; an adapter's own error is raised as it is.
        """
        if self.weights is not None:
            self.weights.batch_begins(batch)
        fit, number = self._fit, self._fit.run.step
        if fit.is_before_batch:
            fit.check_first_batch(batch)
        begins = fit.begin_look(number)
        if begins and self.report is not None and self.report.record is not None:
            next_look = max(number, fit.scheduler.cadence.next_step)
            self.report.record.write_new_plan(number, next_look)
        if fit.look is not None:
            fit.tap.batch_begins(fit.look.training_step, batch)

    @contained
    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that an optimizer step ends with this batch, so gradients no longer accumulate."""
        if self._fit.owns(optimizer):
            self._fit.scheduler.phase = Phase.STEPPED

    @contained
    def _stage_reached(self, stage: Stage, optimizer: Optimizer) -> None:
        """Attack ``p.grad`` at a stage. At the last stage the optimizer is about to step.

        Without defences the gradient is the same at all stages, and only the last one is reported.
        """
        fit = self._fit
        if fit.look is not None and stage is Stage.LOCAL:
            fit.look.training_step.noise_std, fit.look.training_step.compression = 0.0, ""
            fit.look.training_step.acted.clear()
        if fit.run.separates_stages:
            self._capture((stage,), optimizer)
        elif stage is Stage.AGGREGATE and fit.keeps_local:
            self._capture((Stage.LOCAL, Stage.SHARED), optimizer, from_copies=True)
            self._capture((Stage.AGGREGATE,), optimizer)
        elif stage is Stage.AGGREGATE:
            self._capture(ON_THE_WAY, optimizer)

    @contained
    def _before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Note the noise and compression of a defence that acts next, and tell the channels."""
        fit = self._fit
        fit.note_defense(defense, parameters, context)
        for channel in fit.channels:
            channel.before_defense(defense, parameters, context)
        if fit.look is not None and defense.compression:
            if defense.defers:  # it shares the rest of this gradient in later steps: read it now
                self._capture(fit.shared_stages, fit.owner_of(parameters[0]))
            method = AVERAGED if defense.defers else defense.compression.method
            fit.look.training_step.compression = method

    def _capture(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, from_copies: bool = False
    ) -> None:
        """Let the attacks read the present gradient, once for all ``stages`` at which it is equal.

        Args:
            stages: The stages at which the gradient is the same as now.
            optimizer: The optimizer that is about to step.
            from_copies: Whether to take the copies from before DDP's reduction, not ``p.grad``.
        """
        look = self._fit.capture(stages, optimizer, from_copies=from_copies)
        if look is not None:
            self._attack(look)
            if Stage.AGGREGATE in stages:
                look.stepped.add(id(optimizer))
                look.work.clear()

    # ---- attacks ----------------------------------------------------------------------------

    @contained
    def _attack(self, look: Look) -> None:
        """Let every attack guess from the present gradient, and from a control if one is due."""
        fit, step = self._fit, look.training_step
        with look.clock(fit.run.device), share_work(look.work):
            if look.optimizer is not None:
                fit.tap.settle(step)
                look.followed &= not fit.follow_changes()
            if fit.scheduler.still_waits(look):
                return
            fit.refresh(look)
            is_last = self.options.local_steps is None and Stage.AGGREGATE in look.stages
            with saved_once(not fit.lineup.is_sharded):
                for channel in fit.channels_in(look):
                    try:
                        channel.at_stages(look)
                    except Exception as error:
                        failed = [s for s, owner in fit.series.items() if owner is channel]
                        look.answers |= dict.fromkeys(failed, Unknown(reason(error)))
                if is_last or step.round is not None:
                    with look.clock(fit.run.device, is_control=True):
                        fit.controls.play(look, fit.lineup.exposed)

    # ---- score ------------------------------------------------------------------------------

    @contained
    def _end_batch(self, *, trained: bool) -> bool:
        """Score and publish the look that ends with this batch, if any.

        Returns:
            True; None after an error, by :func:`contained`. The caller then drops the look.
        """
        fit = self._fit
        stepped, look = fit.scheduler.batch_ends(trained), fit.look
        if look is None:
            return True
        self._take_batch(look, trained)
        if not stepped:
            return True
        if fit.is_before_look:
            fit.check_first_look(look)
        try:
            outcomes = self._score(look)
        finally:
            fit.drop_look()
        if fit.run.step == look.step:
            raise Refusal(RuntimeError(fit.run.uncounted_step))
        final = self.results.final_outcomes(look, outcomes)
        if final is not None:
            self._publish(look, final)
            fit.scheduler.waiting, fit.failure = self.results.waiting, None
        elif look.scope is None:
            fit.scheduler.cadence.next_step = fit.run.step
        return True

    @contained
    def _take_batch(self, look: Look, trained: bool) -> None:
        """Add the batch that has ended to the truth that the look is scored against."""
        with look.clock(self._fit.run.device):
            batch = self._fit.tap.batch_ends(look.training_step, trained=trained)
        for channel in self._fit.channels_in(look):
            channel.batch_ends(batch)

    def _score(self, look: Look) -> dict[Series, Outcome] | None:
        """Score the attacks of a look, pool over processes, and set the step of the next look.

        Returns:
            The outcomes by series; None if nothing was shared.
        """
        fit, cadence = self._fit, self._fit.scheduler.cadence
        results = self._results(look) or {}
        fit.end_look(look)
        no_result = all(isinstance(result, Waiting) for result in results.values())
        try:
            cadence.next_step = fit.scheduler.next_step(look, no_result=no_result)
        except Exception as error:
            self.fail(error)
            cadence.next_step = look.step + 1
        if fit.failure is not None:
            scope = fit.series if look.scope is None else look.scope
            results = dict.fromkeys(scope, Unknown(fit.failure))
        outcomes, look.next_look = fit.pool(results, cadence.next_step)
        cadence.next_step = look.next_look
        return outcomes

    @contained
    def _results(self, look: Look) -> dict[Series, Result]:
        """Return this process's result of every series of the look."""
        fit, results = self._fit, dict[Series, Result]()
        scope, waits = look.scope or fit.series.keys(), fit.scheduler.waits
        # Series that were not tried, because what they wait for has not happened.
        waiting = {s: w for s, w in waits.items() if s in scope and look.answers.get(s) is w}
        with look.clock(fit.run.device):
            for channel in fit.channels_in(look) if waiting.keys() != scope else ():
                results |= results_of(channel, look)
        results = {s: r for s, r in results.items() if s in scope} | waiting
        waits |= {s: r for s, r in results.items() if isinstance(r, Waiting)}
        return results

    # ---- record -----------------------------------------------------------------------------

    def _publish(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        """Add the outcomes of a look to the results, and write them to all destinations."""
        fit, defenses = self._fit, self._fit.accounting
        metrics = fit.run.metrics(self._metric_names)
        metrics = {name: value for name, value in metrics.items() if not is_validation(name)}
        utility = self._metrics.changed(metrics, fit.run.step)
        spent = privacy_values(defenses) if defenses else {}
        shared = bool(fit.lineup.trained)
        outcomes = self.results.add(look, outcomes, utility, spent, shared=shared)
        fit.run.publish(self.results.latest)
        self._has_news = True
        assert self.report is not None
        values, failures = self.results.new_values(), self.results.failures
        self.report.write(look, outcomes, values, utility, defenses, failures)
