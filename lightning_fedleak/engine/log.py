"""Write the results of looks to the loggers, ``leakage.jsonl`` and ``run.jsonl``.

A *look* is one measurement at a step or round, or of the trained weights. A *series* is the results
of one attack at one stage of the gradient's way. At a look it has an outcome: rates, or the reason
why they are *unknown* (a failure) or *pending* (nothing to read yet).

These files hold numbers only. Recovered words and texts go to private files, if the user asks for
them (``reveal=True``).
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedleak.attacks import Attack
from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.lineup import Row
from lightning_fedleak.engine.loggers import Cards, upload_report
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.record import RunRecord, privacy_values, spendings
from lightning_fedleak.engine.run import Look, Refusal, Run, reason
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.private_files import RevealFiles
from lightning_fedleak.report import records
from lightning_fedleak.report.records.lines import best_of, is_training, is_validation

if TYPE_CHECKING:
    import pandas as pd
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = (
    *("step", "stage", "client", "attack", "n", "exposed"),
    "metric",
    *("value", "low", "high"),
    "unknown",
)
"""Columns of a row of :meth:`JsonLines.rows`: six facts of the look and the attack, the name of a
metric, its value and interval, and why it is unknown."""
TRAINING_STEPS = 50
"""Steps between two logged values of a training metric; the default of Lightning's own logging.

With a larger value a curve has fewer points; with a smaller one ``run.jsonl`` is longer, and every
value on a GPU has to be waited for.
"""


@dataclass(frozen=True)
class Destination:
    """The files and loggers to which the results of a run are written.

    Attributes:
        folder: The folder of ``leakage.jsonl``, ``run.jsonl`` and recovered words and texts.
        loggers: The loggers of every finite value, with ``log_metrics`` as those of a Trainer;
            without those of TensorBoard.
        boards: The writers of TensorBoard, on the process that writes.
        training: The settings of the training, for the record.
        settings: The settings of the user, for TensorBoard's table of them.
        fit: An id that all monitors of this run share; None makes one.
        client: The client of the results in lines; None for the run's process, or for results that
            are pooled over processes.
        watch: Settings of the integration for the record, besides the engine's options.
    """

    folder: Path
    loggers: Sequence[Any] = ()
    boards: Sequence[SummaryWriter] = ()
    training: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    fit: str | None = None
    client: str | int | None = None
    watch: Mapping[str, object] = field(default_factory=dict)


def own_folder(run: Run, folder: Path, *ids: object) -> Path:
    """Return a folder, or ``version_<n>`` in it, that holds logs of no other run.

    Args:
        run: The run, before it begins. All its processes get the folder that the first one chose.
        folder: The folder that the user asks for.
        ids: The ids of runs whose logs may be in the folder, such as the run that is resumed.

    Raises:
        OSError: The first process cannot read or make a folder. It is raised on all processes.
    """
    answer: Path | OSError = folder
    if run.rank == 0:
        try:
            answer = _free_folder(folder, [str(run_id) for run_id in ids if run_id])
        except OSError as error:
            answer = error  # the other processes wait for an answer
    chosen = run.broadcast(answer)
    if isinstance(chosen, OSError):
        raise chosen
    if chosen != folder:
        run.say(f"{folder} holds logs of another run; those of this one: {chosen}")
    return chosen


def _free_folder(folder: Path, ids: Sequence[str]) -> Path:
    """Return the first of the folder and its ``version_<n>`` that is free for this run.

    A folder is free if it holds no logs, or logs of one of the ids.
    """
    for n in count():
        place = folder / f"version_{n}" if n else folder
        logs = [log for file in ("run.jsonl", "leakage.jsonl") if (log := place / file).exists()]
        readable = (log for log in logs if ids and os.access(log, os.R_OK))
        if any(run_id in log.read_text("utf-8", "replace") for log in readable for run_id in ids):
            break
        if not logs:
            with suppress(FileExistsError):  # another run has made it, and written nothing yet
                if n:
                    place.mkdir(parents=True)
                break
    return place


class JsonLines:
    """Append one line for each look, stage, client and attack to ``leakage.jsonl``.

    Args:
        path: The file. Its folder is made when the first line is written.

    Attributes:
        path: The argument.
        run: The id of this fit in every line, because resumed fits append to the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = uuid.uuid4().hex[:12]
        self._written = False

    def append(self, line: records.ResultLine) -> None:
        """Write one result, or why it is unknown.

        Raises:
            OSError: The file cannot be written.
        """
        records.append_line(self.path, line)
        self._written = True

    def rows(self) -> list[dict[str, object]]:
        """Return the lines of this fit, with one row for each metric of each line.

        Unknown numbers are NaN. A line without metrics, such as that of an attack that does not
        run, becomes one row whose metric is None.

        Raises:
            OSError: The file cannot be read any more.
        """
        if not self._written:
            return []
        self.path.stat()
        rows = []
        for line in records.read_lines(self.path).lines:
            if not isinstance(line, records.ResultLine) or line.run != self.run:
                continue
            facts = {column: getattr(line, column) for column in COLUMNS[:6]}
            metrics: list[tuple[str | None, records.MetricValue | None]] = [*line.metrics.items()]
            for name, metric in metrics or [(None, None)]:
                rate = vars(metric or records.MetricValue())
                ends = {e: math.nan if rate[e] is None else rate[e] for e in COLUMNS[7:10]}
                rows.append({**facts, "metric": name, **ends, "unknown": line.unknown})
        return rows


