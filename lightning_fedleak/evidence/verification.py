"""Verify a run: check whether its logs, gates, report and weights are consistent.

:func:`verify_run` is the public function. It first checks the hash chains of the two logs
(:mod:`~lightning_fedleak.evidence.chain`). If they hold, it checks the decisions of gates, the
report and saved weights against the logs, and the run against a repetition of the same training.

A *look* is a measurement of leakage by all attacks at one step. A *family* is all attacks on one
kind of leak. A *gate* is a rule that acts if a metric of a look exceeds a limit, a *breach*: it
warns, raises an error, stops the run, or hardens it (strengthens a defence).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from lightning_fedleak.evidence import chain
from lightning_fedleak.model.loading import saved_tensors
from lightning_fedleak.private_files import digest_weights, hash_weights, read_regular
from lightning_fedleak.report import Findings, FitLog, ReportError, findings, page, read, records
from lightning_fedleak.report.pages import LEAKAGE, leakage_file
from lightning_fedleak.validate import WrongModel, explain_errors

_REVEALED = re.compile('<h2 class="part">Private text: [^<]*</h2>\n<pre>[^<]*</pre>\n')
REPORT, PAGE = "report.json", "report.html"
Maker = Callable[[Findings], records.JsonObject]  # returns the content of a report


def verify_run(
    run: Path,
    weights: Path | None = None,
    heads: Sequence[str] = (),
    repetition: Path | None = None,
) -> chain.Verdict:
    """Return a verdict on whether the files of a run are consistent.

    Examples:
        >>> from pathlib import Path
        >>> from lightning_fedleak.evidence import verify_run
        >>> check = verify_run(Path("lightning_logs/version_0"))  # doctest: +SKIP
        >>> check.status  # doctest: +SKIP
        0

    Args:
        run: The folder that holds ``leakage.jsonl`` and ``run.jsonl``.
        weights: A folder or file of saved weights. They should be the final weights of the folder's
            last run, or those of a checkpoint that the logs list.
        heads: Hashes of last lines that were kept elsewhere; each must be the hash of a line.
        repetition: A folder of logs of the same training, run again; see :func:`_check_repetition`.

    Raises:
        ReportError: A file is missing or cannot be read.
    """
    verdict = chain.Verdict()
    checked, not_checked = verdict.checked, verdict.not_checked
    checked += ["order and completeness of the logs", "gates on attacks on shared updates"]
    not_checked.append("gates on trained weights and of rounds, or that had to act on an unknown")
    logs = {
        name: chain.read_chain(run / name, verdict) for name in (records.RECORD, records.RESULTS)
    }
    verdict.lines |= {name: len(log.hashes) for name, log in logs.items()}
    verdict.heads |= {name: log.head for name, log in logs.items()}
    chain.check_closings(logs[records.RECORD], logs[records.RESULTS], verdict)
    if other_runs := chain.runs_below(run):
        verdict.leave_open(f"{other_runs}: they are not checked; verify each")
    if chain.check_plans(logs[records.RECORD], verdict):
        checked.append("looks at the planned steps")
    else:
        not_checked.append("looks: no run says at which steps they are planned")
    for head in {*heads}.difference(*(log.hashes for log in logs.values())):
        verdict.contradict(f"no line has the hash {head}: lines were changed or cut")
    fits = [] if verdict.contradictions else read([run / records.RECORD]).fits
    for fit in fits:
        _check_gates(fit, verdict)
    not_checked += _stated(fits)
    _check_report(run / REPORT, run, fits, records.as_json, verdict)
    if heads:
        checked.append("noted hashes")
    else:
        not_checked.append("whether all hashes were computed again: --head HASH, noted elsewhere")
    if weights is None or not fits:
        reason = "--weights DIR" if weights is None else "the logs contradict themselves"
        not_checked.append(f"which weights these are: {reason}")
    else:
        _check_weights(fits, weights, verdict)
        checked.append("weights")
        leakage = (weights if weights.is_dir() else weights.parent) / LEAKAGE
        if leakage.is_symlink():  # as in a cache of the hub
            verdict.leave_open(f"{LEAKAGE} is a link, which is not followed: copy its file")
        elif leakage.exists():
            _check_report(leakage, run, fits, leakage_file, verdict)
    if repetition is None:
        not_checked.append("whether training again gives this: --repetition DIR, of the last run")
    elif (last_fit := _last_fit(fits)) is None or verify_run(repetition).contradictions:
        verdict.leave_open(
            f"'{repetition}' was not compared: its logs or the run's contradict themselves"
        )
    else:
        checked += _check_repetition(last_fit, repetition, verdict)
    return verdict


def _stated(fits: Sequence[FitLog]) -> list[str]:
    """Return what users say of runs, which nothing checks."""
    return sorted({fit.begin.stated for fit in fits if fit.begin is not None} - {""})


# ---- gates --------------------------------------------------------------------------------------


def _check_gates(fit: FitLog, verdict: chain.Verdict) -> None:
    """Check that each gate of a run acted exactly when the logged values require it.

    Gates on the value of one attack are checked. Gates on the worst value of a family of attacks
    are checked if one of its attacks exceeded the threshold. Gates on the trained weights and
    decisions by an unknown value or a low control (the same attack on known data) are not checked,
    because they depend on more than the logged values.
    """
    if fit.is_federation:  # a RoundGate may act below its threshold if a control is low
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
    """Yield the steps, with the value, at which a gate should have acted and did not.

    A gate with patience n acts at the breach after n breaches in a row. Whether an unknown value is
    a breach is its setting ``strict``. After the gate has hardened a defence, it counts from 0;
    after any other action than a warning it judges no more. Gates on the lower end of an interval
    over all looks are not checked.

    The last step of a run that was cut off is not judged, because the gate may not have decided
    yet. A resumed run whose gate has patience is not judged, because its earlier breaches are not
    in the logs.
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
            # An ignored unknown value keeps the count of breaches in a row.
            breaches = breaches + 1 if is_breach else breaches * (value is None)
            is_judged = step not in actions and (is_finished or step != fit.last_step)
            if value is not None and breaches > patience and is_judged:
                yield step, value
        if actions.get(step) == "hardened":
            breaches = 0
        elif step in actions and gate.action in ("stop", "raise", "harden"):
            return


