"""Where results are written: the loggers, ``leakage.jsonl`` and ``run.jsonl``. Numbers only."""

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
from lightning_fedleak.engine.choice import Row
from lightning_fedleak.engine.loggers import Cards, Logger, upload_report
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.record import RunRecord, privacy_values, spendings
from lightning_fedleak.engine.run import Look, Refusal, Run, reason
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.private_files import RevealFiles
from lightning_fedleak.report import records
from lightning_fedleak.report.records.utility import best_of, is_training

if TYPE_CHECKING:
    import pandas as pd
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = (
    *("step", "stage", "client", "attack", "n", "exposed"),
    "metric",
    *("value", "low", "high"),
    "unknown",
)
"""Columns of a row of :meth:`JsonLines.rows`."""
TRAINING_STEPS = 50
"""Steps between two values of a training metric, which changes at each; Lightning's own default.

Larger: a line of fewer points. Smaller: a longer ``run.jsonl``, and on a card a wait for each.
"""


@dataclass(frozen=True)
class Destination:
    """Say where the results of a run go.

    Attributes:
        folder: of ``leakage.jsonl``, ``run.jsonl`` and what is revealed.
        loggers: take every finite value; those of TensorBoard are not among them.
        boards: TensorBoard's writers, on the process that writes.
        training: how the model is trained, for the record.
        settings: the user's own, for TensorBoard's table of them.
        fit: an id that all that watch this run share; None makes one.
        client: whose results they are, as the lines name it; None: of the run's process, or pooled
            over its processes.
        watch: how it is watched, for the record, beside the engine's options.
    """

    folder: Path
    loggers: Sequence[Logger] = ()
    boards: Sequence[SummaryWriter] = ()
    training: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    fit: str | None = None
    client: str | int | None = None
    watch: Mapping[str, object] = field(default_factory=dict)


def own_folder(run: Run, folder: Path, *ids: object) -> Path:
    """Return a folder, or ``version_<n>`` in it, that holds logs of no other run.

    Args:
        run: the run, before it begins; all its processes get the first one's answer.
        folder: as the user asks for it.
        ids: of what shares its folder with the run: what it resumes, or is watched with.

    Raises:
        OSError: the first process cannot read or make a folder; on all processes.
    """
    answer: Path | OSError = folder
    if run.rank == 0:
        try:
            answer = _free_folder(folder, [str(run_id) for run_id in ids if run_id])
        except OSError as error:
            answer = error  # the other processes wait for an answer
    place = run.broadcast(answer)
    if isinstance(place, OSError):
        raise place
    if place != folder:
        rank_zero_info(
            f"{run.watcher}: {folder} holds logs of another run; those of this one: {place}"
        )
    return place


def _free_folder(folder: Path, ids: Sequence[str]) -> Path:
    """Return the first of a folder and its versions with no logs, or with those of the ids."""
    for n in count():
        place = folder / f"version_{n}" if n else folder
        logs = [log for file in ("run.jsonl", "leakage.jsonl") if (log := place / file).exists()]
        readable = (log for log in logs if ids and os.access(log, os.R_OK))
        if any(run_id in log.read_text("utf-8", "replace") for log in readable for run_id in ids):
            break
        if not logs:
            with suppress(FileExistsError):  # of another run, which has written nothing yet
                if n:
                    place.mkdir(parents=True)
                break
    return place


class JsonLines:
    """Append one line for each look, stage, client and attack to ``leakage.jsonl``.

    Args:
        path: the file; its folder is made when the first line is written.

    Attributes:
        run: names this fit in every line, since fits that go on from it append to the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = uuid.uuid4().hex[:12]
        self._written = False

    def append(self, line: records.ResultLine) -> None:
        """Write one result, or why it is unknown.

        Raises:
            OSError: the file cannot be written.
        """
        records.append_line(self.path, line)
        self._written = True

    def rows(self) -> list[dict[str, object]]:
        """Return what this fit has written: one row for each metric of each line.

        Unknown numbers are NaN. A line without metrics, such as that of an attack that is not
        played, is one row that has none.

        Raises:
            OSError: the file cannot be read any more.
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
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("to_dataframe() needs pandas: pip install pandas") from error
    if jsonl is None:
        raise RuntimeError("to_dataframe() is about a fit: call trainer.fit(...) first")
    return pd.DataFrame(jsonl.rows(), columns=list(COLUMNS))


_OURS = re.compile(r"(leakage\w*|audit|privacy|gate|monitor|utility)/")
_OF_THE_RUN = re.compile(
    r"epoch|step|lr.*|(.*[_/])?(learning_rate|grad_norm|runtime|total_flos|.*_per_second)"
)