def to_dataframe(jsonl: JsonLines | None) -> pd.DataFrame:
    """Return the rows of a run's results as a table of pandas.

    Raises:
        ImportError: pandas is not installed.
        RuntimeError: no run has begun.
        OSError: the file cannot be read any more.
    """
    import pandas as pd

    if jsonl is None:
        raise RuntimeError("to_dataframe() is about a fit: call trainer.fit(...) first")
    return pd.DataFrame(jsonl.rows(), columns=list(COLUMNS))


# Log names of this package, and of times, counts and learning rates: not metrics of the user's.
_LEAK_NAMES = re.compile(r"(leakage\w*|audit|privacy|gate|monitor|utility)/")
_RUN_NAMES = re.compile(
    r"epoch|step|lr.*|(.*[_/])?(learning_rate|grad_norm|runtime|total_flos|.*_per_second)"
)


def chosen_metrics(logged: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the metrics of a run that are reported next to its leakage.

    Args:
        logged: All metrics by name, also those that this package has logged.
        names: The metrics that the user asks for. None for all except times, counts and learning
            rates. A metric that Lightning logs by step and by epoch is returned once.
    """
    if names is not None:
        return {name: logged[name] for name in names if name in logged}
    forks = {f"{name}{end}" for name in logged for end in ("_step", "_epoch")}
    return {
        name: value
        for name, value in logged.items()
        if name not in forks and not _LEAK_NAMES.match(name) and not _RUN_NAMES.fullmatch(name)
    }


class UserMetrics:
    """Find which of the user's metrics are new, and keep their last and best values.

    Args:
        names: The metrics that the user asks for, see :func:`chosen_metrics`.

    Attributes:
        last: The last logged value of each metric.
        best: The step and the value of the best one, by the metric's name.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names
        self.last: dict[str, float] = {}
        self.best: dict[str, tuple[int, float]] = {}
        self._steps: dict[str, int] = {}  # step of the last logged value
        self._newest: dict[str, tuple[object, int]] = {}  # newest value, and its first step

    def changed(
        self, run: Run, *, sparse: bool = False, validation: bool = True
    ) -> dict[str, float]:
        """Return a run's metrics that were measured at this step; they count as logged from now on.

        A value that is the same object as at an earlier step, or an equal number, was measured
        before. Objects are compared first, because reading a tensor waits for the GPU.

        Args:
            run: The run.
            sparse: Whether to leave out a training metric for :data:`TRAINING_STEPS` steps after
                its last value.
            validation: Whether metrics of a validation are asked for too.
        """
        step, new = run.step, dict[str, float]()
        for name, value in chosen_metrics(run.utility, self._names).items():
            if is_validation(name) and not validation:
                continue
            next_step = self._steps.get(name, -TRAINING_STEPS) + TRAINING_STEPS
            if self._newest.get(name, (None, 0))[0] is not value:
                self._newest[name] = value, step
            if self._newest[name][1] != step or (sparse and is_training(name) and step < next_step):
                continue
            number, last = float(value), self.last.get(name)
            if number == last or (math.isnan(number) and last != last):
                continue
            new[name] = self.last[name] = number
            self._steps[name] = step
            best = [self.best[name][1]] if name in self.best else []
            if math.isfinite(number) and best_of(name, [*best, number]) not in best:
                self.best[name] = step, number
        return new

    def measured(self, names: Iterable[str]) -> None:
        """Count the present values of these metrics as new, even if they equal the last ones."""
        for name in names:
            self.last.pop(name, None)
            self._newest.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the last and the best values, and the steps of the best ones."""
        best = {name: value for name, (_, value) in self.best.items()}
        steps: dict[str, float] = {name: step for name, (step, _) in self.best.items()}
        return {"last": dict(self.last), "best": best, "best_steps": steps}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        A state of version 0.3.0 has no steps of best values; these are then dropped.
        """
        self.last, best = dict(state.get("last", {})), state.get("best", {})
        self.best = {n: (int(s), best[n]) for n, s in state.get("best_steps", {}).items()}


class Report:
    """Write the results of one run to the loggers, ``leakage.jsonl`` and ``run.jsonl``.

    Args:
        run: The run.
        destination: The places where the results go.
        series: The channel of each series.
        attacks: The attacks, whose settings are written.
        jsonl: The writer of ``leakage.jsonl``; None on processes that write nothing.
        reveal: The files of recovered words and texts; None writes none.

    Attributes:
        boards: The writers of TensorBoard on the process that writes; empty on others.
        cards: The cards that TensorBoard shows first.
        record: The writer of ``run.jsonl``, which the engine sets; None on processes that write
            nothing.
    """

    def __init__(
        self,
        run: Run,
        destination: Destination,
        series: Mapping[Series, Channel],
        attacks: Sequence[Attack],
        jsonl: JsonLines | None,
        reveal: RevealFiles | None,
    ) -> None:
        self._run = run
        self._rounds = run.unit == "round"  # whether looks are at rounds of a federation
        pooled = "pooled" if run.processes > 1 and run.client == "rank" else 0
        self._client = pooled if destination.client is None else destination.client
        self._series = series
        self._attacks = {attack.name: attack for attack in attacks}
        self._jsonl = jsonl
        self.record: RunRecord | None = None
        self._reveal = reveal
        self._loggers = destination.loggers
        self.boards = destination.boards
        self.cards = Cards({}, (), (), (), {})
        self._warned: set[str] = set()
        self._announced_pending: set[Series] = set()  # series whose wait was announced
        self._logged: dict[str, tuple[int, float]] = {}  # step and value of the last log by name
        self._measured: set[int] = set()  # steps with a result
        self._weights_measured = False
        self._newest: dict[str, tuple[float, int]] = {}  # newest value by log name, and its step
        # Seconds of all looks, of their controls, and of each attack.
        self._seconds, self._control_seconds, self._seconds_of = 0.0, 0.0, Counter[str]()

    def ends(
        self, first_step: int, set_up_seconds: float, run_seconds: float, reference_seconds: float
    ) -> None:
        """Log the number of steps with a result, their cost, and the last values of the worst.

        Args:
            first_step: The number of optimizer steps before the run began.
            set_up_seconds: The duration of the set-up.
            run_seconds: The duration of the run, without set-up and references.
            reference_seconds: The duration of the training of references.
        """
        steps = self._run.step - first_step
        if self._rounds or not steps:
            return
        total, slowest = self._seconds or 1, self._seconds_of.most_common()
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in slowest)
        kinds = ["the trained weights"] * self._weights_measured
        if self._measured or not kinds:
            kinds.insert(0, f"{len(self._measured):,} of {steps:,} steps")
        looks = f"measured {' and '.join(kinds)} in {self._seconds:.1f} s"
        checks = f", of it {self._control_seconds:.1f} s for checks on known words"
        share = (self._seconds + set_up_seconds) / (run_seconds + set_up_seconds)
        self._run.say(
            f"{looks}{f' ({shares})' * bool(shares)}{checks * bool(self._measured)}; with "
            f"{set_up_seconds:.1f} s of set-up {share:.0%} of the run"
            + f"; training references took {reference_seconds:.1f} s besides"
            * bool(reference_seconds)
        )
        worst = {n.rpartition("/")[2]: pair for n, pair in self._newest.items() if "/worst/" in n}
        rates = []
        for name, (value, step) in worst.items():
            family = name.removesuffix("_at_least")  # its known part, where the rest is unknown
            if step == max(worst[n][1] for n in (family, f"{family}_at_least") if n in worst):
                rates.append(f"{name.replace('_at_least', ' at least')} {value:.2f} (step {step})")
        if rates:
            text = ", ".join(rates).replace("nan", "unknown")
            self._run.say(f"highest leakage when it was last measured: {text}")

    def write(
        self,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        values: Mapping[str, float],
        utility: Mapping[str, float],
        defenses: Sequence[Defense],
        failures: int,
        client: str | int | None = None,
    ) -> None:
        """Write a look, and warn once for each reason why a result is unknown.

        Args:
            look: The look.
            outcomes: The outcomes by series.
            values: The values by log name.
            utility: The user's metrics by name.
            defenses: The defences with an account of their releases.
            failures: The number of unknown results so far, except of attacks that do not apply.
            client: The client of a round; the spent privacy budget is then added to the values.
        """
        if client is not None:
            values = privacy_values(defenses) | dict(values)
        for series in outcomes if self._reveal is not None else ():
            try:
                if series in look.notes:
                    look.notes[series](self._reveal, f"== step {look.step}, {series.log_name}")
            except Exception as error:
                self.warn_once(f"not all results were written: {reason(error)}")
        when, effect = f"at step {look.step}", "; training goes on"
        if self._rounds:
            when, effect = f"in round {look.step}", "; the round goes on, unless a gate says no"
        for series, outcome in outcomes.items():
            if outcome.unknown is not None:
                note = "" if outcome.unknown.startswith("training ended") else effect
                note += "; monitor/failures counts it" * outcome.applies
                self.warn_once(
                    f"'{series.name}' gave no result {when}: {outcome.unknown}. Its leakage there "
                    f"is unknown, not 0{note}. (Said once for each reason.)",
                    series.name + outcome.unknown,
                )
            elif outcome.pending is not None and series not in self._announced_pending:
                self._announced_pending.add(series)
                self._run.say(f"'{series.name}' has no result {when} yet: {outcome.pending}")
        self._write_lines(look, outcomes)
        self.log(values, look.step)
        self._newest |= {name: (value, look.step) for name, value in values.items()}
        try:
            self.cards.add_summary(self.boards, outcomes, look.step)
        except Exception as error:
            self.leave_boards(error)
        seconds_of = dict(self._run.spent)
        self._run.spent.clear()
        self._seconds += look.seconds
        self._control_seconds += look.control_seconds
        self._seconds_of.update(seconds_of)
        stages = {s.stage for s, o in outcomes.items() if o.unknown is o.pending is None}
        if stages and look.next_look is not None:  # at a step, and not at the weights or the end
            self._measured.add(look.step)
        self._weights_measured |= Stage.RELEASED in stages
        if self.record is not None:
            self.record.write_new_defenses(defenses)
            self.record.append(
                records.LookLine(
                    run="",
                    step=look.step,
                    client=client,
                    utility=utility,
                    privacy=spendings(defenses),
                    seconds=look.seconds,
                    seconds_of=seconds_of,
                    failures=failures,
                    next_look=look.next_look,
                )
            )

    def write_between_looks(
        self,
        utility: Mapping[str, float],
        defenses: Sequence[Defense],
        client: str | int | None = None,
    ) -> dict[str, float]:
        """Write the user's metrics and the spent privacy budget, each value once in a step.

        Returns:
            The written values, by log name.
        """
        step = self._run.step
        values = {f"utility/{name}": value for name, value in utility.items()}
        values |= privacy_values(defenses)
        values = {n: v for n, v in values.items() if self._logged.get(n) != (step, v)}
        if not values:
            return {}
        self._logged |= {name: (step, value) for name, value in values.items()}
        self._run.publish(values)
        self.log(values, step)
        if self.record is not None:
            new = {n: v for n, v in utility.items() if f"utility/{n}" in values}
            spent = spendings(defenses)
            self.record.append(
                records.MetricsLine(run="", step=step, client=client, utility=new, privacy=spent)
            )
        return values

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the finite values to the loggers and to TensorBoard."""
        finite = {n: v for n, v in values.items() if math.isfinite(v)}
        for logger in self._loggers:
            try:
                logger.log_metrics(finite, step=step)
            except Exception as error:  # the logger is the user's, so that the error must be shown
                raise Refusal(error) from error
        try:
            for board in self.boards:
                self.cards.add(board, finite, step)
        except Exception as error:
            self.leave_boards(error)

    def upload(self, page: Path) -> None:
        """Attach the report's page to the loggers' runs of W&B and MLflow; warn if that fails."""
        try:
            upload_report(self._loggers, page)
        except Exception as error:
            self.warn_once(f"{page} was not uploaded: {reason(error)}")

    def leave_boards(self, error: Exception) -> None:
        """Stop writing to TensorBoard, and warn why."""
        self.boards = []
        cause = error.__cause__ or error  # Lightning wraps the error in a misleading one
        why = getattr(cause, "strerror", None) or type(cause).__name__
        self.warn_once(f"TensorBoard cannot be written any more ({why}); leakage.jsonl is")

    def warn_once(self, text: str, key: str | None = None) -> None:
        """Warn, but not twice with the same key; by default the text is the key."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            rank_zero_warn(f"{self._run.watcher}: {text}")

    def _write_lines(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        """Write a line of ``leakage.jsonl`` for each outcome that is not pending."""
        for series, outcome in outcomes.items():
            if outcome.pending is not None:
                continue
            extra = {f"{k}_worst_client": v for k, v in outcome.worst.items()}
            extra |= {f"{k}_of_this_look": v for k, v in (outcome.now or {}).items()}
            extra |= outcome.extra
            if (control := outcome.control) is not None:
                extra |= {f"{k}_of_control": v for k, v in control.rates.items()}
                extra |= {f"{k}_of_a_part": v for k, v in control.part.items()}
                facts = {"unexplained": control.unexplained, "bound": control.bound}
                extra |= {name: fact for name, fact in facts.items() if not math.isnan(fact)}
            extra |= outcome.p_values
            numbers = {k: [rate.value, rate.low, rate.high] for k, rate in outcome.rates.items()}
            numbers |= {k: [value] for k, value in extra.items()}
            self._append(
                series.attack,
                attack=series.record_name,
                step=look.step,
                stage=str(series.stage),
                round=look.step if self._rounds else None,
                n=outcome.n,
                exposed=outcome.exposed,
                metrics={
                    k: records.MetricValue(*(v if math.isfinite(v) else None for v in values))
                    for k, values in numbers.items()
                },
                unknown=outcome.unknown,
                pool=outcome.pool,
            )

    def write_not_played(self, rows: Sequence[Row], step: int) -> None:
        """Write a line for each attack that does not run, at the first step of the run."""
        for row in rows:
            if row.why_not is not None:
                self._append(
                    row.attack,
                    attack=row.attack,
                    step=step,
                    stage="shared",
                    round=0 if self._rounds else None,
                    n=0,
                    exposed=row.exposed,
                    metrics={},
                    unknown=f"{records.NOT_PLAYED}{row.why_not}",
                )

    def _append(self, name: str, **result: Any) -> None:
        """Write a result of the attack of this name to ``leakage.jsonl``; warn if that fails."""
        if self._jsonl is None:
            return
        config, run = self._attacks[name].config(), self._jsonl.run
        line = records.ResultLine(run=run, client=self._client, config=config, **result)
        try:
            self._jsonl.append(line)
        except OSError as error:
            self.warn_once(f"{self._jsonl.path} cannot be written: {error.strerror}")
