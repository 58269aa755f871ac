"""Reads the log files of runs and sorts their lines by fit.

A *fit* is one training run or federation; each of its *monitors* writes results of attacks, at
*looks* (steps at which leakage is measured). :func:`read` finds the two log files in the folders,
groups their lines by the id of the fit as :class:`FitLog`, and drops fits that are copies of
another one. :func:`merge_monitors` then joins the logs that several monitors wrote of one fit.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from lightning_fedleak.report import records
from lightning_fedleak.report.records.files import short
from lightning_fedleak.report.wording import NOT_RECORDED

K = TypeVar("K")
V = TypeVar("V")


class ReportError(ValueError):
    """Raised if a report cannot be made; the message says what to change."""


@dataclass(frozen=True)
class FitLog:
    """The lines of one fit.

    Attributes:
        folder: The folder of its files.
        run: The id of the fit; empty in the first version.
        begin: The line on its set-up, written before the first step; None if it is missing.
        looks: A line for each look.
        metrics: A line for each change of the user's metrics or of an account between looks.
        results: A line for each look, stage and attack.
        decisions: The decisions of gates.
        checkpoints: The checkpoints in the order in which they were written.
        end: The line on its end; None if the fit was cut off, is running, or did not record it.
        reference: The reference model of membership attacks; None without one.
        monitors: The number of monitors that wrote these lines.
        folders: The folders in which files beside the logs are; empty for ``folder``.
    """

    folder: Path
    run: str
    begin: records.BeginLine | None = None
    looks: Sequence[records.LookLine] = ()
    metrics: Sequence[records.MetricsLine] = ()
    results: Sequence[records.ResultLine] = ()
    decisions: Sequence[records.GateLine] = ()
    checkpoints: Sequence[records.CheckpointLine] = ()
    end: records.EndLine | None = None
    reference: records.ReferenceFacts | None = None
    monitors: int = 1
    folders: Sequence[Path] = ()

    @property
    def is_federation(self) -> bool:
        """Whether it is the log of a federation; without its first line it counts as none."""
        return self.begin is not None and self.begin.is_federation

    @property
    def looks_at(self) -> frozenset[int]:
        """The steps or rounds at which an attack was tried."""
        steps = (line.step for line in self.results if line.reason_not_played is None)
        return frozenset((*steps, *(line.step for line in self.looks)))

    @property
    def last_step(self) -> int | None:
        """The last step or round that was measured."""
        return max(self.looks_at, default=None)

    @property
    def fit_name(self) -> str:
        """A name that all monitors of one fit share."""
        recorded = self.begin.fit if self.begin is not None else None
        return recorded or f"{self.folder}/{self.run}"


@dataclass(frozen=True)
class Logs:
    """The logs that were read.

    Attributes:
        fits: The fits in the order in which they began.
        problems: The lines and files that could not be read, in sentences.
    """

    fits: tuple[FitLog, ...]
    problems: tuple[str, ...] = ()


def read(places: Sequence[Path], *, run: str | None = None) -> Logs:
    """Return the logs in folders and all their subfolders.

    Args:
        places: Log folders of runs, or log files. For a file, its folder is read, but no subfolder.
        run: The id of the only fit to return; default all.

    Raises:
        ReportError: A place does not exist, or there is no log in them.
    """
    problems: list[str] = []
    fits: list[FitLog] = []
    files = (records.RESULTS, records.RECORD)
    for place in places:
        if not place.is_dir() and (not place.exists() or place.name not in files):
            problem = "is no log of a run" if place.exists() else "does not exist"
            raise ReportError(f"'{place}' {problem}: name the folder of a run's logs")
        paths = [place] if place.is_file() else [p for name in files for p in place.rglob(name)]
        for folder in sorted({path.parent for path in paths}):
            fits += _fits(folder, problems)
    if not fits:
        names = ", ".join(f"'{place}'" for place in places)
        raise ReportError(
            f"no {records.RESULTS} in {names}. A LeakageMonitor writes it to the logger's folder "
            "(lightning_logs/version_0, say)"
        )
    by_folder = {(fit.folder.resolve(), fit.run): fit for fit in fits}  # places may overlap
    fits = [fit for fit in by_folder.values() if run is None or fit.run == run]
    if not fits:
        raise ReportError(f"no run {run} in {', '.join(map(str, places))}")
    fits = _without_copies(fits, problems)
    fits.sort(key=lambda fit: (fit.begin.time if fit.begin else None) or "")
    return Logs(tuple(fits), tuple(problems))


def _fits(folder: Path, problems: list[str]) -> list[FitLog]:
    """Return the log of each fit in a folder, and add unreadable lines to the problems."""
    lines: list[records.ResultLine | records.RunLine] = []
    for name in (records.RECORD, records.RESULTS):
        file = records.read_lines(folder / name)
        problems += file.problems
        lines += file.lines
    by_run = grouped(lines, lambda line: line.run)
    return [_fit_log(folder, run, fit_lines) for run, fit_lines in by_run.items()]


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Return lists of the values with the same key, in the order of each key's first value."""
    groups: dict[K, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def _fit_log(
    folder: Path, run: str, lines: Sequence[records.ResultLine | records.RunLine]
) -> FitLog:
    """Return the log of one fit; defences on later lines are added to its first line."""
    begin = next((line for line in lines if isinstance(line, records.BeginLine)), None)
    references = (line.reference for line in lines if isinstance(line, records.PoolLine))
    if begin is not None:
        later = [line for line in lines if isinstance(line, records.DefenseLine)]
        begin = replace(begin, defenses=(*begin.defenses, *later))
    return FitLog(
        folder,
        run,
        begin=begin,
        looks=[line for line in lines if isinstance(line, records.LookLine)],
        metrics=[line for line in lines if isinstance(line, records.MetricsLine)],
        results=[line for line in lines if isinstance(line, records.ResultLine)],
        decisions=[line for line in lines if isinstance(line, records.GateLine)],
        checkpoints=[line for line in lines if isinstance(line, records.CheckpointLine)],
        end=next((line for line in lines if isinstance(line, records.EndLine)), None),
        reference=next(filter(None, references), None),
    )


def _without_copies(fits: Sequence[FitLog], problems: list[str]) -> list[FitLog]:
    """Return the fits without those whose lines are all in another folder too, with the same id."""
    runs = Counter(fit.run for fit in fits if fit.run)  # the first version had no ids
    repeated = [(fit, _texts(fit)) for fit in fits if runs[fit.run] > 1]
    originals: list[tuple[FitLog, set[str]]] = []
    copies: list[FitLog] = []
    for fit, texts in sorted(repeated, key=lambda pair: -len(pair[1])):
        original = next((f for f, lines in originals if f.run == fit.run and texts <= lines), None)
        if original is None:
            originals.append((fit, texts))
        else:
            copies.append(fit)
            problems.append(
                f"run {fit.run} is in {short(original.folder)} and in {short(fit.folder)}: only "
                "the first is counted"
            )
    return [fit for fit in fits if all(fit is not copy for copy in copies)]


def _texts(fit: FitLog) -> set[str]:
    """Return all lines of a fit as text."""
    lines = (*fit.looks, *fit.metrics, *fit.results, *fit.decisions, fit.begin, fit.end)
    return {json.dumps(records.as_json(line), sort_keys=True) for line in lines if line is not None}


# ---- several monitors of one fit ----------------------------------------------------------------


def merge_monitors(logs: Sequence[FitLog]) -> FitLog:
    """Merge the logs that several monitors wrote of one fit.

    The merged log has an end if all monitors recorded it. In a federation one process is enough,
    since clients do not learn when the federation ends. Checkpoints are left out:
    verification reads them from the log of each monitor.
    """
    if len(logs) == 1:
        return logs[0]
    begin = _merge_begins([log.begin for log in logs if log.begin is not None])
    ends = [log.end for log in logs if log.end is not None]
    is_ended = bool(ends) and (len(ends) == len(logs) or begin.is_federation)
    decisions = _by_step([log.decisions for log in logs])
    return FitLog(
        logs[0].folder,
        ", ".join(log.run for log in logs),
        begin=begin,
        looks=_by_step([log.looks for log in logs]),
        metrics=_by_step([log.metrics for log in logs]),
        results=_by_step([log.results for log in logs]),
        decisions=list({repr(replace(line, run="")): line for line in decisions}.values()),
        end=ends[-1] if is_ended else None,
        reference=next(filter(None, (log.reference for log in logs)), None),
        monitors=len(logs),
        folders=[*dict.fromkeys(f for log in logs for f in log.folders or (log.folder,))],
    )


def _by_step(lists: Sequence[Sequence[V]]) -> list[V]:
    """Return the lines of all lists, sorted by step."""
    return sorted((line for lines in lists for line in lines), key=attrgetter("step"))


def _merge_begins(begins: Sequence[records.BeginLine]) -> records.BeginLine:
    """Merge the first lines of a fit's monitors; further fields are those of the first one."""
    attacks = _unique_by_name([begin.attacks for begin in begins])
    names = {attack.name for attack in attacks}
    not_played = _unique_by_name([begin.not_played or () for begin in begins])
    monitors = [begin.monitor for begin in begins if begin.monitor is not None]
    return replace(
        begins[0],
        attacks=attacks,
        families=_unique_by_name([begin.families for begin in begins]),
        not_played=tuple(attack for attack in not_played if attack.name not in names),
        gates=_unique_by_name([begin.gates or () for begin in begins]),
        defenses=tuple(defense for begin in begins for defense in begin.defenses),
        unread=_unread_by_all(begins),
        monitor=_merge_settings(monitors) if monitors else None,
        settings_hash=", ".join(begin.settings_hash or NOT_RECORDED for begin in begins),
    )


def _unread_by_all(begins: Sequence[records.BeginLine]) -> tuple[str, ...]:
    """Return the parameters that no attack of any monitor reads."""
    names, *others = [begin.unread or () for begin in begins]
    return tuple(name for name in names if all(name in unread for unread in others))


def _merge_settings(monitors: Sequence[records.MonitorFacts]) -> records.MonitorFacts:
    """Return the first monitor's settings with the capabilities and stages of all monitors."""
    adversary = [capability for monitor in monitors for capability in monitor.adversary or ()]
    stages = [stage for monitor in monitors for stage in monitor.stages or ()]
    return replace(
        monitors[0], adversary=tuple(dict.fromkeys(adversary)), stages=tuple(dict.fromkeys(stages))
    )


def _unique_by_name(lists: Sequence[Sequence[V]]) -> tuple[V, ...]:
    """Return the entries of all lists, each name once; of entries with the same name, the last."""
    name_of = attrgetter("name")
    return tuple({name_of(entry): entry for entries in lists for entry in entries}.values())