def chosen_metrics(logged: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return those of the metrics that a run logs which are reported beside leakage.

    Args:
        logged: all of them, by name; what this package has logged may be among them.
        names: those that the user asks for; None: all but times, counts and learning rates, and
            of a metric that Lightning logs by step and by epoch the one under its own name.
    """
    if names is not None:
        return {name: logged[name] for name in names if name in logged}
    forks = {f"{name}{end}" for name in logged for end in ("_step", "_epoch")}
    return {
        name: value
        for name, value in logged.items()
        if name not in forks and not _OURS.match(name) and not _OF_THE_RUN.fullmatch(name)
    }


class UserMetrics:
    """Keep the user's metrics as they were last logged, and the best value of each so far.

    Attributes:
        last: the newest value of each that was logged.
        best: the step and the value of the best of each, by the metric's name.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.best: dict[str, tuple[int, float]] = {}
        self._steps: dict[str, int] = {}
        self._read: dict[str, tuple[object, int]] = {}

    def changed(
        self, metrics: Mapping[str, Any], step: int, *, sparse: bool = False
    ) -> dict[str, float]:
        """Return the metrics that were measured at this step; they count as logged now.

        A value that is the same object as at an earlier step, or an equal number, was measured
        before. Objects are compared first, since a tensor on a card has to be waited for.

        Args:
            metrics: as they are, by name; numbers, or tensors of one.
            step: optimizer steps so far.
            sparse: whether a training metric is left out for :data:`TRAINING_STEPS` steps after
                its last value.
        """
        new: dict[str, float] = {}
        for name, value in metrics.items():
            next_step = self._steps.get(name, -TRAINING_STEPS) + TRAINING_STEPS
            if self._read.get(name, (None, 0))[0] is not value:
                self._read[name] = value, step
            if self._read[name][1] != step or (sparse and is_training(name) and step < next_step):
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
        """Take the next values of these metrics as measured now, also where they are equal."""
        for name in names:
            self.last.pop(name, None)
            self._read.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the last and the best values, and the steps of the best ones."""
        best_steps, best = ({n: one[i] for n, one in self.best.items()} for i in (0, 1))
        return {"last": dict(self.last), "best": best, "best_steps": best_steps}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what :meth:`state_dict` returned; version 0.3.0 kept no steps."""
        self.last, best = dict(state.get("last", {})), state.get("best", {})
        self.best = {n: (int(s), best[n]) for n, s in state.get("best_steps", {}).items()}


class Report:
    """Write what the looks of one run found: to the loggers, ``leakage.jsonl`` and ``run.jsonl``.

    Args:
        run: the run.
        destination: where they go.
        series: the channel of each series.
        attacks: for their settings.
        jsonl: one line for each look, stage and attack; None on processes that write none.
        record: says what the run was; None on processes that write none.
        reveal: recovered words and texts; None writes none.

    Attributes:
        boards: TensorBoard's writers on the process that writes; empty elsewhere.
        cards: what TensorBoard shows first.
        record: as above.
    """

    def __init__(
        self,
        run: Run,
        destination: Destination,
        series: Mapping[Series, Channel],
        attacks: Sequence[Attack],
        jsonl: JsonLines | None,
        record: RunRecord | None,
        reveal: RevealFiles | None,
    ) -> None:
        self._run = run
        self._rounds = run.unit == "round"
        pooled = "pooled" if run.processes > 1 and run.client == "rank" else 0
        self._client = pooled if destination.client is None else destination.client
        self._series = series
        self._attacks = {attack.name: attack for attack in attacks}
        self._jsonl = jsonl
        self.record = record
        self._reveal = reveal
        self._loggers = destination.loggers
        self.boards = destination.boards
        self.cards = Cards({}, (), (), (), {})
        self._warned: set[str] = set()
        self._waiting: set[Series] = set()
        self._logged: dict[str, tuple[int, float]] = {}  # the newest between looks, and when
        self._looked_at: set[int] = set()
        # Of looks, of their controls, and of each attack.
        self._seconds, self._control_seconds, self._seconds_of = 0.0, 0.0, Counter[str]()

    def ends(
        self,
        first_step: int,
        set_up_seconds: float,
        run_seconds: float,
        reference_seconds: float,
        worst: Mapping[str, float],
    ) -> None:
        """Say at how many of the steps looks were made, what they read, and what they took.

        Args:
            first_step: steps that were over when the run began.
            set_up_seconds: duration of the set-up.
            run_seconds: duration of the run, without the set-up and references.
            reference_seconds: that references were trained.
            worst: the newest number of the worst attack of each family.
        """
        steps = self._run.step - first_step
        if self._rounds or not steps:
            return
        total, slowest = self._seconds or 1, self._seconds_of.most_common()
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in slowest)
        looks = f"looked at {len(self._looked_at):,} of {steps:,} steps in {self._seconds:.1f} s"
        share = (self._seconds + set_up_seconds) / (run_seconds + set_up_seconds)
        rank_zero_info(
            f"{self._run.watcher}: {looks}{f' ({shares})' * bool(shares)}, of it "
            f"{self._control_seconds:.1f} s for controls; with {set_up_seconds:.1f} s of set-up "
            f"{share:.0%} of the run"
            + f"; training references took {reference_seconds:.1f} s besides"
            * bool(reference_seconds)
        )
        if worst:
            read = [
                f"{family} {value:.2f}".replace("nan", "unknown") for family, value in worst.items()
            ]
            rank_zero_info(
                f"{self._run.watcher}: the worst attacks read at last: {', '.join(read)}"
            )

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
        """Write a look; say once for each reason why a result is unknown.

        Args:
            look: the look.
            outcomes: by series.
            values: by log name.
            utility: the user's metrics, by name.
            defenses: those that account for what they release.
            failures: results so far that are unknown, where the attack is made for what was shared.
            client: whose round it was; what the defences have spent is written beside it.
        """
        if client is not None:
            values = privacy_values(defenses) | dict(values)
        for series in outcomes if self._reveal is not None else ():
            try:
                if series in look.notes:
                    look.notes[series](self._reveal, f"== step {look.step}, {series.log_name}")
            except Exception as error:
                self.warn_once(f"not all of a look was written: {reason(error)}")
        when, goes_on = f"at step {look.step}", "; training goes on"
        if self._rounds:
            when, goes_on = f"in round {look.step}", "; the round goes on, unless a gate says no"
        for series, outcome in outcomes.items():
            if outcome.unknown is not None:
                then = "" if outcome.unknown.startswith("training ended") else goes_on
                then += "; monitor/failures counts it" * outcome.applies
                self.warn_once(
                    f"'{series.name}' gave no result {when}: {outcome.unknown}. Its leakage there "
                    f"is unknown, not 0{then}. (Said once for each reason.)",
                    series.name + outcome.unknown,
                )
            elif outcome.pending is not None and series not in self._waiting:
                self._waiting.add(series)
                text = f"'{series.name}' has no result {when} yet: {outcome.pending}"
                rank_zero_info(f"{self._run.watcher}: {text}")
        self._write_lines(look, outcomes)
        self.log(values, look.step)
        try:
            self.cards.add_summary(self.boards, outcomes, look.step)
        except Exception as error:
            self.leave_boards(error)
        seconds_of = dict(self._run.spent)
        self._run.spent.clear()
        self._seconds += look.seconds
        self._control_seconds += look.control_seconds
        self._seconds_of.update(seconds_of)
        if look.next_look is not None:  # at a step, and not at the weights or the end of the run
            self._looked_at.add(look.step)
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
        """Write the user's metrics, and what defences have spent, but nothing twice at a step.

        Returns:
            What is new, by log name.
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
        """Write the finite ones of these values to the loggers and to TensorBoard."""
        finite = {n: v for n, v in values.items() if math.isfinite(v)}
        for logger in self._loggers:
            try:
                logger.log_metrics(finite, step=step)
            except Exception as error:  # the user's own, and so is the error
                raise Refusal(error) from error
        try:
            for board in self.boards:
                self.cards.add(board, finite, step)
        except Exception as error:
            self.leave_boards(error)

    def upload(self, page: Path) -> None:
        """Attach the report's page to the runs of loggers that take files; warn where one fails."""
        try:
            upload_report(self._loggers, page)
        except Exception as error:
            self.warn_once(f"{page} was not uploaded: {reason(error)}")

    def leave_boards(self, error: Exception) -> None:
        """Go on without TensorBoard, and say why."""
        self.boards = []
        first = error.__cause__ or error  # Lightning says in its place that a number is no number
        why = getattr(first, "strerror", None) or type(first).__name__
        self.warn_once(f"TensorBoard cannot be written any more ({why}); leakage.jsonl is")

    def warn_once(self, text: str, key: str | None = None) -> None:
        """Warn, but not twice with the same key; by default the text is the key."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            rank_zero_warn(f"{self._run.watcher}: {text}")

    def _write_lines(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        for series, outcome in outcomes.items():
            if outcome.pending is not None:
                continue
            extra = {f"{k}_worst_client": v for k, v in outcome.worst.items()}
            extra |= {f"{k}_of_this_look": v for k, v in (outcome.now or {}).items()}
            extra |= outcome.extra
            if (control := outcome.control) is not None:
                extra |= {f"{k}_of_control": v for k, v in control.rates.items()}
                extra |= {f"{k}_of_a_part": v for k, v in control.part.items()}
                if not math.isnan(control.unexplained):
                    extra["unexplained"] = control.unexplained
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
        """Write a line for each attack that is not tested in this run, which begins at a step."""
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

    def _append(self, played: str, **result: Any) -> None:
        """Write the result of an attack that was played to ``leakage.jsonl``, or warn once."""
        if self._jsonl is None:
            return
        config, run = self._attacks[played].config(), self._jsonl.run
        line = records.ResultLine(run=run, client=self._client, config=config, **result)
        try:
            self._jsonl.append(line)
        except OSError as error:
            self.warn_once(f"{self._jsonl.path} cannot be written: {error.strerror}")
