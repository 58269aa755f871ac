"""The engine of a watched run: it runs attacks at looks, and scores, logs and stores results.

A face owns an :class:`Engine` and reports the moments of its training to it::

    engine = Engine(selected("auto"), Options())
    engine.reset()
    engine.check(processes, anatomy)       # before the model is on its device
    engine.open(run)
    engine.begin(run, destination)         # calibrates; raises where an attack does not fit
    for batch in loader:
        engine.batch_begins(batch)
        engine.loss_computed(loss)         # before backward
        engine.optimizer_steps(optimizer)  # before the step
        engine.batch_ends(trained=True)    # after it
    engine.training_ends()
    engine.end("finished")
    engine.close()
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine import log
from lightning_fedleak.engine.channels.base import Channel, channels_of
from lightning_fedleak.engine.facts import defense_facts, facts_of
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.engine.lineup import Lineup, check_tokens
from lightning_fedleak.engine.options import Options, Selection, check_optimizers, check_rounds
from lightning_fedleak.engine.results import MAX_WAITS, WORST, Results, series_of
from lightning_fedleak.engine.run import (
    CHOOSE,
    Look,
    Outcome,
    Processes,
    Refusal,
    Run,
    Series,
    contained,
    reason,
)
from lightning_fedleak.engine.tensorboard import Content, add_pages, add_table
from lightning_fedleak.engine.weights import Memory, WeightLooks
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot
from lightning_fedleak.report import records


class Engine:
    """Watch runs: decide when to look, let attacks guess, score, log and remember.

    Args:
        selection: the attacks.
        options: how a run is watched.
        origin: the engine that calibrates the attacks, if this one is of a client in its rounds.

    Attributes:
        channels: one for each family of leak.
        series: the channel of each series, in the order of the logs.
        results: of all looks of the newest run.
        assume: what the adversary has besides what it sees.
        fit: the run at work; None between runs.
        jsonl: the results' file of the newest run.
        weights: looks at the trained weights; None where no attack reads them.
        record: says what the run was, on the first process; None outside of a run.
        report: writes what looks found; None outside of a run.
        first_step: optimizer steps that were over when the newest run began.

    Raises:
        ValueError: contradictory options.
    """

    def __init__(
        self, selection: Selection, options: Options, origin: Engine | None = None
    ) -> None:
        if origin is None:  # which has been checked; a sum over clients is at another stage
            check_rounds(options.local_steps, options.stages, head_own_part=options.head_own_part)
        self.selection = selection
        self.options = options
        self._origin = origin
        self.channels = channels_of(selection.attacks, options)
        self.series = series_of(selection.attacks, self.channels, options.stages)
        adversaries = frozenset().union(*(c.adversary for c in self.channels if c.attacks))
        self.assume = adversaries if selection.assume is None else selection.assume
        self.results = Results(self.series)
        if origin is not None:
            self.results = Results(self.series, most_waited=MAX_WAITS)
        self.fit: Fit | None = None
        self.jsonl: log.JsonLines | None = None
        self.record: log.RunRecord | None = None
        self.report: log.Report | None = None
        self.first_step = 0
        self._names: list[str] = []
        self._calibrations: dict[str, object] = {}
        self._earlier: dict[str, object] = {}
        self._last: dict[str, object] = {}
        self._metrics = log.UserMetrics()
        self._logged: dict[str, tuple[int, float]] = {}  # the newest between looks, and when
        self._is_over = False
        self._spent: tuple[str | int | None, tuple[Defense, ...]] = None, ()
        self.weights: WeightLooks | None = None
        self._prepared: set[str] = set()
        self._refused: dict[str, str] = {}
        self._described: list[Defense] = []
        self._forget_listeners()

    def _forget_listeners(self) -> None:
        self._after_look: list[Callable[[], None]] = []
        self._after_training: list[Callable[[], None]] = []
        self._before_first: list[Callable[[], None]] = []
        self._decisions: list[str] = []
        self._gates: list[Mapping[str, object]] = []
        self._needs: dict[str, float] = {}
        self._has_news = False

    def fail(self, error: Exception) -> None:
        """Let the look at work, or the next one, have no result, because of an error of ours."""
        if self.fit is not None:
            self.fit.fail(error)

    # ---- what a gate asks -------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of the values that are logged at each look."""
        return ["monitor/failures", "monitor/seconds", *self.results.names()]

    def subscribe(
        self,
        after_look: Callable[[], None] | None = None,
        logs: Sequence[str] = (),
        *,
        threshold: tuple[str, float] | None = None,
        facts: Mapping[str, object] | None = None,
        before_first: Callable[[], None] | None = None,
        after_training: Callable[[], None] | None = None,
    ) -> None:
        """Call functions of a gate at moments of the run, until it ends; on every process.

        Args:
            after_look: is called after each look.
            logs: names of the values that it logs then, for TensorBoard's page.
            threshold: name of the value that it judges, and what is allowed: controls must exceed
                it, see :mod:`lightning_fedleak.engine.channels.control`.
            facts: what ``run.jsonl`` records of the subscriber, a gate.
            before_first: is called once it is known what is read, before the first step.
            after_training: is called when training ends, after the last results.
        """
        if after_look is not None:
            self._after_look.append(after_look)
        self._decisions += [name for name in logs if name not in self._decisions]
        if facts is not None and facts not in self._gates:
            self._gates.append(facts)
        if threshold is not None and (channel := self.channel_of(threshold[0])) is not None:
            family = channel.family
            self._needs[family] = max(threshold[1], self._needs.get(family, threshold[1]))
        if before_first is not None:
            self._before_first.append(before_first)
        if after_training is not None:
            self._after_training.append(after_training)

    def channel_of(self, name: str) -> Channel | None:
        """Return the channel of a logged value, or of a family's worst; None: nobody's."""
        root, _, family = name.rpartition("/")
        for series, channel in self.series.items():
            if root == series.log_name or (root == WORST and channel.family == family):
                return channel
        return None

    def is_looks_dependent(self, name: str) -> bool:
        """Return whether the looks of a logged value are of the same texts."""
        channel = self.channel_of(name)
        return channel is not None and channel.looks_dependent

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the log names that ``leakage/worst/<family>`` is the highest of, or none."""
        root, _, family = name.rpartition("/")
        if root != WORST or name not in self.results.names():
            return ()
        return self.results.headlines(family)

    def untested(self, name: str) -> str:
        """Return which attack on the family of ``leakage/worst/<family>`` lacks text, or ``""``."""
        return self.results.untested.get(name.removeprefix(f"{WORST}/"), "")

    def unread(self, name: str) -> str | None:
        """Return why a logged value says nothing of what is shared now; None: it does.

        Nothing is tested of an attack that is not played. One whose surface is not shared reads 0,
        and where no attack of its family reads anything, that says nothing of what is shared
        instead.

        Args:
            name: of the value in the logs.
        """
        lineup, root = self._fit.lineup, name.rpartition("/")[0]
        attack = next((s.attack for s in self.series if s.log_name == root), None)
        channel = self.channel_of(name)
        if channel is None:
            return None
        if self.weights is not None and channel.at_weights:
            return self.weights.unread(None if attack is None else {attack})
        if attack is not None and attack not in lineup.playing:
            why = {row.attack: row.why_not for row in lineup.rows}[attack]
            return f"'{attack}' is not played in this run: {why}"
        return lineup.unread_family(channel.family)

    def judge(self, name: str, value: float, at_most: float) -> records.Judgement:
        """Return what a logged value counts for at a gate's threshold.

        See :func:`~lightning_fedleak.report.records.judged`.

        Args:
            name: of the value in the logs.
            value: at the newest look.
            at_most: the gate's threshold.
        """
        root, _, metric = name.removesuffix("_worst_client").rpartition("/")
        metric = metric.removesuffix("_low").removesuffix("_high")
        series = next((s for s in self.series if s.log_name == root), None)
        control = None if series is None else self.results.controls.get(series)
        if series is None or control is None:
            return records.Judgement(value)
        channel = self.series[series]
        return records.judged(
            value,
            control.rates.get(metric),
            part=control.part.get(metric, math.nan),
            at_most=at_most,
            chance=channel.ranges.get(metric, (0.0, 1.0, 0.0))[2],
            known=channel.leak.known,
            failure=control.why,
        )

    def judge_worst(
        self, values: Mapping[str, float], at_most: float
    ) -> dict[str, records.Judgement]:
        """Return what the headlines of a family count for at a gate's threshold.

        One whose control is low says nothing, and is left out where another attack that reads the
        same gradients has a control that is not.

        Args:
            values: the known headlines, by log name.
            at_most: the gate's threshold.
        """
        judgements = {name: self.judge(name, value, at_most) for name, value in values.items()}
        plans = {plan.attack.name: plan for plan in self._fit.lineup.plans}
        roots = {series.log_name: series.attack for series in self.series}

        def roles(name: str) -> set[str]:
            plan = plans.get(roots.get(name.rpartition("/")[0], ""))
            return set() if plan is None else set(plan.roles)

        read: set[str] = set()
        for name, one in judgements.items():
            read |= set() if math.isnan(one.value) else roles(name)
        return {
            name: one
            for name, one in judgements.items()
            if not math.isnan(one.value) or not roles(name) & read
        }

    def others_on(self, name: str) -> str:
        """Return attacks that are not in use, read this run, and are of a logged value's family."""
        channel = self.channel_of(name)
        family = name.rpartition("/")[2] if channel is None else channel.family
        return self._fit.lineup.others_on(family)

    def record_decision(self, decision: records.GateDecision) -> None:
        """Leave a line in ``run.jsonl``, on the first process."""
        if self.record is not None:
            self.record.append(records.GateLine(run="", **vars(decision)))

    def canary_scores(self, attack: str | None) -> Tensor:
        """Return (m,) one score for each of the user's canaries.

        Raises:
            ValueError: none are kept, no such attack, or no look has scored them.
        """
        for channel in self.channels:
            if (scores := channel.canary_scores(attack)) is not None:
                return scores
        raise ValueError("canaries are scored with games=Games(canaries=..., score_canaries='max')")

    # ---- a run begins -----------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """Return the run at work."""
        return self._fit.run

    @property
    def _fit(self) -> Fit:
        """The run at work."""
        if self.fit is None:
            raise RuntimeError("no run has begun: Engine.begin(run, destination) comes first")
        return self.fit

    def reset(self) -> None:
        """Forget the looks of an earlier run."""
        self.results.clear()
        self._metrics = log.UserMetrics()
        for channel in self.channels:
            channel.attacks = channel.listed_attacks
            channel.clear()
        self.results.reset_families()

    def check(self, processes: Processes, anatomy: Callable[[], Anatomy]) -> None:
        """Check what can be checked before the model is on its device.

        Args:
            processes: how the run is spread.
            anatomy: finds the model's parts.

        Raises:
            ValueError: an attack that the user listed does not fit the run.
        """
        ranks = processes.count > 1 and processes.client == "rank"
        if self.options.local_steps is not None and ranks:
            raise ValueError(
                "local_steps describes one client that trains on its own; DDP averages at every "
                "step. Use client='world', or run one process."
            )
        self._refused = {}
        for channel in self.channels:
            try:
                channel.setup(processes, anatomy)
            except ValueError as error:
                if not self.selection.auto:
                    raise
                self._refused |= {attack.name: str(error) for attack in channel.attacks}

    def open(self, run: Run) -> None:
        """Open the channels on a run.

        Args:
            run: the run; what it trains is on its device.

        Raises:
            ValueError: public text of another vocabulary, no optimizer, or a channel that does not
                fit the run.
        """
        attacks, options = self.selection.attacks, self.options
        check_tokens(attacks, options.games.held_out, options.tokenizer, run.anatomy)
        check_optimizers(run.optimizers, attacks)
        for channel in self.channels:
            if channel.attacks:
                channel.open(run)

    def begin(self, run: Run, destination: log.Destination) -> None:
        """Calibrate the attacks, install the taps and begin the record.

        Args:
            run: the run, on which the channels are open.
            destination: where results go.

        Raises:
            ValueError: an attack does not fit the model or the run.
        """
        options, first = self.options, run.rank == 0
        self.jsonl = log.JsonLines(destination.folder / "leakage.jsonl")
        reveal = log.RevealFiles(destination.folder, run.rank, options.tokenizer)
        self._described = list(run.defenses)
        self.report = report = log.Report(
            run,
            destination,
            self.selection.attacks,
            self.jsonl if first else None,
            reveal if options.reveal else None,
            options.local_steps,
        )
        lineup = self._line_up(run, destination)
        self._prepared = lineup.prepared
        calibrations, self._calibrations = self._calibrations, {}
        earlier, self._earlier = self._earlier, {}
        self._fit.calibrate(calibrations)
        self.results.playing = {s for s in self.series if s.attack in lineup.playing}
        if self.weights is not None and not self.selection.auto:
            self.results.playing |= self.weights.series
        self.results.untested = lineup.untested
        lineup.show(self.assume)
        if self.selection.auto:
            report.write_not_played(lineup.rows, run.step)
        self._add_table(destination, self._content(run))
        for listener in self._before_first:
            listener()
        if first:
            self.record = log.RunRecord(
                destination.folder / "run.jsonl", self.jsonl.run, report.warn_once
            )
            facts = facts_of(
                run,
                lineup,
                self.series,
                training=destination.training,
                gates=self._gates,
                options=options,
                watch={
                    "attacks": "auto" if self.selection.auto else "listed",
                    **(destination.watch or {"reveal": options.reveal}),
                },
                resumed=earlier,
            )
            self.record.begins(replace(facts, fit=destination.fit or uuid.uuid4().hex))

    def _line_up(self, run: Run, destination: log.Destination) -> Lineup:
        """Begin the fit, and return its line-up: attacks on weights apart from those on steps."""
        in_steps, series = self._split(run, destination.folder)
        names = {attack.name for channel in in_steps for attack in channel.attacks}
        attacks = tuple(attack for attack in self.selection.attacks if attack.name in names)
        selection = replace(self.selection, attacks=attacks)
        lineup = Lineup(run, selection, self.options, in_steps, self._refused)
        self.fit = Fit(run, lineup, self.options, series, in_steps)
        return lineup

    def _split(self, run: Run, folder: Path) -> tuple[list[Channel], dict[Series, Channel]]:
        """Prepare looks at the weights, and return the other channels with their series."""
        weights = WeightLooks(run, self.channels, self.series, folder)
        self.weights = weights if weights.attacks else None
        series = {s: c for s, c in self.series.items() if not c.at_weights}
        return [c for c in self.channels if c.attacks and not c.at_weights], series

    def join(
        self, run: Run, destination: log.Destination, memory: Memory = MappingProxyType({})
    ) -> None:
        """Begin the run of one client, whose attacks the origin has calibrated.

        Args:
            run: the origin's run, as this client.
            destination: where this client's results go.
            memory: what :attr:`weights` knew of this client in an earlier round.

        Raises:
            ValueError: a listed attack on the trained weights cannot be played.
        """
        assert self._origin is not None
        lineup = self._origin._fit.lineup
        self.jsonl, self.record = self._origin.jsonl, self._origin.record
        attacks, rounds = self.selection.attacks, self.options.local_steps
        self.report = log.Report(run, destination, attacks, self.jsonl, None, rounds)
        plans = {plan.attack.name: plan for plan in lineup.plans}
        for channel in (channel for channel in self.channels if channel.attacks):
            channel.open(run)
            if not channel.at_weights:
                channel.leave_out({attack.name for attack in channel.attacks} - plans.keys())
                channel.follow([plans[attack.name] for attack in channel.attacks])
        in_steps, series = self._split(run, destination.folder / f"client_{destination.client}")
        self.fit = Fit(run, lineup, self.options, series, in_steps)
        self.results.playing = {s for s in self.series if s.attack in lineup.playing}
        self.results.untested = lineup.untested
        self.results.begin()
        self._decisions = self._origin._decisions
        if self.weights is not None:
            self.weights.remember(memory)
            self._begin_weights(self.weights)
        try:
            self._add_table(destination, content := self._content(run))
            add_pages(destination.boards, self.options.utility, self._decisions, content)
        except Exception as error:  # a disk that is full must not end a round
            self.report.leave_loggers(error)

    def _add_table(self, to: log.Destination, content: Content) -> None:
        names = [f"utility/{name}" for name in self.options.utility] + [*to.further]
        add_table(to.boards, names, to.settings, content)

    def _content(self, run: Run) -> Content:
        """Return what TensorBoard shows, as far as it is known."""
        series = {s: c for s, c in self.series.items() if s in self.results.playing}
        families = {channel.family for channel in series.values()}
        worst = [f"{WORST}/{family}" for family in self.results.families if family in families]
        return Content(series, log.privacy_tags(log.accounting(run.defenses)), worst)

    def training_begins(self) -> None:
        """Remember how many looks came before this run, and where it starts."""
        run = self._fit.run
        self.results.begin()
        for channel in self.channels:
            if run.rank != 0 and not channel.at_weights:  # it has all clients' games
                channel.clear()
        self._is_over = False
        self.first_step = self.options.cadence.next_step = run.step
        self._names = self.results.names(self.results.playing)
        self._names += [f"{WORST}/{family}" for family in self.results.families]
        self._fit.lineup.begin(run.step)
        self._fit.controls.needs = self._needs
        if self.weights is not None:
            self._begin_weights(self.weights)
        if self.report is not None:
            boards, content = self.report.boards, self._content(run)
            add_pages(boards, self.options.utility, self._decisions, content)

    def _begin_weights(self, weights: WeightLooks) -> None:
        """Find out whom the attacks on the weights compare, and ask the base model."""
        for sentence in weights.begin(choosing=self.selection.auto):
            rank_zero_info(f"{self._fit.run.watcher}: {sentence}")
        self.results.playing |= weights.series
        if self.record is not None:
            weights.record_pools(self.record)
        if self.report is not None:
            self.report.write_not_played(weights.rows(), self._fit.run.step)
        for begins in self._before_first:
            begins()

    # ---- a step -----------------------------------------------------------------------------

    # What these raise ends no training: it is a failure of the look. Gates are asked beside them.

    @contained
    def batch_begins(self, batch: Any) -> None:
        """Start a look where one is due, and take the truth before any defence acts.

        Raises:
            Exception: the first batch cannot be read.
        """
        if self.weights is not None:
            self.weights.batch_begins(batch)
        self._fit.batch_starts(self._fit.run.step, batch)

    @contained
    def loss_computed(self, loss: Tensor) -> None:
        """Note which parameters have a term of their own in the loss, such as an L2 penalty."""
        self._fit.before_backward(loss)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that this batch ends an optimizer step, and does not only accumulate gradients."""
        if not self._note_step(optimizer) and self.fit is not None:
            self.fit.tried = True

    @contained
    def _note_step(self, optimizer: Optimizer) -> bool:
        self._fit.before_step(optimizer)
        return True

    def batch_ends(self, *, trained: bool) -> None:
        """Log a look once its optimizer step is over, and one at the weights where it is due.

        Args:
            trained: the batch gave a gradient.

        Raises:
            RuntimeError: an optimizer stepped, and the run did not count it.
            Exception: what a gate raises.
        """
        earlier = None if self.fit is None else self.fit.failure
        if not self._end_step(trained=trained) and self.fit is not None:
            self.fit.drop_look()
        self._conclude(earlier)
        self._look_at_weights()
        self._conclude(None)

    def _conclude(self, earlier: str | None) -> None:
        """Publish what failed, unless a look of all processes will, and let the gates judge.

        Args:
            earlier: what had failed before the look ended, which the next look of all processes
                publishes.
        """
        fit = self.fit
        if fit is not None and fit.failure is not None and fit.look is None:
            alone = fit.run.processes == 1
            if alone or fit.failure is not earlier:
                why, fit.failure = fit.failure, None
                self._publish_failure(why)
        has_news, self._has_news = self._has_news, False
        for listener in self._after_look if has_news else ():
            listener()

    @contained
    def _end_step(self, *, trained: bool) -> bool:
        """Publish a look that has ended, and return that this went well."""
        fit = self._fit
        ended = fit.step_ends(trained)
        if ended is None:
            return True
        look, outcomes = ended
        if self.run.step == look.step:
            raise Refusal(RuntimeError(self.run.uncounted_step))
        settled = self.results.settled(look, outcomes)
        if settled is not None:
            self._publish(look, settled)
            fit.waiting, fit.failure = self.results.waiting, None
        elif look.scope is None:
            self.options.cadence.next_step = self.run.step
        return True

    @contained
    def _look_at_weights(self) -> None:
        if self.weights is not None and (channels := self.weights.due()):
            self._publish(*self.weights.look(channels))

    def _publish_failure(self, why: str) -> None:
        """Publish that every result is unknown, where a look could not end as looks do."""
        try:
            self._publish(Look(self.run.step), self.results.all_unknown(why))
        except Exception as error:
            results = self.results
            results.latest = dict.fromkeys(self._names, math.nan)
            results.failures += len(results.playing)
            results.latest["monitor/failures"] = float(results.failures)
            results.look_values = results.latest
            results.looks += 1
            self._has_news = True
            with suppress(Exception):
                rank_zero_warn(
                    f"lightning-fedleak: a look failed ({why}), and could not be written "
                    f"({reason(error)}): its results are unknown, not 0; training goes on"
                )

    def _publish(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        run = self._fit.run
        utility = self._metrics.add(run.metrics(self.options.utility), run.step)
        defenses = log.accounting(run.defenses)
        outcomes = self.add(look, outcomes, utility, log.privacy_values(defenses))
        run.publish(self.results.latest)
        self._has_news = True
        self.write(look, outcomes, self.new_values(), utility, defenses)

    def metrics_changed(self, *, epoch_ended: bool | None = False) -> None:
        """Log the user's metrics where they changed since they were logged, between looks.

        What fails here ends no training and is no failure of a look: a warning is given.

        Args:
            epoch_ended: log what the defences have spent until now as well; None: where the run's
                progress says that an epoch has ended.
        """
        if self.fit is None or self.report is None:
            return
        try:
            run = self.fit.run
            if epoch_ended is None:
                epoch_ended = run.progress is not None and run.progress[1] == 1
            utility = self._metrics.changed(run.metrics(self.options.utility), run.step)
            self._log_between_looks(utility, log.accounting(run.defenses) if epoch_ended else ())
        except Refusal as refusal:  # the user's own logger
            raise refusal.error from refusal.error.__cause__
        except Exception as error:
            self.report.warn_once(f"metrics between looks were not written: {reason(error)}")

    def _log_between_looks(
        self,
        utility: Mapping[str, float],
        defenses: Sequence[Defense],
        client: str | int | None = None,
    ) -> None:
        """Write the user's metrics, and what defences have spent, but nothing twice at a step."""
        run = self._fit.run
        values = {f"utility/{name}": value for name, value in utility.items()}
        values |= log.privacy_values(defenses)
        values = {n: v for n, v in values.items() if self._logged.get(n) != (run.step, v)}
        self._logged |= {name: (run.step, value) for name, value in values.items()}
        if not values or self.report is None:
            return
        self.results.latest |= values
        run.publish(values)
        self.report.log(values, run.step)
        if self.record is not None:
            new = {n: v for n, v in self._metrics.last.items() if f"utility/{n}" in values}
            spent = log.spendings(defenses)
            line = records.MetricsLine(
                run="", step=run.step, client=client, utility=new, privacy=spent
            )
            self.record.append(line)

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

    def new_values(self) -> dict[str, float]:
        """Return the newest values by log name, of what the newest look is of."""
        new = self.results.look_values
        return {name: value for name, value in self.results.latest.items() if name in new}

    def write(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        values: Mapping[str, float],
        utility: Mapping[str, float],
        defenses: Sequence[Defense],
        client: str | int | None = None,
    ) -> None:
        """Write a look to the loggers and the files.

        Args:
            look: the look.
            outcomes: by series.
            values: by log name.
            utility: the user's metrics, by name.
            defenses: those that account for what they release.
            client: whose round it was; what the defences have spent is written beside it.
        """
        report = self.report
        assert report is not None
        if self._origin is not None:
            values = log.privacy_values(defenses) | dict(values)
            self._origin.describe(defenses)
            self._spent = client, tuple(defenses)
        for channel in dict.fromkeys(self.series.values()):
            shown = {s: o for s, o in outcomes.items() if self.series[s] is channel}
            try:
                channel.published(look, shown, report)
            except Exception as error:
                report.warn_once(f"not all of a look was written: {reason(error)}")
        report.write(look, outcomes, values)
        if self.record is not None:
            self.record.append(
                records.LookLine(
                    run="",
                    step=look.step,
                    client=client,
                    utility=utility,
                    privacy=log.spendings(defenses),
                    seconds=look.seconds,
                    failures=self.results.failures,
                )
            )

    # ---- a round ----------------------------------------------------------------------------

    def describe(self, defenses: Sequence[Defense]) -> None:
        """Write of defences that the record's first line does not have, once."""
        for defense in defenses:
            if self.record is not None and all(defense is not one for one in self._described):
                self._described.append(defense)
                facts = vars(defense_facts(defense))
                self.record.append(records.DefenseLine(run="", **facts))

    def read_update(
        self, look: Look, batches: Sequence[Any] | None, take: Callable[[], GradientSnapshot]
    ) -> dict[Series, Outcome]:
        """Let the attacks read a client's update, see :meth:`Fit.read_update`."""
        return self._fit.read_update(look, batches, take)

    # ---- ends and checkpoints ---------------------------------------------------------------

    @contained
    def rounds_end(self) -> None:
        """Log what defences have spent in all rounds of this client, its unlooked ones too."""
        client, defenses = self._spent
        self._log_between_looks({}, defenses, client)

    def look_at_end(self) -> None:
        """Look at the weights that the training ends with, unless that was done."""
        self._look_at_last_weights()
        self._conclude(None)

    @contained
    def _look_at_last_weights(self) -> None:
        if self.weights is not None and (looked := self.weights.look_at_end()) is not None:
            self._publish(*looked)

    def training_ends(self) -> None:
        """Publish *unknown* of a run in which looks were due and none could end."""
        self.look_at_end()
        self._publish_rest()
        if self.fit is not None:
            self.fit.look = None  # one that has not ended will not
        self._conclude(None)
        for listener in self._after_training:
            listener()

    @contained
    def _publish_rest(self) -> None:
        for step, outcomes in () if self.weights is None else self.weights.chosen():
            self._publish_chosen(step, outcomes)
        step = self._fit.run.step
        missing = self.results.missing(due=self.options.cadence.due(step - 1))
        if missing:
            self._publish(Look(step), missing)
        self._metrics.add(self.run.metrics(self.options.utility), step)
        self._log_last()

    def _log_last(self) -> None:
        """Log the last and the best of the user's metrics, and what was spent in all, once."""
        if not self._is_over:
            self._is_over = True
            self._log_between_looks(self._metrics.at_end(), log.accounting(self.run.defenses))

    def _publish_chosen(self, step: int, outcomes: Mapping[Series, Outcome]) -> None:
        """Log what texts that chose nothing show of the weights that were chosen."""
        values = {n: v for s, o in outcomes.items() for n, v in o.values(s.log_name).items()}
        self.results.latest |= values
        self._fit.run.publish(values)
        assert self.report is not None
        self.report.write(Look(step), outcomes, values)
        rank_zero_info(f"{self._fit.run.watcher}: {CHOOSE} is lowest at step {step}")

    @contained
    def end(self, how: str) -> log.RunRecord | None:
        """End the run's record.

        Args:
            how: ``"finished"``, or the class of what was raised.

        Returns:
            The record; None where it has ended before, and on processes that write none.
        """
        if self.fit is not None and how != "finished":
            try:
                self._log_last()
            except Exception as error:  # the run ends by an error of its own, which counts
                assert self.report is not None
                self.report.warn_once(f"the last numbers were not logged: {reason(error)}")
        if self.record is None or self.record.ended:
            return None
        self._last = self._summary()
        run = self._fit.run
        self.record.ends(run.step, how, log.accounting(run.defenses))
        return self.record

    def close(self) -> None:
        """Remove every tap, whatever one of them raises; may be called twice."""
        closers = [] if self.fit is None else [self.fit.close]
        failure = None
        for close in [*closers, *(channel.close for channel in self.channels)]:
            try:
                close()
            except Exception as error:
                failure = reason(error)
        if failure := failure or (None if self.fit is None else self.fit.failure):
            with suppress(Exception):  # which warnings may be made
                rank_zero_warn(f"lightning-fedleak: the end of a run failed: {failure}")
        self._forget_listeners()
        self.fit = self.report = self.record = self.weights = None

    def _summary(self) -> dict[str, object]:
        """Return what a checkpoint keeps of the run: its id, and the releases of its defences."""
        if self.record is None:
            return self._last
        defenses = log.accounting(self._fit.run.defenses)
        return {"run": self.record.run, "privacy": log.releases_by(defenses)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with: plain numbers, strings and tensors.

        It is empty where that failed: a checkpoint is saved all the same, and one that is resumed
        from it begins its looks again.
        """
        return self._state() or {}

    @contained
    def _state(self) -> dict[str, Any]:
        states = [channel.state_dict() for channel in self.channels]
        return {
            **self.results.state_dict(),
            "fit": self._summary(),
            "utility": self._metrics.state_dict(),
            **{name: value for state in states for name, value in state.items()},
            "attacks": {
                a.name: {
                    "config": a.fingerprint(),
                    "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
                }
                for a in self.selection.attacks
                if a.name in self._prepared
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        if not state:
            return
        self.results.load_state_dict(state)
        for channel in self.channels:
            channel.load_state_dict(state)
        self._earlier = state.get("fit") or {}
        self._metrics.load_state_dict(state.get("utility", {}))
        self._calibrations = {
            name: saved for name, saved in state["attacks"].items() if saved["tensors"]
        }
