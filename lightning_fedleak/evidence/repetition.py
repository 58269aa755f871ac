"""Whether a training that was repeated gave the same, bit for bit.

A training is the same with and without a monitor, so that who does not trust the one who trained
can run the same script on the same data again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path

from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.report import FitLog, read
from lightning_fedleak.report.records import RECORD, LookLine, MetricsLine

_TRAINING = "model", "training", "defenses"
"""Facts of a run's first line that its weights follow from."""
_WITHOUT_NOISE = "Freeze", "GradientCompression"
"""Classes of defences that draw nothing."""
_PLATFORM = "versions", "machine"
"""Facts on which the order of sums in a tensor depends, and so its last bits."""


def check_repetition(fit: FitLog, place: Path, verdict: Verdict) -> str:
    """Compare a run with the last one of another folder: weights, losses and leakage.

    They need the same settings, first weights, order of rows and platform, and no noise that is
    drawn afresh; otherwise the answer is open. Leakage is compared up to the first step at which
    one run looked and the other did not, because games of several looks go on from there.

    Args:
        fit: the run.
        place: folder of the repetition.
        verdict: gets what is wrong.

    Returns:
        What was compared, in words.

    Raises:
        ReportError: the folder has no logs.
    """
    again = read([place / RECORD]).fits[-1]
    if obstacle := _obstacle(fit, again):
        verdict.leave_open(f"'{place}' cannot be held against run {fit.run}: {obstacle}")
        return ""
    states, repeated = dict(_states(fit)), dict(_states(again))
    results, looks = dict(_results(fit)), dict(_results(again))
    differing = {key[0] for key in results.keys() ^ looks.keys()}
    first_other = min(differing, default=float("inf"))
    states |= {key: v for key, v in results.items() if key[0] < first_other}
    repeated |= looks
    common = states.keys() & repeated.keys()
    different = sorted((k for k in common if states[k] != repeated[k]), key=str)
    different.sort(key=lambda key: key[0])
    for step, *names in different[:1]:
        verdict.contradict(
            f"run {fit.run}, step {step}: {' '.join(names)} is not what the repetition in "
            f"'{place}' gives; {len(different)} of {len(common)} values differ"
        )
    if not common & {key for key in states if "weights" in key}:
        verdict.leave_open(f"'{place}' and run {fit.run} have no hash of the same weights")
    return f"repetition: {len(common)} values of weights, losses and leakage"


def _obstacle(fit: FitLog, again: FitLog) -> str:
    """Return why two runs need not give the same; empty where they do."""
    begin, other = fit.begin, again.begin
    if begin is None or other is None or fit.end is None or again.end is None:
        return "one of them is not closed"
    if fit.run == again.run:
        return "it is the same run"
    if begin.resumed or other.resumed:
        return "one of them goes on from a checkpoint: repeat the whole training"
    if any(one.class_name not in _WITHOUT_NOISE for one in begin.defenses):
        return "a defence may draw noise, which a repetition draws afresh"
    for names in (_TRAINING, _PLATFORM):
        if different := [name for name in names if getattr(begin, name) != getattr(other, name)]:
            return f"another {' and '.join(different)}, see the first lines of {RECORD}"
    if not begin.weights or begin.weights != other.weights:
        return "other weights before the first step, or none were hashed"
    if fit.end.row_order is None or fit.end.row_order != again.end.row_order:
        return (
            "another order of rows, or another row_order.key: copy that of the run into the "
            "folder of the repetition before it begins, and draw the rows by the same seed"
        )
    return ""


def _states(fit: FitLog) -> Iterator[tuple[tuple[int, *tuple[str, ...]], Hashable]]:
    """Yield the hashes of trained weights and the losses, by step and name."""
    lines: list[LookLine | MetricsLine] = [*fit.looks, *fit.metrics]
    for line in lines:
        for name, value in (line.utility or {}).items():
            if "loss" in name:
                yield (line.step, name), value
    if fit.end is not None and fit.end.weights is not None:
        yield (fit.end.step, "the", "trained", "weights"), tuple(sorted(fit.end.weights.items()))


def _results(fit: FitLog) -> Iterator[tuple[tuple[int, *tuple[str, ...]], Hashable]]:
    """Yield what attacks read, by step, stage, attack and metric."""
    for line in fit.results:
        for name, value in line.metrics.items():
            yield (line.step, line.stage, line.attack, name), value
