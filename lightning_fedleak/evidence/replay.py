"""Whether steps that were kept are those that were drawn, and give the same when repeated."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_fedleak.evidence.chain import count_of
from lightning_fedleak.evidence.repetition import (
    Value,
    attacks_of,
    compare_values,
    last_fit,
    obstacle,
    results_before,
)
from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.report import FitLog, ReportError, read
from lightning_fedleak.report.records import (
    MEMBERSHIP,
    RECORD,
    WORDS,
    AttackFacts,
    BeginLine,
    KeptLine,
    hash_line,
    is_drawn,
    is_number,
)
from lightning_fedleak.validate import explain_errors

MOST_STEPS = 10**7
"""Steps of which those to be kept are drawn again, in 10 s; of more it is open which they are."""
_CHOICE = "that the kept steps are those that were to be"
TOLERANCE = 1e-3
"""Relative difference of losses between two platforms, far above that of orders of sums."""


def check_kept(fit: FitLog, verdict: Verdict) -> list[str]:
    """Check that the kept steps of a run are those that its seed draws, or that were given.

    Args:
        fit: the run.
        verdict: gets what is wrong.

    Returns:
        What was checked, in words; nothing of a run that did not end, which reveals no seed.
    """
    facts = fit.begin.evidence if fit.begin is not None else None
    steps_in_log = {line.step for line in fit.kept}
    if facts is None and steps_in_log:
        verdict.contradict(f"run {fit.run}: steps are kept, and its first line says none are")
    if facts is None or fit.end is None:
        return []
    steps, share, seed = facts.get("steps"), facts.get("share", 0), fit.end.seed or ""
    first = count_of(facts, "first") or 0
    if fit.end.step > MOST_STEPS:
        verdict.leave_open(f"run {fit.run}: too many steps to draw those that were to be kept")
        return []
    steps_of_seed = {*range(first, fit.end.step)}
    if isinstance(steps, list):
        steps_of_seed &= {*steps}
    elif hash_line(seed.encode()) != facts.get("seed_hash") or not is_number(share):
        verdict.contradict(f"run {fit.run}: its last line has another seed of kept steps")
        return [_CHOICE]
    else:
        steps_of_seed = set(filter(partial(is_drawn, seed, share), steps_of_seed))
    wrong_steps = sorted(steps_in_log ^ steps_of_seed)
    for step in wrong_steps[:1]:
        verb = "was not kept, and had" if step in steps_of_seed else "was kept, and had not"
        verdict.contradict(f"run {fit.run}: step {step} {verb} to be; so {len(wrong_steps)} steps")
    if missing := [line.step for line in fit.kept if line.file is None]:
        verdict.leave_open(f"run {fit.run}: steps {missing} could not be kept")
    return [_CHOICE]


def find_kept(
    fits: Sequence[FitLog], step: int, folder: Path, verdict: Verdict
) -> tuple[FitLog, KeptLine, Path]:
    """Return the last run that kept a step, its line, and the file, which must be the one it names.

    Raises:
        ReportError: the step was not kept, or its file cannot be read.
    """
    by_step = {line.step: (fit, line) for fit in fits for line in fit.kept if line.file is not None}
    if step not in by_step:
        raise ReportError(f"step {step} was not kept: --step takes one of {sorted(by_step)}")
    fit, line = by_step[step]
    path = folder / fit.run / f"step-{step}.safetensors"
    hint = "--evidence takes the folder that Evidence(folder=...) had"
    with explain_errors(f"'{path}' cannot be read", OSError, error=ReportError, hint=hint):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != line.file:
        verdict.contradict(f"{path.name} is not the file that was kept")
    return fit, line, path


def check_replay(fit: FitLog, line: KeptLine, place: Path, verdict: Verdict) -> str:
    """Compare a kept step with its repetition: update, losses and leakage.

    Args:
        fit: the run that kept the step.
        line: the line of the step.
        place: folder of the repetition's logs.
        verdict: gets what is wrong.

    Returns:
        What was compared, in words; nothing where it is open.
    """
    record = place / RECORD
    again = last_fit(read([record]).fits) if record.exists() else None
    if fit.begin is None or again is None or again.begin is None or not again.kept:
        verdict.leave_open(
            f"the function ended, and step {line.step} was not repeated: it has to log into "
            "folder=, to pass evidence= on, and to give the step its batch"
        )
        return ""
    begin, other, repeated = fit.begin, again.begin, again.kept[-1]
    frozen = [(one.weights or {}).get("frozen") for one in (begin, other)]
    if repeated.batch != line.batch:
        why = "the function gave it another batch: the order of rows has to be that of the run"
    elif why := "different frozen weights" if frozen[0] != frozen[1] else obstacle(begin, other):
        why += f". Losses are {_nearness(line.loss, repeated.loss)} {TOLERANCE:.1%} of each other"
    if why:
        verdict.leave_open(f"step {line.step} is not compared to the bit: {why}")
        return ""
    values, values_again = (_step_values(*one) for one in ((fit, line), (again, repeated)))
    if attacks_of(begin) != attacks_of(other):
        verdict.leave_open("leakage is not compared: other attacks, or other settings of them")
        values, values_again = (dict([*one.items()][:2]) for one in (values, values_again))
    values, values_again = _without_past(begin, values, values_again, verdict)
    blame = verdict.contradict if None not in frozen else verdict.leave_open
    compare_values(values, values_again, blame, verdict)
    return f"step {line.step} again: its update, loss and {len(values) - 2} values of leakage"


def _without_past(
    begin: BeginLine, values: dict[Value, object], repeated: dict[Value, object], verdict: Verdict
) -> list[dict[Value, object]]:
    """Return both without the attacks that read what an earlier look has left, and name these."""
    attacks, again = ({key[1][2] for key in [*one][2:]} for one in (values, repeated))
    past = attacks & {one.name for one in begin.attacks if _needs_past(one, again)}
    if past:
        verdict.note(
            f"not compared: {', '.join(sorted(past))}, because of calibrations at an earlier look, "
            "or of its texts (Games(held_out=...) gives others), which are not kept"
        )
    return [
        {key: value for key, value in one.items() if not past.intersection(key[1])}
        for one in (values, repeated)
    ]


def _nearness(losses: Sequence[float | None], others: Sequence[float | None]) -> str:
    """Return in words whether losses are near each other, each to its own."""
    is_near = len(losses) == len(others) and all(
        a is not None and b is not None and math.isclose(a, b, rel_tol=TOLERANCE)
        for a, b in zip(losses, others, strict=False)
    )
    return "within" if is_near else "not within"


def _needs_past(attack: AttackFacts, played: Collection[str]) -> bool:
    """Return whether an attack reads what an earlier look has left, and no file holds."""
    is_calibrated_before = (attack.config or {}).get("refresh_every", 1) != 1
    is_game = attack.family == MEMBERSHIP.name and attack.name not in played
    return is_game or (is_calibrated_before and attack.family != WORDS.name)


def _step_values(fit: FitLog, line: KeptLine) -> dict[Value, object]:
    step = line.step
    looks = [one for one in fit.results if one.step == step and one.stage != "released"]
    return {
        (step, ("update",)): line.weights,
        (step, ("loss",)): line.loss,
        **results_before(replace(fit, results=looks), math.inf),
    }
