"""Everything that a report says: the source of each of its forms.

Nothing here is typed by hand that the run knows. What the run does not know is ``NOT_RECORDED``, or
comes from ``report.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from lightning_fedleak.report.advice import next_steps
from lightning_fedleak.report.bounds import JointAccount, joint_accounts
from lightning_fedleak.report.comparing import Comparison, comparison, names_of
from lightning_fedleak.report.fits import FitSummary, fit_summaries
from lightning_fedleak.report.logs import Logs
from lightning_fedleak.report.overview import Overview, Reading, of_what_left, overview, plain
from lightning_fedleak.report.records import HIGH, JsonObject, named
from lightning_fedleak.report.wording import FOR_UNIT, digits, visible

SCHEMA = 3
"""Version of ``report.json``."""


@dataclass(frozen=True)
class ReportVerdict:
    """The verdict on some runs.

    Attributes:
        sentence: the first sentence of the page.
        sentences: all that the page says first, in sentences.
        level: ``"high"``, ``"some"`` or ``"unknown"``.
        worst: the highest value of each kind of leak.
    """

    sentence: str
    sentences: Sequence[str]
    level: str
    worst: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a report says.

    Attributes:
        schema: version of ``report.json``.
        date: when it was made, in UTC.
        package: this package, with its version.
        verdict: what a reader who reads one thing should read.
        overviews: what the page says first of each run.
        comparison: several runs side by side; None of one.
        next_steps: what people can do, the most urgent first.
        runs: one for each fit or federation.
        privacy_together: what several fits have spent together.
        problems: what could not be read, each in a sentence.
        people: what only people know, by the names of ``report.toml``.
    """

    schema: int = SCHEMA
    date: str = named("made")
    package: str = named("made_by")
    verdict: ReportVerdict
    overviews: Sequence[Overview]
    comparison: Comparison | None
    next_steps: Sequence[str]
    runs: Sequence[FitSummary]
    privacy_together: Sequence[JointAccount]
    problems: Sequence[str]
    people: JsonObject


def findings(logs: Logs, people: JsonObject | None = None) -> Findings:
    """Return everything that a report says.

    Args:
        logs: of the runs.
        people: what only people know, by the names of ``report.toml``.
    """
    problems = list(logs.problems)
    fits, accounts_by_log = fit_summaries(logs.fits, problems)
    joint = joint_accounts(accounts_by_log)
    overviews = [overview(fit) for fit in fits]
    compared = comparison(fits, overviews) if len(fits) > 1 else None
    content = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package=f"lightning-fedleak {version('lightning-fedleak')}",
        verdict=_verdict(fits, overviews, compared, joint),
        overviews=overviews,
        comparison=compared,
        next_steps=next_steps(fits),
        runs=fits,
        privacy_together=joint,
        problems=problems,
        people=dict(people or {}),
    )
    return visible(content)


def _verdict(
    fits: Sequence[FitSummary],
    overviews: Sequence[Overview],
    compared: Comparison | None,
    joint: Sequence[JointAccount],
) -> ReportVerdict:
    sentences = overviews[0].sentences
    if compared is not None:
        parts = zip(names_of(fits), overviews, strict=True)
        sentences = [f"{name}: {' '.join(one.sentences)}" for name, one in parts]
        sentences = [plain(compared.sentence), *sentences]
    sentences += [account.statement for fit in fits for account in fit.privacy]
    sentences += [together(one) for one in joint]
    readings = [reading for one in overviews for reading in one.readings if reading.rate]
    worst: dict[str, float] = {}
    for one in readings:
        value = one.rate.value if one.rate and one.rate.value is not None else one.chance
        worst[one.family] = max(value, worst.get(one.family, value))
    return ReportVerdict(sentences[0], sentences, _level(fits, readings), worst)


def _level(fits: Sequence[FitSummary], readings: Sequence[Reading]) -> str:
    """Return how much was read in the worst place, in a word."""
    heights = [one.height for one in readings if one.verdict == "read"]
    # Without guessing, a number also counts by what could be read here: by its control.
    heights += [
        attack.above_chance
        for fit in fits
        for attack in of_what_left(fit)
        if not attack.chance and attack.conclusive is not False
    ]
    if (
        any(attack.refuted for fit in fits for attack in fit.attacks)
        or max(heights, default=0.0) > HIGH
    ):
        return "high"
    return "some" if any(one.verdict != "unknown" for one in readings) else "unknown"


def together(account: JointAccount) -> str:
    """Return what several fits have spent together, in a sentence."""
    so_far = "" if account.whole else ", as far as was recorded"
    return (
        f"{account.fits} fits by {account.defense}, if on the same examples, cost epsilon "
        f"{digits(account.epsilon)} at delta {digits(account.delta)} together"
        f"{FOR_UNIT.get(account.unit, '')}{so_far}."
    )
