"""Everything that a report says: the source of each of its forms.

Nothing here is typed by hand that the run knows. What the run does not know is ``NOT_RECORDED``, or
comes from ``report.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_fedleak.records import JsonObject, MetricValue, named
from lightning_fedleak.records.fields import is_number
from lightning_fedleak.records.files import first_of
from lightning_fedleak.report.advice import next_steps
from lightning_fedleak.report.bounds import JointAccount, joint_accounts
from lightning_fedleak.report.fits import FitSummary, fit_summary
from lightning_fedleak.report.logs import FitLog, Logs, merge_monitors
from lightning_fedleak.report.privacy import Account, accounts
from lightning_fedleak.report.verdict import ReportVerdict, verdict, verdict_without_runs
from lightning_fedleak.report.wording import visible

SCHEMA = 2
"""Version of ``report.json``."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The results of a command.

    Attributes:
        settings: of the command.
        columns: names.
        rows: one for each cell of the command; None is empty.
    """

    settings: JsonObject = field(metadata={"key": "about"})
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a report says.

    Attributes:
        schema: version of ``report.json``.
        date: when it was made, in UTC.
        package: this package, with its version.
        verdict: what a reader who reads one thing should read.
        next_steps: what people can do, the most urgent first.
        runs: one for each fit or federation.
        privacy_together: what several fits have spent together.
        results: of commands, by the name of the file.
        problems: what could not be read, each in a sentence.
        people: what only people know, by the names of ``report.toml``.
    """

    schema: int = SCHEMA
    date: str = named("made")
    package: str = named("made_by")
    verdict: ReportVerdict
    next_steps: Sequence[str]
    runs: Sequence[FitSummary]
    privacy_together: Sequence[JointAccount]
    results: Mapping[str, Table]
    problems: Sequence[str]
    people: JsonObject


def findings(logs: Logs, people: JsonObject | None = None) -> Findings:
    """Return everything that a report says.

    Args:
        logs: of the runs.
        people: what only people know, by the names of ``report.toml``.
    """
    problems = list(logs.problems)
    tables = {}
    for name, content in logs.results.items():
        tables[Path(name).name], odd = _table(content)
        if odd:
            problems.append(
                f"{len(odd)} of the results of {Path(name).name} are not as a command writes "
                f"them: {first_of(odd)}"
            )
    fits, accounts_by_log = _summaries(logs.fits, problems)
    joint = joint_accounts(accounts_by_log)
    content = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package=f"lightning-fedleak {version('lightning-fedleak')}",
        verdict=verdict(fits, joint) if fits else verdict_without_runs(len(tables)),
        next_steps=next_steps(fits),
        runs=fits,
        privacy_together=joint,
        results=tables,
        problems=problems,
        people=dict(people or {}),
    )
    return visible(content)


def _summaries(
    logs: Sequence[FitLog], problems: list[str]
) -> tuple[list[FitSummary], list[tuple[FitLog, Sequence[Account]]]]:
    """Return a summary of each fit, and what each monitor recorded as spent.

    Several monitors of a fit, or processes of a federation, are one fit.
    """
    by_fit: dict[str, list[FitLog]] = {}
    for log in logs:
        by_fit.setdefault(log.fit_name, []).append(log)
    fits: list[FitSummary] = []
    accounts_by_log: list[tuple[FitLog, Sequence[Account]]] = []
    for monitors in by_fit.values():
        log = merge_monitors(monitors)
        fit, odd_ledgers = fit_summary(log)
        fits.append(fit)
        problems += odd_ledgers
        for monitor in monitors:
            own_accounts = fit.privacy if monitor is log else accounts(monitor)[0]
            accounts_by_log.append((monitor, own_accounts))
    return fits, accounts_by_log


# ---- results of commands ------------------------------------------------------------------------


def _table(content: JsonObject) -> tuple[Table, list[int]]:
    """Return a command's results, one row for each cell, and the numbers of rows that are none."""
    cells = list(content.get("results") or content.get("cells") or ())
    odd = [number for number, row in enumerate(cells, 1) if not isinstance(row, Mapping)]
    rows = [_flatten(row) for row in cells if isinstance(row, Mapping)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    rates = [n for n in names if any(isinstance(row.get(n), MetricValue) for row in rows)]
    columns = list(dict.fromkeys([*names[:2], *rates, *names[2:]]))
    settings = {name: v for name, v in content.items() if _is_plain(v) and v is not None}
    return Table(
        settings=settings,
        columns=columns,
        rows=[[row.get(name) for name in columns] for row in rows],
    ), odd


def _is_plain(value: object) -> bool:
    """Return whether a cell of a table can show a value, and strict JSON holds it."""
    return (
        value is None
        or isinstance(value, str | int)
        or (isinstance(value, float) and math.isfinite(value))
    )


def _flatten(row: JsonObject, root: str = "") -> dict[str, Any]:
    """Return numbers and words of nested settings and rates, without lists (of games, say)."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if {"value", "low", "high"} <= value.keys():
                ends = (value[end] for end in ("value", "low", "high"))
                flat[root + name] = MetricValue(*(end if is_number(end) else None for end in ends))
            else:
                flat |= _flatten(value, f"{root}{name}/")
        elif _is_plain(value):
            flat[root + name] = value
    return flat