def _watched_values(fit: FitLog, metric: str) -> dict[int, float | None]:
    """Return the values of a metric by step; None if it is unknown.

    The lines of results do not hold the worst value of a family. It is at least the highest known
    value of the family's attacks at that step, which is returned instead.
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
            if known_values := [value for value in headlines if value is not None]:
                values[line.step] = max(known_values)
    return values


# ---- report and weights -------------------------------------------------------------------------


def _check_report(
    path: Path, run: Path, fits: Sequence[FitLog], make: Maker, verdict: chain.Verdict
) -> None:
    """Check that a report has the content that ``make`` computes from the logs of a folder.

    The report may be on all runs of the folder or on one of them. If its runs have had as many
    steps and looks as the logs, it must agree; otherwise it may only be older. The folder may have
    another name now. The page beside ``report.json`` must be the one that this report gives.

    Args:
        path: The path of the report.
        run: The folder of the logs.
        fits: The runs in the logs.
        make: Returns the content of such a report.
        verdict: The verdict to which findings are added.
    """
    try:
        report = json.loads(read_regular(path))
        state, label = _progress_of(report), str(report["runs"][0]["name"])
        people = report.get("people", {"release": report.get("release", {})})
        people, date = {name: dict(facts) for name, facts in people.items()}, str(report["made"])
        if Path(label).name != label or not label.isprintable():
            raise ValueError("a run is not named by a folder")
    except FileNotFoundError:
        note = verdict.leave_open if (run / PAGE).exists() else verdict.not_checked.append
        note(f"a report: there is no {REPORT}")
        return
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        verdict.contradict(f"{path.name} cannot be read as a report")
        return
    verdict.checked.append(path.name)
    if report.get("made_by") != f"lightning-fedleak {version('lightning-fedleak')}":
        verdict.leave_open(
            f"{path.name} is not compared: it was made by another version, {report.get('made_by')}"
        )
        return
    states = []
    for name in (None, *(fit.run for fit in fits)):  # None: a report on all runs
        logs = read([run / records.RECORD], run=name)
        renamed = [replace(f, folder=Path(label), folders=[f.folder]) for f in logs.fits]
        content = findings(replace(logs, fits=tuple(renamed)), people)
        named = [text.replace(f"{run.resolve().name}/", f"{label}/") for text in content.problems]
        content = replace(content, date=date, problems=named)
        made = records.as_json(make(content))
        if made == report:
            if path == run / REPORT and (run / PAGE).exists():
                _check_page(run / PAGE, page(content), fits, verdict)
            return
        states.append(_progress_of(made))
    if state in states:
        verdict.contradict(f"{path.name} differs from the report that the logs give")
    elif fits:
        verdict.leave_open(
            f"{path.name} is older than the logs or the ledger beside them, or about other runs"
        )


def _check_page(path: Path, expected: str, fits: Sequence[FitLog], verdict: chain.Verdict) -> None:
    """Check that a page is the one that the report beside it gives, but for revealed texts.

    The page of a running fit is not compared.
    """
    with explain_errors(f"'{path}' cannot be read", OSError, error=ReportError):
        text = read_regular(path).decode(errors="replace")
    without_texts = _REVEALED.sub("", text)
    if fits and fits[-1].end is None and ' data-live="' in text:
        verdict.leave_open(f"{PAGE} is not compared: its run goes on")
    elif without_texts != expected:
        verdict.contradict(f"{PAGE} differs from the page that {REPORT} gives")
    elif without_texts != text:
        verdict.leave_open(f"{PAGE} shows revealed texts, which are not compared")
    else:
        verdict.checked.append(PAGE)


def _progress_of(report: records.JsonObject) -> list[tuple[object, ...]]:
    """Return each run of a report with its steps, looks and ledgers when it was made."""
    runs, keys = report["runs"], ("run", "ended", "steps")
    # A cost is a list of an attack, its number of looks, their seconds and their share.
    looks = [[count for _, count, *_ in run.get("costs", ())] for run in runs]
    ledgers = [
        [a.get("ledger") for a in run.get("privacy", ()) if isinstance(a, dict)] for run in runs
    ]
    return [(*map(run.get, keys), *more) for run, *more in zip(runs, looks, ledgers, strict=True)]


def match_weights(run: Path, weights: Path) -> chain.Verdict:
    """Return the verdict on saved weights alone: whether they are those of the runs in a folder.

    Raises:
        ReportError: The logs or the weights cannot be read.
    """
    verdict = chain.Verdict()
    _check_weights(read([run / records.RECORD]).fits, weights, verdict)
    return verdict


def _check_weights(fits: Sequence[FitLog], source: Path, verdict: chain.Verdict) -> None:
    """Check that saved weights are those of a logged checkpoint, or the last run's final ones.

    Tensors are compared by their types and hashes. Different weights are a contradiction, unless
    they may be those of a checkpoint that cannot be compared (``is_unclear``). Tensors that are
    missing, or saved in another type, leave the question open.
    """
    with explain_errors("--weights", WrongModel, error=ReportError):
        saved = hash_weights(saved_tensors(source))
    checkpoints, is_unclear = _checkpoints_of(fits, saved)
    fit = _last_fit(fits)
    trained = dict((fit.end.weights if fit is not None and fit.end is not None else None) or {})
    if checkpoints and not (trained and trained.items() <= saved.items()):
        verdict.note(f"'{source}' holds the trained tensors of {checkpoints[0]}")
        return
    if fit is None or not trained:
        verdict.leave_open("the last run logged no weights: sharded, or not finished")
        return
    shared = trained.keys() & saved.keys()
    types = {n for n in shared if trained[n].split()[0] != saved[n].split()[0]}
    different = sorted(n for n in shared - types if trained[n] != saved[n])
    is_unclear |= bool(types) and any(run.checkpoints for run in fits)
    if different and is_unclear:
        verdict.leave_open(
            f"'{source}' does not hold the final weights of run {fit.run}. It may hold those of a "
            "checkpoint whose tensors were not hashed, are not all there, or are saved in another "
            "type"
        )
    elif different:
        verdict.contradict(
            f"'{source}' does not hold the weights of run {fit.run} or of a logged checkpoint: "
            f"{len(different)} of {len(trained)} trained tensors differ, {different[0]} first"
        )
    elif unknown := len(trained) - len(shared) + len(types):
        verdict.leave_open(
            f"'{source}' holds {len(shared) - len(types)} of the {len(trained)} trained tensors: "
            f"{unknown} are not there, or saved in another type"
        )


def _checkpoints_of(fits: Sequence[FitLog], saved: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the logged checkpoints whose trained tensors have the same hashes as saved ones.

    Returns:
        The run and step of each as text, and whether any logged checkpoint could not be compared.
    """
    checkpoints, is_unclear = [], False
    for line in [checkpoint for fit in fits for checkpoint in fit.checkpoints]:
        names = line.trained or ()
        if not names or line.weights is None or not saved.keys() >= {*names}:
            is_unclear = True
        elif digest_weights({name: saved[name] for name in names}) == line.weights:
            checkpoints.append(f"the checkpoint of run {line.run} at step {line.step}")
    return checkpoints, is_unclear


