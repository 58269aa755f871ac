"""Whether a training that was repeated gave the same, bit for bit.

A training is the same with and without a monitor. So anyone who doubts a run can run the same
script on the same data again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_fedleak.evidence.chain import Verdict
from lightning_fedleak.report import FitLog, ReportError, read
from lightning_fedleak.report.records import RECORD, BeginLine, JsonObject, LookLine, MetricsLine

Values = dict[tuple[int, tuple[str, ...]], object]
"""A value of a run: the step, and what it is."""

_TRAINING = "model", "training", "defenses"
"""Facts of a run's first line that its weights follow from."""
_PLATFORM = "versions", "machine"
"""Facts on which the order of sums in a tensor depends, and so its last bits."""
_SAVED = "weights of a checkpoint"
_INTERVAL = "between looks"
_KINDS = "trained", "frozen"
"""Tensors before the first step, each kind under one hash."""
_DETERMINISTIC = "Freeze", "GradientCompression"
"""Classes of defences that draw nothing."""


def check_repetition(fit: FitLog, place: Path, verdict: Verdict) -> list[str]:
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
        ReportError: the folder has no logs, or no run begins in them.
    """
    again = last_fit(read([place / RECORD]).fits)
    if fit.begin is None or again is None or again.begin is None:
        raise ReportError(f"no run begins in '{place}': name the folder of a repetition's logs")
    begin, other = fit.begin, again.begin
    if why := _obstacle(begin, other) or _other_start(fit, again):
        verdict.leave_open(f"'{place}' cannot be compared with run {fit.run}: {why}")
        return []
    looks, other_looks = ({line.step for line in one.looks} for one in (fit, again))
    first_apart = min(looks ^ other_looks, default=math.inf)
    values, repeated = ({**_losses(one), **_weights(one)} for one in (fit, again))
    if _attacks_of(begin) == _attacks_of(other):
        values |= _results_before(fit, first_apart)
        repeated |= _results_before(again, first_apart)
        if first_apart < math.inf:
            verdict.note(
                f"leakage from step {first_apart} on is not compared: one run alone looked there"
            )
        if timed := [one.name for one in begin.attacks if _has_budget(one.config)]:
            verdict.note(f"not compared, because of a budget of seconds: {', '.join(timed)}")
    else:
        verdict.note("leakage is not compared: other attacks, or other settings of them")
    weights = len(_weights(fit).keys() & _weights(again).keys())
    if not weights:
        verdict.leave_open(f"run {fit.run} and '{place}' have no hashes of weights at one step")
    _compare_values(values, repeated, verdict, first_apart)
    common = len(values.keys() & repeated.keys())
    values_of = f"{weights} hashes of weights, {common - weights} values of losses and leakage"
    return [f"repetition: {values_of}"]


def _compare_values(values: Values, repeated: Values, verdict: Verdict, first_apart: float) -> None:
    """Name the first value that differs, and the first that one run alone has.

    Args:
        values: of the run.
        repeated: of its repetition.
        verdict: gets what is wrong.
        first_apart: step from which on one alone may have leakage and losses.
    """
    common = sorted(values.keys() & repeated.keys())
    different = [key for key in common if values[key] != repeated[key]]
    for step, names in different[:1]:
        verdict.contradict(
            f"step {step}: {', '.join(names)} is not what the repetition gives; {len(different)} "
            f"of {len(common)} values differ"
        )
    alone = [
        (step, names)
        for step, names in sorted(values.keys() ^ repeated.keys())
        if names[0] == "weights" or (names[0] not in (_INTERVAL, _SAVED) and step < first_apart)
    ]
    for step, names in alone[:1]:
        verdict.leave_open(
            f"step {step}: only one run logged {', '.join(names)}, and {len(alone)} such values "
            "in all"
        )


def last_fit(fits: Sequence[FitLog]) -> FitLog | None:
    """Return the run that began last; None where none has begun."""
    return next((fit for fit in reversed(fits) if fit.begin is not None), None)


def _obstacle(begin: BeginLine, other: BeginLine) -> str:
    """Return why two runs need not give the same, by facts of their first lines; empty: they do."""
    if begin.run == other.run:
        return "it is the same run"
    if any(one.class_name not in _DETERMINISTIC for one in begin.defenses):
        return "a defence may draw noise, which a repetition draws afresh"
    for facts in (_TRAINING, _PLATFORM):
        if names := [name for name in facts if _fact(begin, name) != _fact(other, name)]:
            return f"different {' and '.join(names)}, see the first lines of {RECORD}"
    machine = begin.machine or {}
    if machine.get("device") != "cpu" and not machine.get("deterministic"):
        return "a GPU repeats itself only with torch.use_deterministic_algorithms(True)"
    if (begin.training or {}).get("processes", 1) != 1:
        return "the order of rows is known of the first process alone"
    return ""


def _fact(begin: BeginLine, name: str) -> object:
    """Return a fact of the first line; of optimizers, no rate that a schedule has reached."""
    return _without_rates(getattr(begin, name))


def _without_rates(fact: object) -> object:
    if isinstance(fact, Mapping):
        scheduled = "initial_lr" in fact
        return {n: _without_rates(v) for n, v in fact.items() if n != "lr" or not scheduled}
    return [_without_rates(one) for one in fact] if isinstance(fact, list) else fact


def _other_start(fit: FitLog, again: FitLog) -> str:
    """Return why two runs may have begun with other weights or rows; empty where they did not."""
    assert fit.begin is not None
    assert again.begin is not None
    weights, others = fit.begin.weights or {}, again.begin.weights or {}
    if set(weights) != {*_KINDS} or weights != others:
        return "different weights before the first step, or not all were hashed"
    if fit.begin.resumed is not None or again.begin.resumed is not None:
        return "one of them went on from a checkpoint: repeat the training from its first step"
    if fit.end is None or again.end is None:
        return "one of them has no last line"
    if fit.end.row_order is not None and fit.end.row_order == again.end.row_order:
        return ""
    return (
        "another order of rows, or another row_order.key: copy that of the run into the folder of "
        "the repetition before it begins, and draw the rows by the same seed"
    )


def _attacks_of(begin: BeginLine) -> object:
    """Return the attacks and how they are run, but for when it looks."""
    monitor = begin.monitor
    if monitor is not None:
        monitor = replace(monitor, more={n: v for n, v in monitor.more.items() if n != "looks"})
    return monitor, begin.attacks


def _has_budget(config: JsonObject | None) -> bool:
    """Return whether an attack stops after some seconds, so that its results may differ."""
    return any("seconds" in key and value is not None for key, value in (config or {}).items())


def _losses(fit: FitLog) -> Values:
    """Return the losses of a run; those between looks are logged at other moments of a step."""
    lines: list[LookLine | MetricsLine] = [*fit.looks, *fit.metrics]
    return {
        (line.step, ("look" if isinstance(line, LookLine) else _INTERVAL, name)): value
        for line in lines
        for name, value in (line.utility or {}).items()
        if "loss" in name
    }


def _weights(fit: FitLog) -> Values:
    """Return the hash of each checkpoint, and of each trained tensor that a run ended with."""
    hashes = fit.end.weights if fit.end is not None else None
    step = fit.end.step if fit.end is not None else 0
    saved = [one for one in fit.checkpoints if one.weights is not None]
    values: Values = {(one.step, (_SAVED,)): one.weights for one in saved}
    return values | {(step, ("weights", name)): one for name, one in (hashes or {}).items()}


def _results_before(fit: FitLog, before: float) -> Values:
    """Return what attacks without a budget of time read before a step."""
    return {
        (line.step, ("leakage", line.stage, line.attack, name)): value
        for line in fit.results
        if line.step < before and not _has_budget(line.config)
        for name, value in line.metrics.items()
    }
