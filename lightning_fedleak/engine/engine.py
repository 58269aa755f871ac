"""The engine of a watched run: the path of one look, from a step's gradients to the logs.

::

    tap.capture -> [attack.run -> score] -> record -> sinks

When a look is due, :mod:`~lightning_fedleak.engine.scheduler` decides; taps and the truth are in
:mod:`~lightning_fedleak.engine.fit`; how a run begins and ends, and its rounds, in
:mod:`~lightning_fedleak.engine.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.attacks.shared_work import share_work
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.engine import record
from lightning_fedleak.engine.channels.base import Channel, channels_of, results_of
from lightning_fedleak.engine.channels.records import RECORDS
from lightning_fedleak.engine.channels.weights import WeightLooks
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.log import JsonLines, Report, UserMetrics, own_folder
from lightning_fedleak.engine.options import Options, Selection
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown, Waiting
from lightning_fedleak.engine.results import MAX_WAITS, MOST_STEPS_WAITED, Results, series_of
from lightning_fedleak.engine.run import Look, Moment, Refusal, Run, contained, reason
from lightning_fedleak.engine.scheduler import Phase
from lightning_fedleak.model.compression import AVERAGED
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage


class StepEngine:
    """Look at the steps of a run: let attacks guess, score, record and log.

    What its methods raise ends no training: it is a failure of the look.

    Args:
        selection: the attacks.
        options: how a run is watched.
        in_rounds: it looks at the rounds of one client, and at no steps.

    Attributes:
        channels: one for each family of leak.
        series: the channel of each series, in the order of the logs.
        results: of all looks of the newest run.
        fit: the run at work; None between runs.
        weights: looks at the trained weights; None where no attack reads them.
        report: writes what looks found; None outside of a run.
        jsonl: the results' file of the newest run.
        earlier: facts of the run that the next one goes on from; empty where there is none.

    Raises:
        ValueError: contradictory options.
    """

    def __init__(self, selection: Selection, options: Options, *, in_rounds: bool = False) -> None:
        self.selection = selection
        self.options = options
        self.channels: list[Channel] = channels_of(selection.attacks, options)
        self.series = series_of(selection.attacks, self.channels, options.stages)
        if options.memorization.records and all(s.name != RECORDS for s in self.series):
            raise ValueError(
                "Memorization(records=True) lists rows by what an attack on the trained weights "
                "asks, and none is played: add Combined() to the attacks"
            )
        names = [one.log_name for one in self.series if "entity/" in one.name]
        if options.entities and len({*names}) < max(1, len(names)):
            raise ValueError(
                "entities= counts values in what attacks on words, texts or the trained weights "
                "read. Add one, such as Combined(); and give planted kinds other names"
            )
        most_waited = MAX_WAITS if in_rounds else MOST_STEPS_WAITED
        self.results = Results(self.series, most_waited=most_waited)
        self.fit: Fit | None = None
        self.weights: WeightLooks | None = None
        self.report: Report | None = None
        self.jsonl: JsonLines | None = None
        self.earlier: Mapping[str, object] = {}
        self._metrics, self._metric_names = UserMetrics(), options.metric_names
        self._has_news = False

    @property
    def run(self) -> Run:
        """Return the run at work."""
        return self._fit.run

    @property
    def _fit(self) -> Fit:
        if self.fit is None:
            raise RuntimeError("no run has begun: Engine.begin(run, destination) comes first")
        return self.fit

    def own_folder(self, run: Run, folder: Path, fit: str | None = None) -> Path:
        """Return where logs go, see :func:`~lightning_fedleak.engine.log.own_folder`."""
        newest = None if self.jsonl is None else self.jsonl.run
        return own_folder(run, folder, self.earlier.get("run"), newest, fit)

    def fail(self, error: Exception) -> None:
        """Let the look at work, or the next one, have no result, because of an error of ours."""
        if self.fit is not None:
            self.fit.fail(error)

    # ---- the moments of a step --------------------------------------------------------------

    @contained
    def batch_begins(self, batch: Any) -> None:
        """Start a look where one is due, and take the truth before any defence acts.

        Raises:
            Exception: the first batch cannot be read.
        """
        if self.weights is not None:
            self.weights.batch_begins(batch)
        fit, step = self._fit, self._fit.run.step
        if fit.truth.is_first:
            fit.truth.check_first(batch)
        at_work = fit.look
        try:
            fit.begin_look(step)
        except Exception as error:
            self.fail(error)
            scheduler = fit.scheduler
            is_clear = fit.look is None and scheduler.phase is not Phase.ACCUMULATING
            if is_clear and scheduler.cadence.due(step):
                fit.look = Look(step)
        if fit.look is not None:
            writer = None if self.report is None else self.report.record
            if writer is not None and fit.look is not at_work:
                writer.write_new_plan(step, max(step, fit.scheduler.cadence.next_step))
            fit.truth.batch_begins(fit.look, batch)

    @contained
    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that this batch ends an optimizer step, and does not only accumulate gradients."""
        try:
            if self._fit.owns(optimizer):
                self._fit.scheduler.phase = Phase.STEPPED
        except Exception:
            self._fit.scheduler.phase = Phase.STEPPED
            raise

    # ---- capture, and attack ----------------------------------------------------------------

    @contained
    def _stage_reached(self, stage: Stage, optimizer: Optimizer) -> None:
        """Look at ``p.grad`` as it is at a stage; at the last one the optimizer is about to step.

        Without defences that act in between, the last stage is the only one that is reported.
        """
        fit = self._fit
        if fit.look is not None and stage is Stage.LOCAL:
            fit.look.noise_std, fit.look.compression = 0.0, ""
        if fit.run.separates_stages:
            self._capture((stage,), optimizer)
        elif stage is Stage.AGGREGATE and fit.keeps_local:
            self._capture((Stage.LOCAL, Stage.SHARED), optimizer, kept=True)
            self._capture((Stage.AGGREGATE,), optimizer)
        elif stage is Stage.AGGREGATE:
            self._capture(ON_THE_WAY, optimizer)

    @contained
    def _before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        fit = self._fit
        fit.note_defense(defense, context)
        for channel in fit.channels:
            channel.before_defense(defense, parameters, context)
        if fit.look is not None and defense.compression:
            if defense.defers:  # all that it gets leaves in time
                alone = fit.run.client == "world" or fit.run.processes == 1
                stages = (Stage.SHARED, Stage.AGGREGATE)[: 1 + alone]
                groups = ((o, g) for o in fit.run.optimizers for g in o.param_groups)
                owner = next(o for o, g in groups if parameters[0] in {*g["params"]})
                self._capture(stages, owner)
            fit.look.compression = AVERAGED if defense.defers else defense.compression.method

    def _capture(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, kept: bool = False
    ) -> None:
        """Let the attacks read a gradient that is the same at all of ``stages``, once."""
        moment = self._fit.moment(stages, optimizer, kept=kept)
        if moment is not None:
            self._attack(moment)
            if Stage.AGGREGATE in stages:
                moment.look.stepped.add(id(optimizer))
                moment.look.work.clear()

    @contained
    def _attack(self, moment: Moment) -> None:
        """Let every attack guess from what is shared now, and from the control of the look."""
        fit, look = self._fit, moment.look
        fit.truth.settle(look)
        with look.clock(fit.run.device), share_work(look.work):
            if moment.optimizer is not None and fit.trained != fit.lineup.trained:
                look.followed &= not fit.follow()
            if look.scope is not None and fit.scheduler.still_waits(moment):
                return
            fit.refresh(look)
            if fit.lineup.held:
                fit.admit_held(look)
            for channel in fit.channels_in(look):
                try:
                    channel.at_moment(moment)
                except Exception as error:
                    failed = [series for series, owner in fit.series.items() if owner is channel]
                    look.answers |= dict.fromkeys(failed, Unknown(reason(error)))
            is_last = self.options.local_steps is None and Stage.AGGREGATE in moment.stages
            if is_last or look.local is not None:
                names = {series.attack for series in look.scope or fit.series}
                plans = [p for p in fit.lineup.exposed if p.attack.name in names]
                fit.controls.play(moment, plans)

    # ---- score ------------------------------------------------------------------------------

    @contained
    def _end_batch(self, *, trained: bool) -> bool:
        """Publish a look that ends with this batch, and return that this went well."""
        fit = self._fit
        stepped, look = fit.scheduler.batch_ends(trained), fit.look
        if look is None:
            return True
        self._take_batch(look, trained)
        if not stepped:
            return True
        if fit.truth.is_unchecked:
            fit.truth.check_unread(look)
        try:
            outcomes = self._score(look)
        finally:
            fit.drop_look()
        if fit.run.step == look.step:
            raise Refusal(RuntimeError(fit.run.uncounted_step))
        settled = self.results.settled(look, outcomes)
        if settled is not None:
            self._publish(look, settled)
            fit.scheduler.waiting, fit.failure = self.results.waiting, None
        elif look.scope is None:
            fit.scheduler.cadence.next_step = fit.run.step
        return True

    @contained
    def _take_batch(self, look: Look, trained: bool) -> None:
        """Add the batch that has ended to what the look is scored against."""
        batch = self._fit.truth.batch_ends(look, trained=trained)
        for channel in self._fit.channels_in(look):
            channel.batch_ends(batch)

    def _score(self, look: Look) -> dict[Series, Outcome] | None:
        """Score every attack that the look is of, pool over processes, and fix the next look."""
        fit = self._fit
        results = self._results(look) or {}
        fit.end_look(look)
        no_result = all(isinstance(result, Waiting) for result in results.values())
        next_step = self._next_step(look, no_result) or look.step + 1
        fit.scheduler.cadence.next_step = next_step
        if fit.failure is not None:
            scope = fit.series if look.scope is None else look.scope
            results = dict.fromkeys(scope, Unknown(fit.failure))
        outcomes, look.next_look = self._pool(results, next_step)
        fit.scheduler.cadence.next_step = look.next_look
        return outcomes

    @contained
    def _next_step(self, look: Look, no_result: bool) -> int:
        return self._fit.scheduler.next_step(look, no_result=no_result)

    @contained
    def _results(self, look: Look) -> dict[Series, Result]:
        """Return this process's result of every series that the look is of."""
        fit, results = self._fit, dict[Series, Result]()
        scope, waits = look.scope or fit.series.keys(), fit.scheduler.waits
        still = {s: w for s, w in waits.items() if s in scope and look.answers.get(s) is w}
        with look.clock(fit.run.device):
            for channel in fit.channels_in(look) if still.keys() != scope else ():
                results |= results_of(channel, look)
        results = {s: r for s, r in results.items() if s in scope} | still
        waits |= {s: r for s, r in results.items() if isinstance(r, Waiting)}
        return results

    def _pool(
        self, results: Mapping[Series, Result], next_step: int
    ) -> tuple[dict[Series, Outcome] | None, int]:
        """Return the outcomes over all processes, and the first one's next step to look at."""
        fit = self._fit
        exposed = {plan.attack.name: plan.exposed for plan in fit.lineup.plans}
        ordered = {series: results[series] for series in fit.series if series in results}
        shared = {series: exposed[series.attack] for series in ordered}
        return fit.exchange.outcomes(ordered, shared, next_step)

    # ---- record, and log --------------------------------------------------------------------

    def _publish(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        run = self._fit.run
        utility = self._metrics.add(run.metrics(self._metric_names), run.step)
        defenses = self._fit.accounting
        spent = record.privacy_values(defenses) if defenses else {}
        outcomes = self.add(look, outcomes, utility, spent)
        run.publish(self.results.latest)
        self._has_news = True
        assert self.report is not None
        values, failures = self.results.new_values(), self.results.failures
        self.report.write(look, outcomes, values, utility, defenses, failures)

    def add(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        utility: Mapping[str, float],
        further: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[Series, Outcome]:
        """Add a look to the results, and return its outcomes as they count.

        Args:
            look: the look.
            outcomes: by series.
            utility: the user's metrics, by name.
            further: other values, by log name.
        """
        beside = {f"utility/{name}": float(value) for name, value in utility.items()}
        self.results.playing |= outcomes.keys()
        shared = bool(self._fit.lineup.trained)
        return self.results.add(look, outcomes, {**beside, **further}, shared=shared)