# ---- the same training again --------------------------------------------------------------------

# A monitor does not change the training. So anyone who doubts a run can run the same script on the
# same data again, and compare.

_Values = dict[tuple[int, tuple[str, ...]], object]
"""The values of a run, by step and by the parts of their name."""

_TRAINING = "model", "training", "defenses"
"""Fields of a run's first line that determine its weights."""
_PLATFORM = "versions", "machine"
"""Fields that determine the order of floating-point sums, and so the last bits of tensors."""
_SAVED = "weights of a checkpoint"
_INTERVAL = "between looks"  # of steps at which leakage was measured
# Groups of parameters; each group has one hash before the first step.
_TENSOR_GROUPS = "trained", "frozen"
_DETERMINISTIC = "Freeze", "GradientCompression"
"""Classes of defences without random numbers."""


def _check_repetition(fit: FitLog, folder: Path, verdict: chain.Verdict) -> list[str]:
    """Compare a run with the last one of another folder: weights, losses and leakage.

    The two must have the same settings, initial weights, order of rows and platform, and no fresh
    random noise. Otherwise they cannot be compared, and the verdict is open. Leakage is compared up
    to the first step at which only one of the runs looked (measured leakage), because later results
    of membership games depend on earlier looks. Results of attacks with a time budget are not
    compared.

    Args:
        fit: The run.
        folder: The folder of the repetition.
        verdict: The verdict to which findings are added.

    Returns:
        A description of the comparison; empty if the runs cannot be compared.

    Raises:
        ReportError: The folder has no logs, or no run begins in them.
    """
    repeated_fit = _last_fit(read([folder / records.RECORD]).fits)
    if fit.begin is None or repeated_fit is None or repeated_fit.begin is None:
        raise ReportError(f"no run begins in '{folder}': name the folder of a repetition's logs")
    begin, repeated_begin = fit.begin, repeated_fit.begin
    if reason := _why_incomparable(begin, repeated_begin) or _why_other_start(fit, repeated_fit):
        verdict.leave_open(f"'{folder}' cannot be compared with run {fit.run}: {reason}")
        return []
    looks, repeated_looks = ({line.step for line in run.looks} for run in (fit, repeated_fit))
    split_step = min(looks ^ repeated_looks, default=math.inf)
    values, repeated = ({**_losses(run), **_weights(run)} for run in (fit, repeated_fit))
    if _attacks_of(begin) == _attacks_of(repeated_begin):
        values |= _results_before(fit, split_step)
        repeated |= _results_before(repeated_fit, split_step)
        if split_step < math.inf:
            verdict.note(
                f"leakage from step {split_step} on is not compared: only one run looked there"
            )
        if timed := [attack.name for attack in begin.attacks if _has_budget(attack.config)]:
            verdict.note(f"not compared, because of a budget of seconds: {', '.join(timed)}")
    else:
        verdict.note("leakage is not compared: the attacks or their settings differ")
    n_weights = len(_weights(fit).keys() & _weights(repeated_fit).keys())
    if not n_weights:
        verdict.leave_open(f"run {fit.run} and '{folder}' have no hashes of weights at one step")
    _compare_values(values, repeated, verdict, split_step)
    n_common = len(values.keys() & repeated.keys())
    counts = f"{n_weights} hashes of weights, {n_common - n_weights} values of losses and leakage"
    return [f"repetition: {counts}"]


