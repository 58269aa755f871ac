"""Several runs side by side: what differs between them, in a sentence and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.overview import Overview, Part, Reading, Sentence, of_what_left, plain
from lightning_fedleak.report.records import STANDARD_FAMILIES, WORDS, Family
from lightning_fedleak.report.records.utility import is_training
from lightning_fedleak.report.series import are_apart, utility
from lightning_fedleak.report.wording import brief_interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        sentence: what differs.
        family: the kind of leak that the charts compare: what the sentence names first.
        metric: the utility that all runs have; empty without one.
        step, unit: the last step at which all have it; None without one. What is counted.
        lengths: how many steps or rounds each had, where a gate stopped one; else empty.
        columns, rows: a table of them.
        readings: The readings of the family, by the runs' names.
        utilities: at the step, by the runs' names.
    """

    sentence: Sentence = field(metadata={"write": plain})
    family: str
    metric: str
    step: int | None
    unit: str
    lengths: Mapping[str, int]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    readings: Mapping[str, Reading]
    utilities: Mapping[str, float]


def names_of(fits: Sequence[FitSummary]) -> list[str]:
    """Return a name for each run: its folder, with its id where several have one folder."""
    names = [fit.name for fit in fits]
    return [f"{f.name} ({f.run})" if names.count(f.name) > 1 else f.name for f in fits]


def comparison(fits: Sequence[FitSummary], overviews: Sequence[Overview]) -> Comparison:
    """Return several runs side by side, what fell to chance first."""
    names = names_of(fits)
    metric, step, utilities = _utilities(fits, names)
    readings = {family.name: _readings(overviews, names, family) for family in STANDARD_FAMILIES}
    by_name = dict(zip(names, fits, strict=True))
    several = (one for one in readings.values() if len(one) > 1)
    clauses = sorted((_clause(one, by_name) for one in several), reverse=True)  # what fell first
    family = clauses[0].family if clauses else WORDS.name
    lengths = {name: _updates_that_left(fit) for name, fit in zip(names, fits, strict=True)}
    rows = [
        [name, f"{lengths[name]:,}", *_cells(fit, overview, utilities.get(name))]
        for name, fit, overview in zip(names, fits, overviews, strict=True)
    ]
    decisions = zip(names, fits, strict=True)
    stopped = [n for n, fit in decisions if any(x.did == "stopped" for x in fit.decisions)]
    if 0 < len(stopped) < len(fits):
        pairs = dict(zip(names, zip(fits, overviews, strict=True), strict=True))
        sentence = _stop(stopped, lengths, readings.values(), pairs)
    else:
        price = "" if is_training(metric) else metric
        sentence = _differences(clauses, price, f"{fits[0].unit} {step}", utilities)
        lengths = {}
    titles = [family.short_title for family in STANDARD_FAMILIES]
    at = f"{metric} at {step}" if utilities else "utility"
    return Comparison(
        sentence=sentence,
        family=family,
        metric=metric,
        step=step,
        unit=fits[0].unit,
        lengths=lengths,
        columns=["run", "updates that left", "defence", at, *titles, "gate"],
        rows=rows,
        readings=readings[family],
        utilities=utilities,
    )


def _utilities(
    fits: Sequence[FitSummary], names: Sequence[str]
) -> tuple[str, int | None, dict[str, float]]:
    """Return a metric that all runs have, the last step at which they do, and its values there."""
    curves = [utility(fit) for fit in fits]
    metric = next((name for name in curves[0] if all(name in curve for curve in curves)), "")
    values = [dict(curve.get(metric, [])) for curve in curves]
    step = max(set.intersection(*map(set, values)), default=None)
    if step is None:
        return metric, None, {}
    return metric, step, {n: v[step] or 0.0 for n, v in zip(names, values, strict=True)}


def _readings(
    overviews: Sequence[Overview], names: Sequence[str], family: Family
) -> dict[str, Reading]:
    """Return the readings of a family that have a value, by the runs' names."""
    return {
        name: reading
        for name, overview in zip(names, overviews, strict=True)
        for reading in overview.readings
        if reading.family == family.name and reading.rate and reading.verdict != "unknown"
    }


def _updates_that_left(fit: FitSummary) -> int:
    """Return the updates that no gate kept back; of a Trainer, its steps."""
    if fit.unit == "round" and fit.updates:
        return fit.updates - fit.withheld
    return fit.length or fit.steps or 0


def _cells(fit: FitSummary, overview: Overview, utility_at_step: float | None) -> list[str]:
    """Return a run's defences, its utility, its readings and what its gate did."""
    return [
        ", ".join(defense.name for defense in fit.defenses or ()) or "none",
        _last_utility(fit) if utility_at_step is None else f"{utility_at_step:.3f}",
        *(_cell(overview, family.name) for family in STANDARD_FAMILIES),
        next(fact.value for fact in overview.facts if fact.name == "Gate"),
    ]


