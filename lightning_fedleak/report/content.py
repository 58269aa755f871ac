"""Everything that a report says: the source of each of its forms.

Nothing here is typed by hand that the run knows. What the run does not know is ``NOT_RECORDED``, or
comes from ``report.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from lightning_fedleak.report.bounds import JointAccount, joint_accounts
from lightning_fedleak.report.fits import FitSummary, fit_summaries
from lightning_fedleak.report.logs import Logs, Table
from lightning_fedleak.report.records import JsonObject, named
from lightning_fedleak.report.verdict import (
    ReportVerdict,
    next_steps,
    verdict,
    verdict_without_runs,
)
from lightning_fedleak.report.wording import visible

SCHEMA = 2
"""Version of ``report.json``."""


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
    tables = {Path(name).name: table for name, table in logs.results.items()}
    fits, accounts_by_log = fit_summaries(logs.fits, problems)
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
