"""Verify a run: check whether its logs, gates, report and weights fit together.

:func:`verify_run` is the only entry. It first checks the hash chains of the two logs
(:mod:`~lightning_fedleak.evidence.chain`). If they hold, it checks the gates' decisions, the report
and saved weights against the logs, and the run against a repetition of the training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_fedleak.evidence.chain import (
    Verdict,
    check_closings,
    check_plans,
    read_chain,
    runs_below,
)
from lightning_fedleak.private_files import digest_weights, hash_weights
from lightning_fedleak.report import Findings, FitLog, ReportError, findings, read, records
from lightning_fedleak.report.files import LEAKAGE
from lightning_fedleak.report.html import leakage_file
from lightning_fedleak.validate import explain_errors

REPORT = "report.json"
Maker = Callable[[Findings], records.JsonObject]
# Keys of a report whose values differ between reports of the same logs.
_PER_REPORT_KEYS = ("made", "made_by", "problems", "people", "release")


def verify_run(
    run: Path,
    weights: Path | None = None,
    heads: Sequence[str] = (),
    repetition: Path | None = None,
) -> Verdict:
    """Return whether the files of a run fit together.

    Examples:
        >>> from pathlib import Path
        >>> from lightning_fedleak.evidence import verify_run
        >>> check = verify_run(Path("lightning_logs/version_0"))  # doctest: +SKIP
        >>> check.status  # doctest: +SKIP
        0

    Args:
        run: folder that holds ``leakage.jsonl`` and ``run.jsonl``.
        weights: folder or file of saved weights. They should be the last weights of the folder's
            last run, or those of a checkpoint that the logs state.
        heads: hashes of last lines that were kept elsewhere; each must be the hash of a line.
        repetition: folder of logs of the same training, run again; see :func:`_check_repetition`.

    Raises:
        ReportError: a file is missing or cannot be read.
    """
    verdict = Verdict()
    checked, not_checked = verdict.checked, verdict.not_checked
    checked += ["order and completeness of the logs", "gates on attacks on what is shared"]
    not_checked.append("gates on trained weights and of rounds, or that had to act on an unknown")
    logs = {name: read_chain(run / name, verdict) for name in (records.RECORD, records.RESULTS)}
    verdict.lines |= {name: len(log.hashes) for name, log in logs.items()}
    verdict.heads |= {name: log.head for name, log in logs.items()}
    check_closings(logs[records.RECORD], logs[records.RESULTS], verdict)
    if other_runs := runs_below(run):
        verdict.leave_open(f"{other_runs}: they are not checked; verify each")
    if check_plans(logs[records.RECORD], verdict):
        checked.append("looks at the planned steps")
    else:
        not_checked.append("looks: no run says at which steps they are planned")
    for head in {*heads}.difference(*(log.hashes for log in logs.values())):
        verdict.contradict(f"no line has the hash {head}: lines were changed or cut")
    fits = [] if verdict.contradictions else read([run / records.RECORD]).fits
    for fit in fits:
        _check_gates(fit, verdict)
    if (run / REPORT).exists():
        _check_report(run / REPORT, run, fits, records.as_json, verdict)
        checked.append(REPORT)
    else:
        not_checked.append(f"a report: there is no {REPORT}")
    if heads:
        checked.append("noted hashes")
    else:
        not_checked.append("whether all hashes were computed again: --head HASH, noted elsewhere")
    if weights is None or not fits:
        why = "--weights DIR" if weights is None else "the logs contradict themselves"
        not_checked.append(f"which weights these are: {why}")
    else:
        _check_weights(fits, weights, verdict)
        checked.append("weights")
        leakage = (weights if weights.is_dir() else weights.parent) / LEAKAGE
        if leakage.exists():
            _check_report(leakage, run, fits, leakage_file, verdict)
            checked.append(LEAKAGE)
    if repetition is None:
        not_checked.append("whether training again gives this: --repetition DIR, of the last run")
    elif (last := _last_fit(fits)) is None or verify_run(repetition).contradictions:
        verdict.leave_open(
            f"'{repetition}' was not compared: its logs or the run's contradict themselves"
        )
    else:
        checked += _check_repetition(last, repetition, verdict)
    return verdict


# ---- gates --------------------------------------------------------------------------------------


def _check_gates(fit: FitLog, verdict: Verdict) -> None:
    """Check that each gate of a run acted exactly when the logged values require it.

    Gates on the value of one attack are checked, and gates on the worst of a family if one of its
    attacks exceeded the threshold. Gates on the trained weights are not checked, nor decisions by
    an unknown value or a low control: they depend on more than the logged values.
    """
    if fit.is_federation:  # a RoundGate may act below its threshold, where a control is low
        return
    for decision in fit.decisions:
        limit, value = decision.at_most, decision.measured
        if limit is not None and value is not None and value <= limit:
            verdict.contradict(
                f"run {fit.run}, step {decision.step}: gate '{decision.gate}' acted at "
                f"{value:g}, which is not above {limit:g}"
            )
    for gate in (fit.begin.gates or ()) if fit.begin is not None else ():
        for step, value in _missed_breaches(fit, gate):
            verdict.contradict(
                f"run {fit.run}, step {step}: {gate.metric} is {value:g}, and gate "
                f"'{gate.name}' (at most {gate.at_most:g}) did not act"
            )


def _missed_breaches(fit: FitLog, gate: records.GateFacts) -> Iterator[tuple[int, float]]:
    """Yield the steps at which a gate had to act by the logged values and did not.

    The last step of a run that was cut off is not judged, because the gate may not have decided
    yet. A resumed run with patience is not judged: its earlier breaches are in no line.
    """
    limit, patience, breaches = gate.at_most, gate.patience or 0, 0
    resumed = fit.begin is not None and fit.begin.resumed is not None
    if limit is None or gate.bound == "lower" or (resumed and patience):
        return
    actions = {line.step: line.did for line in fit.decisions if line.gate == gate.name}
    is_finished = fit.end is not None and fit.end.outcome == "finished"
    values = _watched_values(fit, gate.metric)
    for step in sorted({*values, *actions}):
        if step in values:
            value = values[step]
            is_breach = bool(gate.strict) if value is None else value > limit
            breaches = breaches + 1 if is_breach else breaches * (value is None)
            is_judged = step not in actions and (is_finished or step != fit.last_step)
            if value is not None and breaches > patience and is_judged:
                yield step, value
        if actions.get(step) == "hardened":
            breaches = 0
        elif step in actions and gate.action in ("stop", "raise", "harden"):
            return


def _watched_values(fit: FitLog, metric: str) -> dict[int, float | None]:
    """Return the values of a metric by step, None where it is unknown.

    The worst of a family is in no line of results. It is at least the highest known headline of the
    family's attacks at that step, which is returned instead.
    """
    values: dict[int, float | None] = {}
    for line in fit.results:
        family = fit.begin.family_of(line.attack) if fit.begin is not None else None
        prefix = "leakage" if line.stage == "shared" else f"leakage_{line.stage}"
        name = metric.removeprefix(f"{prefix}/{line.attack}/")
        if name != metric:
            values[line.step] = line.value(name)
        elif family is not None and f"{prefix}/worst/{family.name}" == metric:
            headlines = [line.value(family.headline), values.get(line.step)]
            if numbers := [value for value in headlines if value is not None]:
                values[line.step] = max(numbers)
    return values


# ---- report and weights -------------------------------------------------------------------------


def _check_report(
    path: Path, run: Path, fits: Sequence[FitLog], make: Maker, verdict: Verdict
) -> None:
    """Check that a report has the content that ``make`` computes from the logs of a folder.

    Args:
        path: The path of the report.
        run: The folder of the logs.
        fits: The runs in the logs.
        make: Returns the content of such a report.
        verdict: The verdict to which findings are added.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        state = _progress_of(report)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        verdict.contradict(f"{path.name} cannot be read as a report")
        return
    if report.get("made_by") != f"lightning-fedleak {version('lightning-fedleak')}":
        verdict.leave_open(f"{path.name} is of another version, {report.get('made_by')}")
        return
    states = []
    for name in (None, *(fit.run for fit in fits)):
        content = records.as_json(make(findings(read([run / records.RECORD], run=name))))
        if _statements(content) == _statements(report):
            return
        states.append(_progress_of(content))
    if state in states:
        verdict.contradict(f"{path.name} does not say what the logs give")
    elif fits:
        verdict.leave_open(
            f"{path.name} is older than the logs, of other runs, or of a renamed folder"
        )


