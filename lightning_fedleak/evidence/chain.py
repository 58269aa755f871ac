"""Check the hash chains of a run's logs.

A run (one fit of a model) has two logs: ``run.jsonl``, the record, and ``leakage.jsonl``, the
results of attacks. Each line holds the hash of the line before and a hash of itself. So a line
cannot be changed, removed, added or moved without a contradiction, unless all later hashes are
computed again. The last line of a run closes it with the length and the last hash of
``leakage.jsonl``. The record also states in advance the step of each *look*, a measurement of
leakage by all attacks, so that looks cannot be chosen by their results. Each check adds its
findings to a :class:`Verdict`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_fedleak.private_files import read_regular
from lightning_fedleak.report import ReportError, records
from lightning_fedleak.validate import explain_errors

HOLDS, OPEN, CONTRADICTED = 0, 2, 3
"""Exit codes of ``fedleak verify``: no contradiction; an undecided question; a contradiction."""


@dataclass
class Verdict:
    """The findings of a verification, as sentences.

    Attributes:
        contradictions: Findings that are impossible in the logs of an honest run.
        open: Questions that the given files cannot decide.
        notes: Findings that are not faults, but that a reader should know.
        lines: The number of lines by file.
        heads: The hash of the last line by file. A copy of it that is kept elsewhere reveals later
            whether lines were changed or cut.
        checked: The names of the checks that were done.
        not_checked: The names of the checks that were not done, with the option that adds them.
    """

    contradictions: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def contradict(self, text: str) -> None:
        """Add a contradiction."""
        self.contradictions.append(text)

    def leave_open(self, text: str) -> None:
        """Add a question that cannot be decided."""
        self.open.append(text)

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(text)

    @property
    def status(self) -> int:
        """The exit code: 3 after a contradiction, else 2 if a question is open, else 0."""
        return CONTRADICTED if self.contradictions else OPEN if self.open else HOLDS


@dataclass
class _ChainedFile:
    """The lines of a log file and their hashes.

    Attributes:
        name: The name of the file.
        hashes: The hash of each line, in order.
        contents: The JSON object of each line; None if the line is not one.
    """

    name: str
    hashes: list[str] = field(default_factory=list)
    contents: list[records.JsonObject | None] = field(default_factory=list)

    @property
    def lines(self) -> Iterator[tuple[int, str, records.JsonObject]]:
        """The number, the location in words and the content of each line that is an object."""
        for number, content in enumerate(self.contents, 1):
            if content is not None:
                yield number, f"{self.name}, line {number}", content

    @property
    def head(self) -> str:
        """The hash of the last line; for an empty log the hash of no bytes."""
        return self.hashes[-1] if self.hashes else records.hash_line(b"")


def read_chain(path: Path, verdict: Verdict) -> _ChainedFile:
    """Return the lines of a log, and report where its chain is broken.

    Args:
        path: The path of the file.
        verdict: The verdict to which findings are added.

    Raises:
        ReportError: The file cannot be read.
    """
    log = _ChainedFile(path.name)
    hint = f"Name the folder that holds {records.RESULTS} and {records.RECORD}"
    with explain_errors(f"'{path}' cannot be read", OSError, error=ReportError, hint=hint):
        data = read_regular(path) if path.exists() or path.name != records.RESULTS else b""
    for number, line in enumerate(records.split_lines(data), 1):
        content = _object_of(line)
        before, log_head = (content or {}).get(records.BEFORE), log.head
        log.hashes.append(records.hash_line(line))
        log.contents.append(content)
        if content is None:
            continue  # the hash in the next line covers these bytes too
        if not records.holds_own_hash(line):
            verdict.contradict(f"{path.name}, line {number}: its hash does not fit: it was changed")
        if before != log_head:
            verdict.contradict(
                f"{path.name}, line {number}: its hash of the line before does not fit: a line "
                "was changed, removed, added or moved"
            )
    invalid = [number for number, content in enumerate(log.contents, 1) if content is None]
    if data and not data.endswith(b"\n"):
        verdict.leave_open(f"{path.name}, line {len(log.hashes)}: the last line is cut")
    elif invalid and invalid[-1] == len(log.contents):
        verdict.contradict(f"{path.name}, line {invalid[-1]}: it is not a line of a log")
    elif invalid:
        verdict.note(f"{path.name}, lines {invalid}: cut when a run was killed")
    return log


def _object_of(line: bytes) -> records.JsonObject | None:
    """Return the JSON object in a line; None if the line is not one."""
    try:
        content = records.parse_json(line.decode())
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_closings(record: _ChainedFile, results: _ChainedFile, verdict: Verdict) -> None:
    """Check that each run has one first line, a last line that closes it, and no line after it.

    Args:
        record: The lines of ``run.jsonl``.
        results: The lines of ``leakage.jsonl``.
        verdict: The verdict to which findings are added.
    """
    begins: dict[str, str | None] = {}  # the run that each run resumed, or None
    ends: dict[str, int | None] = {}  # the number of lines of results when each run ended
    time = ""
    for _, location, line in record.lines:
        run, kind = str(line.get("run", "")), line.get("kind")
        if kind == "begin":
            if run in begins:
                verdict.contradict(f"{location}: run {run} begins a second time")
            resumed = line.get("resumed")
            begins[run] = str(resumed.get("run")) if isinstance(resumed, dict) else None
        elif run not in begins:
            verdict.contradict(f"{location}: run {run} has not begun")
        if run in ends:
            verdict.contradict(f"{location}: run {run} had ended before")
        if kind == "end":
            ends[run] = _count_of(line, "results")
            _check_closing(line, results, location, verdict)
        now = str(line.get("time", time))
        if now < time:
            verdict.note(f"{location}: the clock was set back, from {time} to {now}")
        time = now
    resumed_runs = set(begins.values())
    for run in begins.keys() - ends.keys():
        if run in resumed_runs:
            verdict.note(f"run {run} was cut off, and another run continues from its checkpoint")
        else:
            verdict.leave_open(
                f"run {run} is not closed: it is running, was killed, or its last line was cut"
            )
    _check_results(results, begins.keys(), ends, verdict)


def _check_results(
    results: _ChainedFile, begins: Collection[str], ends: Mapping[str, int | None], verdict: Verdict
) -> None:
    """Check that the run of each line of results has begun, and had not ended before the line.

    Args:
        results: The lines of ``leakage.jsonl``.
        begins: The runs that have a first line.
        ends: The number of lines of results when each run ended, by run.
        verdict: The verdict to which findings are added.
    """
    for number, location, line in results.lines:
        n_lines = ends.get(run := str(line.get("run", "")))
        if run in begins and n_lines is not None and number > n_lines:
            verdict.contradict(f"{location}: run {run} had ended before")
        elif run not in begins and str(line.get("unknown", "")).startswith(records.NOT_PLAYED):
            verdict.note(f"{location}: run {run} was refused before it began")
        elif run not in begins:
            verdict.contradict(f"{location}: run {run} is not in {records.RECORD}")


def _count_of(line: records.JsonObject, key: str) -> int | None:
    """Return the number of steps or lines in a field of a line; None if it is not valid."""
    count = line.get(key)
    return count if type(count) is int and count >= 0 else None


def _check_closing(
    line: records.JsonObject, results: _ChainedFile, location: str, verdict: Verdict
) -> None:
    """Compare ``leakage.jsonl`` with its length and last hash as stated in a run's last line."""
    count, head = _count_of(line, "results"), line.get("results_head")
    if count is None:
        verdict.leave_open(f"{location}: it does not state the length of {records.RESULTS}")
    elif count > len(results.hashes):
        verdict.contradict(
            f"{results.name} has {len(results.hashes)} lines, and had {count} at {location}: "
            "its end was cut"
        )
    elif head != (results.hashes[count - 1] if count else records.hash_line(b"")):
        verdict.contradict(
            f"{results.name}, line {count}: its hash is not the one that {location} states"
        )


