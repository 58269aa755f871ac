"""Whether a training that was repeated gave the same, bit for bit.

A training is the same with and without a monitor, so that who does not trust the one who trained
can run the same script on the same data again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.report import FitLog, read
from lightning_fedleak.report.records import (
    RECORD,
    BeginLine,
    EndLine,
    JsonObject,
    LookLine,
    MetricsLine,
)

Value = tuple[int, tuple[str, ...]]
"""A value of a run: the step, and what it is."""

_TRAINING = "model", "training", "defenses"
"""Facts of a run's first line that its weights follow from."""
_PLATFORM = "versions", "machine"
"""Facts on which the order of sums in a tensor depends, and so its last bits."""
_KINDS = "trained", "frozen"
"""Tensors before the first step, each kind under one hash."""
_DETERMINISTIC = "Freeze", "GradientCompression"
"""Classes of defences that draw nothing."""


def check_repetition(fit: FitLog, place: Path, verdict: Verdict) -> str:
    """Compare a run with the last one of another folder: weights, losses and leakage.

    They need the same settings, first weights, order of rows and platform, and no noise that is
    drawn afresh; otherwise the answer is open. Leakage is compared up to the first step at which
    one run looked and the other did not, because games of several looks go on from there, and not
    of attacks with a budget of time.

    Args:
        fit: the run.
        place: folder of the repetition.
        verdict: gets what is wrong.

    Returns:
        What was compared, in words; nothing where it is open.

    Raises:
        ReportError: the folder has no logs.
    """
    again = read([place / RECORD]).fits[-1]
    begin, other = fit.begin, again.begin
    if begin is None or other is None or fit.end is None or again.end is None:
        obstacle = "one of them has no first or no last line"
    else:
        obstacle = _obstacle(begin, other) or _other_rows(fit.end, again.end)
    if obstacle or begin is None or other is None:
        verdict.leave_open(f"'{place}' cannot be compared with run {fit.run}: {obstacle}")
        return ""
    looks, other_looks = ({line.step for line in one.looks} for one in (fit, again))
    first_apart = min(looks ^ other_looks, default=math.inf)
    values, repeated = ({**_losses(one), **_weights(one)} for one in (fit, again))
    if _attacks(begin) == _attacks(other):
        values |= _results(fit, first_apart)
        repeated |= _results(again, first_apart)
        if first_apart < math.inf:
            verdict.note(
                f"leakage from step {first_apart} on is not compared: one run alone looked there"
            )
        if timed := [one.name for one in begin.attacks if _has_budget(one.config)]:
            verdict.note(f"not compared, because of a budget of seconds: {', '.join(timed)}")
    else:
        verdict.note("leakage is not compared: other attacks, or other settings of them")
    weights = len(_weights(fit))
    if not weights:
        verdict.leave_open(f"run {fit.run} has no hashes of its last weights")
    common = _compare(f"run {fit.run}", str(place), values, repeated, first_apart, verdict)
    return f"repetition: {weights} tensors, {common - weights} values of losses and leakage"


def _compare(
    run: str,
    place: str,
    values: Mapping[Value, object],
    repeated: Mapping[Value, object],
    first_apart: float,
    verdict: Verdict,
) -> int:
    """Find the first value that differs, and the first that one run alone has.

    Returns:
        How many values both have.
    """
    common = sorted(values.keys() & repeated.keys())
    different = [key for key in common if values[key] != repeated[key]]
    alone = [
        (step, names)
        for step, names in sorted(values.keys() ^ repeated.keys())
        if names[0] == "weights" or (names[0] != "between looks" and step < first_apart)
    ]
    for step, names in different[:1]:
        verdict.contradict(
            f"{run}, step {step}: {', '.join(names)} is not what '{place}' gives; "
            f"{len(different)} of {len(common)} values differ. Were the seeds the same?"
        )
    for step, names in alone[:1]:
        verdict.leave_open(
            f"step {step}: {', '.join(names)} is in the logs of one of both alone; so are "
            f"{len(alone)} values"
        )
    return len(common)


def _obstacle(begin: BeginLine, other: BeginLine) -> str:
    """Return why two runs need not give the same, by their first lines; empty where they do."""
    if begin.run == other.run:
        return "it is the same run"
    if begin.resumed or other.resumed:
        return "one of them goes on from a checkpoint: repeat the whole training"
    if any(one.class_name not in _DETERMINISTIC for one in begin.defenses):
        return "a defence may draw noise, which a repetition draws afresh"
    for facts in (_TRAINING, _PLATFORM):
        if different := [name for name in facts if getattr(begin, name) != getattr(other, name)]:
            return f"different {' and '.join(different)}, see the first lines of {RECORD}"
    machine = begin.machine or {}
    if machine.get("device") != "cpu" and not machine.get("deterministic"):
        return "a GPU repeats itself only with torch.use_deterministic_algorithms(True)"
    if (begin.training or {}).get("processes", 1) != 1:
        return "the order of rows is known of the first process alone"
    if set(begin.weights or {}) != {*_KINDS} or begin.weights != other.weights:
        return "different weights before the first step, or not all were hashed"
    return ""


def _other_rows(end: EndLine, other: EndLine) -> str:
    """Return why two runs may have taken other rows; empty where they took the same."""
    if end.row_order is not None and end.row_order == other.row_order:
        return ""
    return (
        "another order of rows, or another row_order.key: copy that of the run into the folder of "
        "the repetition before it begins, and draw the rows by the same seed"
    )


def _attacks(begin: BeginLine) -> object:
    """Return the attacks and how they are run, but for when it looks."""
    monitor = begin.monitor
    if monitor is not None:
        monitor = replace(monitor, more={n: v for n, v in monitor.more.items() if n != "looks"})
    return monitor, begin.attacks


def _has_budget(config: JsonObject | None) -> bool:
    return any("seconds" in setting for setting in config or ())


def _losses(fit: FitLog) -> dict[Value, object]:
    """Return the losses of a run; those between looks are logged at other moments of a step."""
    lines: list[LookLine | MetricsLine] = [*fit.looks, *fit.metrics]
    return {
        (line.step, ("look" if isinstance(line, LookLine) else "between looks", name)): value
        for line in lines
        for name, value in (line.utility or {}).items()
        if "loss" in name
    }


def _weights(fit: FitLog) -> dict[Value, object]:
    """Return the hashes of the trained tensors that a run ended with."""
    hashes = fit.end.weights if fit.end is not None else None
    step = fit.end.step if fit.end is not None else 0
    return {(step, ("weights", name)): one for name, one in (hashes or {}).items()}


def _results(fit: FitLog, before: float) -> dict[Value, object]:
    """Return what attacks without a budget of time read before a step."""
    return {
        (line.step, ("leakage", line.stage, line.attack, name)): value
        for line in fit.results
        if line.step < before and not _has_budget(line.config)
        for name, value in line.metrics.items()
    }