def _compare_values(
    values: _Values, repeated: _Values, verdict: chain.Verdict, split_step: float
) -> None:
    """Add the first value that differs, and the first that only one run has, to the verdict.

    Args:
        values: The values of the run.
        repeated: The values of its repetition.
        verdict: The verdict to which findings are added.
        split_step: The first step at which only one run looked. From there on, leakage and losses
            that only one run has logged are no finding.
    """
    common = sorted(values.keys() & repeated.keys())
    different = [key for key in common if values[key] != repeated[key]]
    for step, names in different[:1]:
        verdict.contradict(
            f"step {step}: {', '.join(names)} is not what the repetition gives; {len(different)} "
            f"of {len(common)} values differ"
        )
    unmatched = [
        (step, names)
        for step, names in sorted(values.keys() ^ repeated.keys())
        if names[0] == "weights" or (names[0] not in (_INTERVAL, _SAVED) and step < split_step)
    ]
    for step, names in unmatched[:1]:
        verdict.leave_open(
            f"step {step}: only one run logged {', '.join(names)}; {len(unmatched)} such values in "
            "all"
        )


def _last_fit(fits: Sequence[FitLog]) -> FitLog | None:
    """Return the run that began last; None if none has begun."""
    return next((fit for fit in reversed(fits) if fit.begin is not None), None)