def _cell(overview: Overview, family: str) -> str:
    reading = next(reading for reading in overview.readings if reading.family == family)
    interval = brief_interval(reading.rate) if reading.rate else ""
    silent = f"; no result of {', '.join(reading.silent)}" if reading.silent else ""
    if not interval or reading.verdict == "unknown":
        return reading.answer.lower() + silent
    return f"{reading.answer} ({interval}), {reading.measure} of {reading.attack}{silent}"


def _last_utility(fit: FitSummary) -> str:
    """Return the first of a run's metrics at its last step, where runs have none in common."""
    name, points = next(iter(utility(fit).items()), ("", ()))
    return f"{name} {points[-1][1]:.3f} at {points[-1][0]}" if points else "not recorded"


def _stop(
    stopped: Sequence[str],
    lengths: Mapping[str, int],
    readings: Iterable[Mapping[str, Reading]],
    runs: Mapping[str, tuple[FitSummary, Overview]],
) -> Sentence:
    """Return what a gate that stopped a run kept back, beside the longest run.

    Where several runs were not stopped, what differs between these comes first.
    """
    name, ran = stopped[0], [name for name in lengths if name not in stopped]
    longest = max(ran, key=lambda name: lengths[name])
    parts = [Part("The gate stopped "), Part(name, "strong")]
    parts += [Part(f" after {lengths[name]} updates. In "), Part(longest, "strong")]
    parts.append(Part(f" all {lengths[longest]} left"))
    if len(ran) > 1:
        of_ran = zip(*(runs[name] for name in ran), strict=True)
        kept_back = Part(f" after {lengths[name]} of {lengths[longest]} updates.")
        return (*comparison(*of_ran).sentence, Part(" "), *parts[:2], kept_back)
    mark = ":"
    for reading in (each[longest] for each in readings if longest in each):
        if reading.verdict == "read":
            words = f"{mark} {reading.title.lower()}, {reading.measure} "
            parts, mark = [*parts, Part(words), Part(reading.answer, "read")], ";"
    return (*parts, Part("."))


class _Clause(NamedTuple):
    """How far apart the highest and the lowest reading of a kind of leak are.

    Attributes:
        fell: whether the lowest is next to chance, and surely lower than the highest.
        differs: whether it is surely lower.
        height: how far the highest is above guessing.
        family: the kind.
        runs: the names of the runs with the highest and the lowest reading.
        parts: the clause without its full stop.
    """

    fell: bool
    differs: bool
    height: float
    family: str
    runs: tuple[str, str]
    parts: Sentence


def _clause(readings: Mapping[str, Reading], fits: Mapping[str, FitSummary]) -> _Clause:
    """Return the clause about a kind of leak, from two readings or more by the runs' names."""
    low, *_, high = sorted(readings, key=lambda name: readings[name].height)
    top, bottom = readings[high], readings[low]
    attacks = of_what_left(fits[low], top.family)
    same = [a.quoted.rate for a in attacks if a.name == top.attack and a.quoted]
    doubt = ""
    if bottom.silent:
        doubt = f"; there {', '.join(bottom.silent)} gave no result"
    elif not same:
        doubt = f" by another attack, {bottom.attack}"
    elif not all(are_apart(top.rate, rate) for rate in (bottom.rate, *same)):
        doubt = "; the intervals overlap"
    answer, differs = bottom.answer, not doubt
    fell = differs and bottom.verdict == "little"
    if fell:
        answer = f"next to {'guessing' if bottom.chance else 'none'} ({answer})"
    where: Sentence = (Part(high, "strong"), Part(f", {answer} in "), Part(low, "strong"))
    if doubt.endswith("overlap") and top.answer == answer:
        where, doubt = (Part("both" if len(readings) == 2 else "all"),), ""
    parts = (
        Part(f"{top.title}: {top.measure} "),
        Part(top.answer, "read" if top.verdict == "read" else "strong"),
        *(Part(" in "), *where, Part(doubt)),
    )
    return _Clause(fell, differs, top.height, top.family, (high, low), parts)


def _differences(
    clauses: Sequence[_Clause], metric: str, at: str, utilities: Mapping[str, float]
) -> Sentence:
    """Return how far the runs are apart in each kind of leak, and for what price."""
    if not clauses:
        return (Part("These runs have no kind of leak in common that was measured."),)
    parts: list[Part] = []
    priced = False
    for clause in clauses:
        high, low = clause.runs
        price = ""
        if clause.differs and metric and not priced and utilities.keys() >= {high, low}:
            price, priced = f", for {utilities[low] - utilities[high]:+.2f} {metric} by {at}", True
        parts += [*clause.parts, Part(f"{price}. ")]
    end = "" if any(clause.differs for clause in clauses) else "No difference is shown."
    return (*parts[:-1], Part((parts[-1].text + end).rstrip()))
