"""Everything that a report says: the source of each of its forms.

Every value comes from the run's logs. What the logs lack is ``NOT_RECORDED``, or comes from
``report.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from lightning_fedleak.report.attacks import RELEASED
from lightning_fedleak.report.comparing import Comparison, comparison, names_of
from lightning_fedleak.report.fits import FitSummary, fit_summaries
from lightning_fedleak.report.logs import Logs
from lightning_fedleak.report.overview import Overview, Reading, of_what_left, overview, plain
from lightning_fedleak.report.records import ENTITIES, HIGH, JsonObject, named
from lightning_fedleak.report.wording import interval, visible

SCHEMA = 4
"""Version of ``report.json``."""
TOGETHER = "Epsilons and deltas of several runs on the same examples add up."
"""What several accounts come to, by basic composition."""


@dataclass(frozen=True)
class _ReportVerdict:
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
        runs: one for each fit or federation.
        problems: what could not be read, each in a sentence.
        people: what only people know, by the names of ``report.toml``.
    """

    schema: int = SCHEMA
    date: str = named("made")
    package: str = named("made_by")
    verdict: _ReportVerdict
    overviews: Sequence[Overview]
    comparison: Comparison | None
    runs: Sequence[FitSummary]
    problems: Sequence[str]
    people: JsonObject


def findings(logs: Logs, people: JsonObject | None = None) -> Findings:
    """Return everything that a report says.

    Args:
        logs: The logs of the runs.
        people: what only people know, by the names of ``report.toml``.
    """
    problems = list(logs.problems)
    fits = fit_summaries(logs.fits, problems)
    overviews = [overview(fit) for fit in fits]
    compared = comparison(fits, overviews) if len(fits) > 1 else None
    content = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package=f"lightning-fedleak {version('lightning-fedleak')}",
        verdict=_verdict(fits, overviews, compared),
        overviews=overviews,
        comparison=compared,
        runs=fits,
        problems=problems,
        people=dict(people or {}),
    )
    return visible(content)


def _verdict(
    fits: Sequence[FitSummary], overviews: Sequence[Overview], compared: Comparison | None
) -> _ReportVerdict:
    sentences = overviews[0].sentences
    if compared is not None:
        parts = zip(names_of(fits), overviews, strict=True)
        sentences = [f"{name}: {' '.join(overview.sentences)}" for name, overview in parts]
        sentences = [plain(compared.sentence), *sentences]
    sentences += [account.statement for fit in fits for account in fit.privacy]
    if sum(bool(fit.privacy) for fit in fits) > 1:
        sentences.append(TOGETHER)
    readings = [reading for overview in overviews for reading in overview.readings if reading.rate]
    worst: dict[str, float] = {}
    for x in readings:
        value = x.rate.value if x.rate and x.rate.value is not None else x.chance
        worst[x.family] = max(value, worst.get(x.family, value))
    return _ReportVerdict(sentences[0], sentences, _level(fits, readings), worst)


def _level(fits: Sequence[FitSummary], readings: Sequence[Reading]) -> str:
    """Return the level: ``"high"`` if a value is above ``HIGH`` or a claim is refuted."""
    above_chance = [reading.height for reading in readings if reading.verdict == "read"]
    # Where guessing has no level of its own, a number counts by its distance above its control.
    above_chance += [
        attack.above_chance
        for fit in fits
        for attack in of_what_left(fit)
        if not attack.chance and attack.conclusive is not False
    ]
    if (
        any(attack.refuted for fit in fits for attack in fit.attacks)
        or max(above_chance, default=0.0) > HIGH
    ):
        return "high"
    return "some" if any(reading.verdict != "unknown" for reading in readings) else "unknown"


_TPRS = {"tpr_at_fpr_0.01": "TPR at 1% FPR", "tpr_at_fpr_0.001": "TPR at 0.1% FPR"}
_COPIES = {"x1": "one row", "x2": "2 to 4 rows", "x5": "5 to 16 rows", "x17": "more rows"}


def memorized_rows(fit: FitSummary) -> list[tuple[str, str]]:
    """Return what the trained model memorized, as rows of a title and a result, in counts alone.

    The rows are of the list of records, of values by kind and place, of the passages of texts by
    their copies, of prompts, of each attack's TPRs at small FPRs, and of the reference model that
    some compare with; empty where nothing of it was asked.
    """
    rows = [] if fit.rows is None else [("Rows of the training data", fit.rows_in_words)]
    rows += fit.values.items()
    for attack in fit.attacks:
        answer = interval(attack.last) if attack.looks else f"unknown: {attack.why_unknown}"
        if attack.family.name == ENTITIES.name:
            _, kind, place = attack.name.split("/")
            place, _, times = place.partition("_x")
            words = f"Planted values, {kind} in the {place}" + f", {times} times" * bool(times)
            greedy = f"written greedily: {interval(attack.rates.get('greedy'))}; n {attack.last_n}"
            rank_1 = f"rate of rank 1, above that of values left out: {answer}"
            rows.append((words, f"{rank_1}; {greedy}"))
        elif attack.name.startswith("prompt_ratio"):
            rows.append(("Prompts, which have no loss", f"AUC {answer}"))
        for name, words in _TPRS.items():
            if name in attack.rates and attack.stage == RELEASED:
                rows.append((f"{words}, {attack.name}", interval(attack.rates[name])))
        for name, copies in _COPIES.items():
            if (rate := attack.rates.get(f"extracted_{name}")) is not None:
                words = f"rate of extraction, above that of texts left out: {interval(rate)}"
                rows.append((f"Passages of texts in {copies}", words))
    rows += [("Reference of combined_reference", fit.reference)] * bool(fit.reference)
    return rows