def _why_incomparable(begin: records.BeginLine, repeated: records.BeginLine) -> str:
    """Return why two honest runs may differ, by their first lines; empty if they must agree."""
    if begin.run == repeated.run:
        return "it is the same run"
    if any(defense.class_name not in _DETERMINISTIC for defense in begin.defenses):
        return "a defence may draw noise, and a repetition draws different noise"
    for keys in (_TRAINING, _PLATFORM):
        pairs = [[_without_rates(getattr(b, key)) for b in (begin, repeated)] for key in keys]
        if names := [key for key, (a, b) in zip(keys, pairs, strict=True) if a != b]:
            return f"different {' and '.join(names)}, see the first lines of {records.RECORD}"
    machine = begin.machine or {}
    if machine.get("device") != "cpu" and not machine.get("deterministic"):
        return "a GPU repeats results only with torch.use_deterministic_algorithms(True)"
    if (begin.training or {}).get("processes", 1) != 1:
        return "only the first process logs its order of rows"
    return ""


def _without_rates(fact: object) -> object:
    """Return a field of a first line without the learning rates that a schedule has set."""
    if isinstance(fact, Mapping):
        scheduled = "initial_lr" in fact
        return {n: _without_rates(v) for n, v in fact.items() if n != "lr" or not scheduled}
    return [_without_rates(entry) for entry in fact] if isinstance(fact, list) else fact


def _why_other_start(fit: FitLog, repeated_fit: FitLog) -> str:
    """Return why two runs may have begun with different weights or rows; empty if they did not."""
    assert fit.begin is not None
    assert repeated_fit.begin is not None
    weights, repeated = fit.begin.weights or {}, repeated_fit.begin.weights or {}
    if set(weights) != {*_TENSOR_GROUPS} or weights != repeated:
        return "different weights before the first step, or not all were hashed"
    if fit.begin.resumed is not None or repeated_fit.begin.resumed is not None:
        return "one of them resumed a checkpoint: repeat the training from its first step"
    if fit.end is None or repeated_fit.end is None:
        return "one of them has no last line"
    if fit.end.row_order is not None and fit.end.row_order == repeated_fit.end.row_order:
        return ""
    return (
        "the order of rows or row_order.key differs: copy row_order.key of the run into the folder "
        "of the repetition before it begins, and draw the rows by the same seed"
    )


def _attacks_of(begin: records.BeginLine) -> object:
    """Return the attacks and their settings, without the schedule of looks."""
    monitor = begin.monitor
    if monitor is not None:
        monitor = replace(monitor, more={n: v for n, v in monitor.more.items() if n != "looks"})
    return monitor, begin.attacks


def _has_budget(config: records.JsonObject | None) -> bool:
    """Return whether an attack has a time budget, so that its results may differ."""
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
    """Return the hash of each checkpoint, and of each trained tensor at the end of a run."""
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
