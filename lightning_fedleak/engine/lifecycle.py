"""The engine from set-up to the end of a run, its records, and its state in checkpoints.

The order is: gates (thresholds on logged values) subscribe, the channels open on the run, the
attacks are calibrated, training begins, the steps follow (:mod:`lightning_fedleak.engine.fit`),
training ends, the record is closed.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_fedleak.engine import log, record
from lightning_fedleak.engine.channels.base import Channel, channels_of, find_entities
from lightning_fedleak.engine.channels.released.records import check_listed
from lightning_fedleak.engine.channels.released.weights import WeightLooks, check_any
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.lineup import Lineup, check_texts
from lightning_fedleak.engine.loggers import KEY, Cards, add_settings, log_settings
from lightning_fedleak.engine.options import Options, Selection, check_optimizers
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.results import (
    MAX_STEPS_WAITED,
    MAX_WAITS,
    UNEXPLAINED,
    WORST,
    Listener,
    Results,
    series_of,
)
from lightning_fedleak.engine.run import Look, Refusal, Run, contained, reason
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.private_files import RevealFiles
from lightning_fedleak.progress import Stopwatch
from lightning_fedleak.report import records


class Engine:
    """Watch runs: decide when to look, let attacks guess, score the guesses, and log the results.

    A *look* is one measurement, at an optimizer step or of the trained weights. An integration owns
    an engine and tells it where its training loop is::

        engine = Engine(selected("auto"), Options())
        engine.reset()
        engine.open(run)
        engine.begin(run, destination)         # calibrates; raises where an attack does not fit
        engine.training_begins()               # a checkpoint has been loaded
        for batch in loader:
            engine.batch_begins(batch)
            engine.optimizer_steps(optimizer)  # before the step
            engine.batch_ends(trained=True)    # after it
        engine.training_ends()
        engine.end("finished")
        engine.close()

    Args:
        selection: The attacks.
        options: The settings by which a run is watched.

    Attributes:
        selection, options: The arguments.
        fit: The steps of the current run; None between runs.
        results: The results of all looks of the newest run.
        report: The writer of the results; None outside of a run.
        weights: The looks at the trained weights; None if no attack reads these.
        channels: The channels. A channel arms, runs and scores the attacks of one family of leak.
        series: The channel of each series (an attack at a stage), in the order of the logs.
        jsonl: The file of results of the newest run.
        earlier: The facts of the run that the next run resumes; empty if it resumes none.
        assume: The capabilities of the adversary besides what it sees.
        record: The writer of ``run.jsonl`` on the first process; None outside of a run.
        listeners: What gates and reports do at moments of the run.
        first_step: The number of optimizer steps before the newest run began.

    Raises:
        ValueError: The options contradict each other or the attacks.
    """

    def __init__(self, selection: Selection, options: Options) -> None:
        self.selection, self.options = selection, options
        self.channels: list[Channel] = channels_of(selection.attacks, options)
        self.series = series_of(selection.attacks, self.channels, options.stages)
        check_listed(self.series, options)
        max_steps_waited = MAX_STEPS_WAITED if options.local_steps is None else MAX_WAITS
        self.results = Results(self.series, max_steps_waited=max_steps_waited)
        self.fit: Fit | None = None
        self.weights: WeightLooks | None = None
        self.report: log.Report | None = None
        self.jsonl: log.JsonLines | None = None
        self.earlier: Mapping[str, object] = {}
        self._metrics = log.UserMetrics(options.utility)
        adversaries = frozenset().union(*(c.adversary for c in self.channels if c.attacks))
        self.assume = adversaries if selection.assume is None else selection.assume
        self.record: record.RunRecord | None = None
        self.first_step = 0
        self._calibrations: dict[str, object] = {}  # of a checkpoint or another run, by attack
        self._ended_summary: dict[str, object] = {}  # see _summary
        self._logged_last = self._has_news = False
        self._set_up_seconds = self._begin_time = 0.0
        self._prepared: set[str] = set()
        self._logged_names: list[str] = []  # made before the first look, for one that fails
        self.listeners: list[Listener] = []

    @property
    def current(self) -> Fit:
        """Return the steps of the current run; a RuntimeError is raised without one."""
        if self.fit is None:
            raise RuntimeError("no run has begun: Engine.begin(run, destination) comes first")
        return self.fit

    @property
    def run(self) -> Run:
        """Return the current run."""
        return self.current.run

    def fail(self, error: Exception) -> None:
        """Make the current look, or else the next one, unknown because of an internal error."""
        if self.fit is not None:
            self.fit.fail(error)

    def own_folder(self, run: Run, folder: Path, fit: str | None = None) -> Path:
        """Return a folder that holds logs of no other run: :func:`engine.log.own_folder`."""
        newest = self.jsonl and self.jsonl.run
        return log.own_folder(run, folder, self.earlier.get("run"), newest, fit)

    # ---- the interface for gates ------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of the values that are logged at each look."""
        return ["monitor/failures", "monitor/seconds", UNEXPLAINED, *self.results.names()]

    def subscribe(self, *moments: Any, **more_moments: Any) -> None:
        """Call functions at moments of the run until it ends: the fields of a ``Listener``."""
        self.listeners.append(Listener(*moments, **more_moments))

    @property
    def gates(self) -> list[records.GateFacts]:
        """Return the settings of the gates."""
        facts = [listener.facts for listener in self.listeners]
        return [f for n, f in enumerate(facts) if f is not None and f not in facts[:n]]

    @property
    def step_series(self) -> dict[Series, StepChannel]:
        """Return the channel of each series of an attack that reads steps."""
        return {s: c for s, c in self.series.items() if isinstance(c, StepChannel)}

    def record_decision(self, decision: records.GateLine) -> None:
        """Write the decision of a gate to ``run.jsonl``, on the first process."""
        if self.record is not None:
            self.record.append(decision)

    def reset(self) -> None:
        """Forget the looks of an earlier run, and put back the attacks that it excluded."""
        self.results.clear()
        self._metrics = log.UserMetrics(self.options.utility)
        for channel in self.channels:
            channel.attacks = channel.listed_attacks
            channel.load_state_dict({})

    def open(self, run: Run) -> None:
        """Check the run's texts and optimizers, and open the channels on it.

        With ``attacks="auto"`` a channel that fails only excludes its attacks.

        Args:
            run: The run. Its model is on its device.

        Raises:
            ValueError: Public text has another vocabulary, there is no optimizer, or a listed
                attack does not fit the run.
        """
        attacks, options = self.selection.attacks, self.options
        check_texts(attacks, {"games=Games(held_out=)": options.games.held_out}, run.anatomy)
        check_optimizers(run.optimizers, attacks)
        self._refused: dict[str, str] = {}  # why attacks are excluded, by name
        find_entities(options, run)  # raises here, since below "auto" only leaves attacks out
        for channel in (channel for channel in self.channels if channel.attacks):
            try:
                channel.open(run)
            except Exception as error:
                if not self.selection.auto:
                    raise
                self._refused |= {attack.name: str(error) for attack in channel.attacks}

    def begin(self, run: Run, destination: log.Destination) -> None:
        """Calibrate the attacks, install the taps and begin the record.

        Args:
            run: The run. The channels are open on it.
            destination: The files and loggers of the results.

        Raises:
            ValueError: An attack does not fit the model or the run.
        """
        watch, options, folder = Stopwatch(), self.options, destination.folder
        self.jsonl = log.JsonLines(folder / "leakage.jsonl")
        self.record = None
        reveal = RevealFiles(folder, run.rank, options.tokenizer) if options.reveal else None
        parts = self.series, self.selection.attacks, None if run.rank else self.jsonl
        self.report = report = log.Report(run, destination, *parts, reveal)
        lineup = self._line_up(run, destination)
        self._prepared = lineup.prepared
        calibrations, self._calibrations = self._calibrations, {}
        earlier, self.earlier = self.earlier, {}
        self.current.calibrate(calibrations)
        self._set_up_seconds = watch.seconds
        self.results.playing = {s for s in self.series if s.attack in lineup.playing}
        if self.weights and not self.selection.auto:
            self.results.playing |= self.weights.series
        self.results.untested = lineup.untested
        lineup.show()
        if self.selection.auto:
            report.write_not_played(lineup.rows, run.step)
        for listener in self.listeners:
            listener.before_first()
        if run.rank:
            return
        self.record = report.record = record.RunRecord(
            folder / "run.jsonl", self.jsonl.run, report.warn_once, run
        )
        facts = record.facts_of(
            run,
            lineup,
            self.series,
            training=destination.training,
            gates=self.gates,
            options=options,
            watch={
                "attacks": "auto" if self.selection.auto else "listed",
                **(destination.watch or {"reveal": options.reveal}),
            },
            resumed=earlier,
        )
        next_look = run.step if run.unit == "step" and self.current.series else None
        facts = replace(facts, fit=destination.fit or uuid.uuid4().hex, next_look=next_look)
        self.record.write_begin(run, facts)
        self._log_run_settings(destination, lineup)

    def _log_run_settings(self, destination: log.Destination, lineup: Lineup) -> None:
        """Write the settings of the run to the loggers and to TensorBoard's table of settings."""
        weights = () if self.weights is None else self.weights.attacks
        attacks = [*(plan.attack for plan in lineup.plans), *weights]
        settings = {
            "attacks": [attack.name for attack in attacks],
            "defenses": [defense.name for defense in self.current.run.defenses],
            "gates": [f"{g.metric} at most {g.at_most}: {g.action}" for g in self.gates],
            "stages": [str(stage) for stage in self.options.stages],
            **{attack.name: repr(attack.config()) for attack in attacks},
        }
        worst = [f"{WORST}/{family}" for family in self.results.families]
        try:
            log_settings(destination.loggers, settings, worst)
            add_settings(destination.boards, {**destination.settings, KEY: settings}, worst)
        except Exception as error:
            assert self.report is not None
            self.report.warn_once(f"not every logger has the settings of the run: {reason(error)}")

    def _line_up(self, run: Run, destination: log.Destination) -> Lineup:
        """Create the fit for attacks on gradients, and set up attacks on the trained weights.

        The latter read no step, so that they are not in the lineup of the fit.
        """
        weights = WeightLooks(run, self.channels, self.series, destination.folder)
        self.weights = weights if weights.attacks else None
        in_steps = [c for c in self.channels if c.attacks and isinstance(c, StepChannel)]
        names = {attack.name for channel in in_steps for attack in channel.attacks}
        attacks = tuple(attack for attack in self.selection.attacks if attack.name in names)
        selection = replace(self.selection, attacks=attacks)
        lineup = Lineup(run, selection, self.options, in_steps, self._refused)
        # What a gate watches; all in rounds, behind a defence (may hide one surface), on processes.
        gated = {part for gate in self.gates for part in gate.metric.split("/")}
        runs_all = run.unit == "round" or run.defenses or run.processes > 1
        lineup.needed = names if runs_all else gated
        self.fit = Fit(run, lineup, self.options, self.step_series, in_steps)
        return lineup

    def _show(self, report: log.Report, run: Run) -> None:
        """Lay out the cards and charts of TensorBoard for the series that have results."""
        series = {s: c for s, c in self.series.items() if s in self.results.playing}
        families = {channel.family for channel in series.values()}
        worst = [f"{WORST}/{family}" for family in self.results.families if family in families]
        privacy = record.privacy_tags(record.accounting(run.defenses))
        limits = {g.metric: g.at_most for g in self.gates if g.at_most is not None}
        report.cards = Cards(series, privacy, worst, self.options.utility or (), limits)
        report.cards.add_page(report.boards)

    def training_begins(self) -> None:
        """Begin to count the looks and steps of this run, and plan the first look.

        Integrations call it right before the first step, when a checkpoint has been loaded.
        """
        run = self.current.run
        self.results.begin()
        for channel in self.channels:
            if run.rank and isinstance(channel, StepChannel):  # process 0 has the games of all
                channel.load_state_dict({})
        self._logged_last, self._begin_time = False, time.perf_counter()
        self.first_step, cadence = run.step, self.options.cadence
        cadence.begin(run.step, run.planned_steps, self._set_up_seconds)
        if run.unit == "step" and self.current.series:
            looks = cadence.describe(self.current.lineup.look_seconds)
            run.say(f"{looks}; attacks that wait are tried in between")
        self._logged_names = self.results.names(self.results.playing)
        self.current.lineup.begin(run.step)
        self.current.controls.needs = self.results.needs(self.gates)
        if self.weights is not None:
            self._begin_weights(self.weights)
        if self.options.shares == "model":
            check_any(self.weights, self._refused)
        if self.report is not None:
            self._show(self.report, run)

    def _begin_weights(self, weights: WeightLooks) -> None:
        """Choose the texts that the attacks on the weights compare, and query the base model."""
        for sentence in weights.begin(choosing=self.selection.auto):
            self.run.say(sentence)
        self.results.playing |= weights.series
        if self.record is not None:
            weights.record_pools(self.record)
        if self.report is not None:
            self.report.write_not_played(weights.refusals(), self.current.run.step)
        for listener in self.listeners:
            listener.before_first()

    # ---- steps ------------------------------------------------------------------------------

    @contained
    def batch_begins(self, batch: Any) -> None:
        """Start a look if one is due, and read the batch; see :meth:`Fit.batch_begins`."""
        if self.weights is not None:
            self.weights.batch_begins(batch)
        fit = self.current
        if fit.batch_begins(batch) and self.record is not None:
            step = fit.run.step
            self.record.write_new_plan(step, max(step, fit.scheduler.cadence.next_step))

    @contained
    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that an optimizer step ends with this batch, so gradients no longer accumulate."""
        self.current.optimizer_steps(optimizer)

    @contained
    def _end_batch(self, *, trained: bool) -> bool:
        """Score and publish the look that ends with this batch, if any.

        Returns:
            True; None after an error, by :func:`contained`. The caller then ends the look.
        """
        fit = self.current
        if (ended := fit.batch_ends(trained=trained)) is None:
            return True
        look, outcomes = ended
        if fit.run.step == look.step:
            raise Refusal(RuntimeError(fit.run.uncounted_step))
        final = self.results.final_outcomes(look, outcomes)
        if final is not None:
            self._publish(look, final)
            fit.scheduler.waiting = self.results.waiting
            fit.take_failure()
        elif look.scope is None:
            fit.scheduler.cadence.next_step = fit.run.step
        return True

    def _publish(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        """Add the outcomes of a look to the results, and write them to all destinations."""
        fit = self.current
        utility = self._metrics.changed(fit.run, validation=False)
        spent, shared = record.privacy_values(fit.accounting), bool(fit.lineup.trained)
        outcomes = self.results.add(look, outcomes, utility, spent, shared=shared)
        playing = fit.lineup.playing
        if fit.lineup.doubt(self.results.doubted(fit.controls.limit)):
            fit.follow()
            self.results.forget(playing - fit.lineup.playing)
        fit.run.publish(self.results.latest)
        self._has_news = True
        values, failures = self.results.new_values(), self.results.failures
        if self.report is not None:
            self.report.write(look, outcomes, values, utility, fit.accounting, failures)

    # ---- between looks, the end of a run, and checkpoints -----------------------------------

    def metrics_changed(
        self, *, measured: Iterable[str] = (), epoch_ended: bool | None = False
    ) -> None:
        """Log the user's metrics that are new. A failure is only a warning.

        Args:
            measured: The metrics that were measured just now. They count as new even if their
                values are the same.
            epoch_ended: Whether an epoch has ended, so that the spent privacy budget is logged too.
                None: decide by the progress of the run.
        """
        if self.fit is None or self.report is None:
            return
        try:
            self._metrics.measured(measured)
            run = self.fit.run
            if epoch_ended is None:
                epoch_ended = run.progress is not None and run.progress[1] == 1
            utility = self._metrics.changed(run, sparse=not epoch_ended)
            spending = self.fit.accounting if epoch_ended else ()
            self.results.latest |= self.report.write_between_looks(utility, spending)
        except Refusal as refusal:  # the user's own logger
            raise refusal.error from refusal.error.__cause__
        except Exception as error:
            self.report.warn_once(f"metrics between looks were not written: {reason(error)}")

    def batch_ends(self, *, trained: bool) -> None:
        """Log a look once its optimizer step is over, and look at the weights if that is due.

        Args:
            trained: Whether a gradient was computed for the batch.
        """
        earlier = None if self.fit is None else self.fit.failure
        if not self._end_batch(trained=trained) and self.fit is not None:
            self.fit.end_look()
        self._conclude(earlier)
        fit = self.fit
        if self.weights is not None and fit is not None:
            step_failure = fit.take_failure()  # it waits for the next look at a step
            try:
                self._look_at_weights()
                self._conclude(None)
            finally:
                fit.keep_failure(step_failure)

    def _conclude(self, earlier: str | None) -> None:
        """Publish a failure as unknown results, and call the gates if there are new results.

        Args:
            earlier: The failure before the batch that ends. With several processes, such an older
                failure waits for the next look, where all processes exchange results.
        """
        fit = self.fit
        why = None if fit is None or fit.look is not None else fit.failure
        if fit is not None and why is not None and (fit.run.processes == 1 or why is not earlier):
            fit.take_failure()
            self._publish_failure(why)
        has_news, self._has_news = self._has_news, False
        for listener in self.listeners if has_news else ():
            listener.after_look()

    def _publish_failure(self, why: str) -> None:
        """Publish every result as unknown, after a look that could not be finished."""
        try:
            self._publish(Look(self.run.step), self.results.all_unknown(why))
        except Exception as error:
            self.results.lose_look(self._logged_names)
            self._has_news = True
            with suppress(Exception):
                rank_zero_warn(
                    f"lightning-fedleak: a look failed ({why}), and could not be written "
                    f"({reason(error)}): its results are unknown, not 0; training goes on"
                )

    @contained
    def _look_at_weights(self, *, at_end: bool = False) -> None:
        """Measure the trained weights if that is due, and publish the results."""
        if (weights := self.weights) is not None:
            results = weights.look_at_end() if at_end else weights.look_where_due()
            if results is not None:
                self._publish(*results)

    def look_at_end(self) -> None:
        """Look at the final weights, unless that was already done."""
        self._look_at_weights(at_end=True)
        self._conclude(None)

    def training_ends(self) -> None:
        """Look at the final weights, and publish as *unknown* the results that never came."""
        self.look_at_end()
        self._publish_missing()
        if self.fit is not None:
            self.fit.look = None  # a look that has not ended by now will not end
        self._conclude(None)
        for listener in self.listeners:
            listener.after_training()

    @contained
    def _publish_missing(self) -> None:
        step = self.current.run.step
        if missing := self.results.unknown_at_end(due=self.options.cadence.due(step - 1)):
            self._publish(Look(step), missing)
        self._log_last()

    def _log_last(self) -> None:
        """Log new metrics, the spent budget, and each metric's best value at its step, once."""
        if self._logged_last or self.report is None:
            return
        self._logged_last = True
        run = self.current.run
        utility = self._metrics.changed(run)
        self.results.latest |= self.report.write_between_looks(utility, self.current.accounting)
        for name, (step, value) in self._metrics.best.items():
            best = {f"utility/{name}_best": value}
            self.report.log(best, step)
            run.publish(best)
            self.results.latest |= best

    @contained
    def end(self, how: str) -> record.RunRecord | None:
        """End the record of the run, and return it; None if it has ended before.

        Args:
            how: ``"finished"``, or the class of the error that ended the run.
        """
        if self.fit is not None and how != "finished":
            try:
                self._log_last()
            except Exception as error:  # raising it would hide the error that ended the run
                assert self.report is not None
                self.report.warn_once(f"the last numbers were not logged: {reason(error)}")
        if self.record is None or self.record.ended:
            return None
        self._ended_summary = self._summary()
        self.record.write_end(self.current.run, how)
        if self.report is not None:
            reference = 0.0 if self.weights is None else self.weights.reference_seconds
            run_seconds = time.perf_counter() - self._begin_time - reference
            self.report.ends(self.first_step, self._set_up_seconds, run_seconds, reference)
        return self.record

    def close(self) -> None:
        """Remove every tap, also if one of them raises an error. May be called twice."""
        parts = (self.fit, None if self.report is None else self.report.cards, self.record)
        closers = [part.close for part in parts if part is not None]
        failure = None
        for close in [*closers, *(remove for c in self.channels for remove in c.removers)]:
            try:
                close()
            except Exception as error:
                failure = reason(error)
        if failure := failure or (None if self.fit is None else self.fit.failure):
            with suppress(Exception):  # a filter may turn warnings into errors
                rank_zero_warn(f"lightning-fedleak: the end of a run failed: {failure}")
        self.listeners, self._has_news = [], False
        self.fit = self.report = self.record = self.weights = None

    def _summary(self) -> dict[str, object]:
        """Return the facts of the run for a checkpoint: its id, and its defences' releases."""
        if self.record is None:
            return self._ended_summary
        return {"run": self.record.run, "privacy": record.releases_by(self.current.accounting)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, plain values and tensors; empty if that fails."""
        if self.record is not None and self.fit is not None:
            self.record.add_checkpoint(self.fit.run)
        return self._state() or {}

    @contained
    def _state(self) -> dict[str, Any]:
        states = [channel.state_dict() for channel in self.channels]
        return {
            **self.results.state_dict(),
            "fit": self._summary(),
            "utility": self._metrics.state_dict(),
            **{name: value for state in states for name, value in state.items()},
            "attacks": self.calibrations(),
        }

    def calibrations(self) -> dict[str, object]:
        """Return the calibrations of the attacks, for :meth:`reuse`."""
        return {
            a.name: {
                "config": a.fingerprint(),
                "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
            }
            for a in self.selection.attacks
            if a.name in self._prepared
        }

    def reuse(self, calibrations: Mapping[str, Any]) -> None:
        """Use the calibrations of another run, for attacks whose settings are equal.

        Args:
            calibrations: The :meth:`calibrations` of a run that began with the same weights.
        """
        self._calibrations = {n: saved for n, saved in calibrations.items() if saved["tensors"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        if not state:
            return
        self.results.load_state_dict(state)
        for channel in self.channels:
            channel.load_state_dict(state)
        self.earlier = state.get("fit") or {}
        self._metrics.load_state_dict(state.get("utility", {}))
        self.reuse(state["attacks"])
