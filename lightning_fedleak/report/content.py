"""The content of a report, from which its HTML, its JSON and the model card are made.

A *fit* is one training run. Its overview has a *reading* for each kind of leak: the value of the
attack that recovered most, and a verdict on it.
:func:`findings` summarizes each fit, adds its overview, compares several runs, and draws a verdict.
Every value comes from the logs, or from ``report.toml``. Values in neither are ``NOT_RECORDED``.
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
"""A sentence on the composition of several accounts, by basic composition."""


@dataclass(frozen=True)
class _ReportVerdict:
    """The verdict on some runs.

    Attributes:
        sentence: The first sentence of the page.
        sentences: The comparison, the overviews and the privacy accounts, in sentences.
        level: ``"high"``, ``"some"`` or ``"unknown"``.
        worst: The highest value of each kind of leak.
    """

    sentence: str
    sentences: Sequence[str]
    level: str
    worst: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The content of a report.

    Attributes:
        schema: Version of ``report.json``.
        date: Time of writing, in UTC.
        package: The name and version of this package.
        verdict: The verdict on all runs.
        overviews: The overview of each run.
        comparison: The comparison of the runs; None if there is one run.
        runs: The summary of each fit or federation.
        problems: The lines and files that could not be read, in sentences.
        people: The facts from ``report.toml``, which no log has.
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
    """Return the content of a report.

    Args:
        logs: The logs of the runs.
        people: The facts from ``report.toml``, which no log has.
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
    """Return the verdict; the comparison of several runs comes before the overview of each."""
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
    """Return the level of the verdict.

    It is ``"high"`` if a value is above ``HIGH`` or a privacy account is refuted, ``"unknown"`` if
    no value counts, and otherwise ``"some"``.
    """
    above_chance = [reading.height for reading in readings if reading.verdict == "read"]
    # Metrics without guessing (chance 0) count by their value corrected by the control.
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


# Metrics and suffixes of metrics, with their titles. A suffix is the smallest number of copies.
_TPRS = {"tpr_at_fpr_0.01": "TPR at 1% FPR", "tpr_at_fpr_0.001": "TPR at 0.1% FPR"}
_COPIES = {"x1": "one row", "x2": "2 to 4 rows", "x5": "5 to 16 rows", "x17": "more rows"}


def memorized_rows(fit: FitSummary) -> list[tuple[str, str]]:
    """Return what the trained model memorized, as rows of a title and a result without any text.

    There are rows for the counts of training rows, found and planted values, prompts, TPRs at low
    FPRs, passages by their number of copies, and the reference model, as far as each was measured.
    """
    rows = [] if fit.rows is None else [("Rows of the training data", fit.rows_in_words)]
    rows += fit.values.items()
    for attack in fit.attacks:
        answer = interval(attack.last) if attack.looks else f"unknown: {attack.why_unknown}"
        if attack.family.name == ENTITIES.name:
            # The name is entity/KIND/PLACE, with the suffix _xN for values planted N times.
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
