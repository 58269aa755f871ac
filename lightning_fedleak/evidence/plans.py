"""Whether looks are at the steps that a run had planned."""

from __future__ import annotations

from lightning_fedleak.evidence.chain import ChainedFile, count_of
from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.report.records import JsonObject


def check_plans(record: ChainedFile, verdict: Verdict) -> bool:
    """Check that each look at a step is where the line before it had planned it.

    A run's first line says when its first look is, and each look when the next one is. A look that
    was at another step, or failed, has a line that says so; the first one of a run that was resumed
    as well, since it learns its step later. Of a run that was cut off, what comes
    after its last line is not missed.

    Args:
        record: ``run.jsonl``.
        verdict: gets what is wrong.

    Returns:
        Whether a run says what it plans.
    """
    planned: dict[str, int | None] = {}
    intervals: dict[str, int | None] = {}
    resumed: set[str] = set()
    for number, line in enumerate(record.contents, 1):
        if line is None:
            continue
        run, kind, plan = str(line.get("run", "")), line.get("kind"), count_of(line, "next_look")
        place, step = f"{record.name}, line {number}", count_of(line, "step") or 0
        if kind == "begin" and plan is not None:
            planned[run], intervals[run] = plan, _steps_between_looks(line)
            resumed |= {run} if line.get("resumed") else set()
        due = planned.get(run)
        if due is None:
            continue
        if kind == "look" and plan is not None:
            if step > due:
                verdict.contradict(
                    f"{place}: the look of run {run} that was planned at step {due} is missing; "
                    f"the next one is at step {step}"
                )
            latest = (step // n + 1) * n if (n := intervals[run]) else plan
            if plan > latest:
                verdict.contradict(
                    f"{place}: the look of run {run} after step {step} is planned at step {plan}, "
                    f"and its settings ask for one at step {latest}"
                )
            planned[run], resumed = plan, resumed - {run}
        elif kind == "plan":
            if run not in resumed:
                instead = "was not made" if plan is None else f"was at step {plan}"
                verdict.note(f"{place}: the look of run {run} planned at step {due} {instead}")
            planned[run] = plan
        elif kind == "end" and due < step:
            verdict.contradict(
                f"{place}: the look of run {run} that was planned at step {due} is missing; the "
                f"run ended at step {step}"
            )
    return bool(planned)


def _steps_between_looks(line: JsonObject) -> int | None:
    """Return n of the setting ``every_n_steps=n``; None where looks are set by their cost."""
    monitor = line.get("monitor")
    looks = str(monitor.get("looks", "")) if isinstance(monitor, dict) else ""
    name, _, number = looks.partition("=")
    return int(number) if name == "every_n_steps" and number.isdecimal() else None