def _progress_of(report: records.JsonObject) -> list[tuple[object, ...]]:
    """Return the runs of a report, with their steps and numbers of looks when it was made."""
    runs, keys = report["runs"], ("run", "name", "ended", "steps")
    looks = [[count for _, count, *_ in run.get("costs", ())] for run in runs]
    return [(*map(run.get, keys), count) for run, count in zip(runs, looks, strict=True)]


def _statements(report: records.JsonObject) -> records.JsonObject:
    """Return the content of a report that depends on the logs alone: no folders or people."""
    parts = {name: part for name, part in report.items() if name not in _PER_REPORT_KEYS}
    runs = [{n: v for n, v in run.items() if n != "folder"} for run in report["runs"]]
    return {**parts, "runs": runs}


def _check_weights(fits: Sequence[FitLog], place: Path, verdict: Verdict) -> None:
    """Check that saved weights are those of a logged checkpoint, or the last run's final ones."""
    saved = hash_weights(_saved_tensors(place))
    checkpoints, is_unclear = _checkpoints_of(fits, saved)
    last = _last_fit(fits)
    trained = dict((last.end.weights if last is not None and last.end is not None else None) or {})
    if checkpoints and not (trained and trained.items() <= saved.items()):
        verdict.note(f"'{place}' holds the trained tensors of {checkpoints[0]}")
        return
    if last is None or not trained:
        verdict.leave_open("the last run did not note its weights: sharded, or not finished")
        return
    shared = trained.keys() & saved.keys()
    types = {n for n in shared if trained[n].split()[0] != saved[n].split()[0]}
    different = sorted(n for n in shared - types if trained[n] != saved[n])
    is_unclear |= bool(types) and any(fit.checkpoints for fit in fits)
    if different and is_unclear:
        verdict.leave_open(
            f"'{place}' does not hold the last weights of run {last.run}, and may be of a "
            "checkpoint whose tensors were not hashed, are not all there, or are saved in another "
            "type"
        )
    elif different:
        verdict.contradict(
            f"'{place}' does not hold the weights of run {last.run}, nor of a noted checkpoint: "
            f"{len(different)} of {len(trained)} trained tensors differ, {different[0]} first"
        )
    elif unknown := len(trained) - len(shared) + len(types):
        verdict.leave_open(
            f"'{place}' holds {len(shared) - len(types)} of the {len(trained)} trained tensors: "
            f"{unknown} are not there, or saved in another type"
        )