def check_plans(record: _ChainedFile, verdict: Verdict) -> bool:
    """Check that each look, a measurement of leakage, was at the step that an earlier line states.

    The first line of a run states the step of its first look, and the line of each look states the
    step of the next. If a look failed or was at another step, a line of kind ``plan`` states that.
    A resumed run may have such a line for its first look, because its step is known only later. If
    a run was cut off, looks that were planned for later steps are not missing.

    Args:
        record: The lines of ``run.jsonl``.
        verdict: The verdict to which findings are added.

    Returns:
        Whether any run states planned looks.
    """
    planned: dict[str, int | None] = {}  # the step of the next look of each run
    intervals: dict[str, int | None] = {}  # the steps between looks, if the settings fix them
    resumed: set[str] = set()  # resumed runs that have not looked yet
    for _, location, line in record.lines:
        run, kind, plan = str(line.get("run", "")), line.get("kind"), _count_of(line, "next_look")
        step = _count_of(line, "step") or 0
        if kind == "begin" and plan is not None:
            planned[run], intervals[run] = plan, _steps_between_looks(line)
            resumed |= {run} if line.get("resumed") else set()
        due = planned.get(run)
        if due is None:
            continue
        if kind == "look" and plan is not None:
            if step > due:
                verdict.contradict(
                    f"{location}: the look of run {run} that was planned at step {due} is missing; "
                    f"the next one is at step {step}"
                )
            max_step = (step // n + 1) * n if (n := intervals[run]) else plan
            if plan > max_step:
                verdict.contradict(
                    f"{location}: the look of run {run} after step {step} is planned at step "
                    f"{plan}, but its settings ask for one at step {max_step}"
                )
            planned[run], resumed = plan, resumed - {run}
        elif kind == "plan":
            if run not in resumed:
                instead = "was not made" if plan is None else f"was at step {plan}"
                verdict.note(f"{location}: the look of run {run} planned at step {due} {instead}")
            planned[run] = plan
        elif kind == "end" and due < step:
            verdict.contradict(
                f"{location}: the look of run {run} that was planned at step {due} is missing; the "
                f"run ended at step {step}"
            )
    return bool(planned)


def _steps_between_looks(line: records.JsonObject) -> int | None:
    """Return n of the setting ``every_n_steps=n``; None if another rule plans the looks."""
    monitor = line.get("monitor")
    looks = str(monitor.get("looks", "")) if isinstance(monitor, dict) else ""
    name, _, interval = looks.partition("=")
    return int(interval) if name == "every_n_steps" and interval.isdecimal() else None


def runs_below(run: Path) -> str:
    """Return words that name the folders of other runs in a run's folder; empty without any."""
    folders = sorted({path.parent.name for path in run.glob("version_*/*.jsonl")})
    return f"other runs are in {', '.join(folders)} of '{run}'" if folders else ""