def _checkpoints_of(fits: Sequence[FitLog], saved: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the logged checkpoints that hold exactly these tensors, in words.

    Returns:
        The checkpoints, and whether any logged checkpoint could not be compared.
    """
    checkpoints, is_unclear = [], False
    for line in [checkpoint for fit in fits for checkpoint in fit.checkpoints]:
        names = line.trained or ()
        if not names or line.weights is None or not saved.keys() >= {*names}:
            is_unclear = True
        elif digest_weights({name: saved[name] for name in names}) == line.weights:
            checkpoints.append(f"the checkpoint of run {line.run} at step {line.step}")
    return checkpoints, is_unclear


def _saved_tensors(place: Path) -> dict[str, Tensor]:
    """Return all tensors in a file, or in the files of a folder."""
    patterns = ("*.safetensors", "*model*.bin", "*.ckpt")  # the first kind that exists is read
    by_kind = [sorted(place.glob(pattern)) for pattern in patterns] if place.is_dir() else []
    files = [place] if place.is_file() else next(filter(None, by_kind), [])
    tensors: dict[str, Tensor] = {}
    for path in files:
        with explain_errors(f"'{path}' cannot be read as weights", Exception, error=ReportError):
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                content = content.get("state_dict", content)
                tensors |= {n: t for n, t in content.items() if isinstance(t, Tensor)}
    if not tensors:
        raise ReportError(f"no weights are in '{place}': name a folder of .safetensors files")
    return tensors


# ---- the same training again --------------------------------------------------------------------

# A training is the same with and without a monitor. So anyone who doubts a run can run the same
# script on the same data again.

_Values = dict[tuple[int, tuple[str, ...]], object]
"""The values of a run, by their step and their name (in parts)."""

_TRAINING = "model", "training", "defenses"
"""Fields of a run's first line that determine its weights."""
_PLATFORM = "versions", "machine"
"""Fields that determine the order of floating-point sums, and so the last bits of tensors."""
_SAVED = "weights of a checkpoint"
_INTERVAL = "between looks"
# Groups of parameters; each group has one hash before the first step.
_TENSOR_GROUPS = "trained", "frozen"
_DETERMINISTIC = "Freeze", "GradientCompression"
"""Classes of defences without random numbers."""


def _check_repetition(fit: FitLog, place: Path, verdict: Verdict) -> list[str]:
    """Compare a run with the last one of another folder: weights, losses and leakage.

    The two must have the same settings, initial weights, order of rows and platform, and no fresh
    random noise; otherwise the answer is open. Leakage is compared up to the first step at which
    only one of the runs looked, because later results of games depend on the earlier looks. Results
    of attacks with a time budget are not compared.

    Args:
        fit: The run.
        place: The folder of the repetition.
        verdict: The verdict to which findings are added.

    Returns:
        The comparison in words; empty if the answer is open.

    Raises:
        ReportError: The folder has no logs, or no run begins in them.
    """
    repeated_fit = _last_fit(read([place / records.RECORD]).fits)
    if fit.begin is None or repeated_fit is None or repeated_fit.begin is None:
        raise ReportError(f"no run begins in '{place}': name the folder of a repetition's logs")
    begin, other = fit.begin, repeated_fit.begin
    if reason := _why_incomparable(begin, other) or _why_different_start(fit, repeated_fit):
        verdict.leave_open(f"'{place}' cannot be compared with run {fit.run}: {reason}")
        return []
    looks, other_looks = ({line.step for line in run.looks} for run in (fit, repeated_fit))
    split_step = min(looks ^ other_looks, default=math.inf)
    values, repeated = ({**_losses(run), **_weights(run)} for run in (fit, repeated_fit))
    if _attacks_of(begin) == _attacks_of(other):
        values |= _results_before(fit, split_step)
        repeated |= _results_before(repeated_fit, split_step)
        if split_step < math.inf:
            verdict.note(
                f"leakage from step {split_step} on is not compared: one run alone looked there"
            )
        if timed := [attack.name for attack in begin.attacks if _has_budget(attack.config)]:
            verdict.note(f"not compared, because of a budget of seconds: {', '.join(timed)}")
    else:
        verdict.note("leakage is not compared: other attacks, or other settings of them")
    weights = len(_weights(fit).keys() & _weights(repeated_fit).keys())
    if not weights:
        verdict.leave_open(f"run {fit.run} and '{place}' have no hashes of weights at one step")
    _compare_values(values, repeated, verdict, split_step)
    common = len(values.keys() & repeated.keys())
    values_of = f"{weights} hashes of weights, {common - weights} values of losses and leakage"
    return [f"repetition: {values_of}"]


def _compare_values(
    values: _Values, repeated: _Values, verdict: Verdict, split_step: float
) -> None:
    """Add the first value that differs, and the first that only one run has, to the verdict.

    Args:
        values: The values of the run.
        repeated: The values of its repetition.
        verdict: The verdict to which findings are added.
        split_step: The first step at which only one run looked. From there on leakage and losses
            may be logged by one run alone.
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
        if names[0] == "weights" or (names[0] not in (_INTERVAL, _SAVED) and step < split_step)
    ]
    for step, names in alone[:1]:
        verdict.leave_open(
            f"step {step}: only one run logged {', '.join(names)}, and {len(alone)} such values "
            "in all"
        )


def _last_fit(fits: Sequence[FitLog]) -> FitLog | None:
    """Return the run that began last; None if none has begun."""
    return next((fit for fit in reversed(fits) if fit.begin is not None), None)


def _why_incomparable(begin: records.BeginLine, other: records.BeginLine) -> str:
    """Return why two honest runs may differ, by their first lines; empty if they must agree."""
    if begin.run == other.run:
        return "it is the same run"
    if any(defense.class_name not in _DETERMINISTIC for defense in begin.defenses):
        return "a defence may draw noise, which a repetition draws afresh"
    for facts in (_TRAINING, _PLATFORM):
        pairs = [[_without_rates(getattr(run, name)) for run in (begin, other)] for name in facts]
        if names := [name for name, (a, b) in zip(facts, pairs, strict=True) if a != b]:
            return f"different {' and '.join(names)}, see the first lines of {records.RECORD}"
    machine = begin.machine or {}
    if machine.get("device") != "cpu" and not machine.get("deterministic"):
        return "a GPU repeats itself only with torch.use_deterministic_algorithms(True)"
    if (begin.training or {}).get("processes", 1) != 1:
        return "the order of rows is known of the first process alone"
    return ""


def _without_rates(fact: object) -> object:
    """Return a fact of a first line without the learning rates that a schedule has reached."""
    if isinstance(fact, Mapping):
        scheduled = "initial_lr" in fact
        return {n: _without_rates(v) for n, v in fact.items() if n != "lr" or not scheduled}
    return [_without_rates(entry) for entry in fact] if isinstance(fact, list) else fact


def _why_different_start(fit: FitLog, repeated_fit: FitLog) -> str:
    """Return why two runs may have begun with different weights or rows; empty if they did not."""
    assert fit.begin is not None
    assert repeated_fit.begin is not None
    weights, repeated = fit.begin.weights or {}, repeated_fit.begin.weights or {}
    if set(weights) != {*_TENSOR_GROUPS} or weights != repeated:
        return "different weights before the first step, or not all were hashed"
    if fit.begin.resumed is not None or repeated_fit.begin.resumed is not None:
        return "one of them went on from a checkpoint: repeat the training from its first step"
    if fit.end is None or repeated_fit.end is None:
        return "one of them has no last line"
    if fit.end.row_order is not None and fit.end.row_order == repeated_fit.end.row_order:
        return ""
    return (
        "another order of rows, or another row_order.key: copy that of the run into the folder of "
        "the repetition before it begins, and draw the rows by the same seed"
    )


def _attacks_of(begin: records.BeginLine) -> object:
    """Return the attacks and their settings, without the schedule of looks."""
    monitor = begin.monitor
    if monitor is not None:
        monitor = replace(monitor, more={n: v for n, v in monitor.more.items() if n != "looks"})
    return monitor, begin.attacks


def _has_budget(config: records.JsonObject | None) -> bool:
    """Return whether an attack stops after some seconds, so that its results may differ."""
    return any("seconds" in key and value is not None for key, value in (config or {}).items())


def _losses(fit: FitLog) -> _Values:
    """Return the losses of a run.

    Losses at looks and between looks have different names, because they are logged at different
    moments of a step.
    """
    lines: list[records.LookLine | records.MetricsLine] = [*fit.looks, *fit.metrics]
    return {
        (line.step, ("look" if isinstance(line, records.LookLine) else _INTERVAL, name)): value
        for line in lines
        for name, value in (line.utility or {}).items()
        if "loss" in name
    }


def _weights(fit: FitLog) -> _Values:
    """Return the hash of each checkpoint, and of each trained tensor that a run ended with."""
    hashes = fit.end.weights if fit.end is not None else None
    step = fit.end.step if fit.end is not None else 0
    saved = [line for line in fit.checkpoints if line.weights is not None]
    values: _Values = {(line.step, (_SAVED,)): line.weights for line in saved}
    return values | {(step, ("weights", name)): digest for name, digest in (hashes or {}).items()}


def _results_before(fit: FitLog, before: float) -> _Values:
    """Return the results before a step, without those of attacks with a time budget."""
    return {
        (line.step, ("leakage", line.stage, line.attack, name)): value
        for line in fit.results
        if line.step < before and not _has_budget(line.config)
        for name, value in line.metrics.items()
    }
