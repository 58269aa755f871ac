"""Several runs side by side: what differs between them, in a sentence and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.overview import Overview, Part, Reading, Sentence, plain
from lightning_fedleak.report.records import STANDARD_FAMILIES, Family
from lightning_fedleak.report.records.utility import is_training
from lightning_fedleak.report.series import utility
from lightning_fedleak.report.wording import brief_interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        sentence: what differs.
        family: the kind of leak that is compared.
        metric: the utility that all runs have; empty without one.
        step, unit: the last step at which all have it; None without one. What is counted.
        lengths: how many steps or rounds each had, where a gate stopped one; else empty.
        columns, rows: a table of them.
        readings: of the family, by the runs' names.
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
    """Return several runs side by side, by the kind of leak of which most was read."""
    names = names_of(fits)
    metric, step, utilities = _utilities(fits, names)
    readings = {family.name: _readings(overviews, names, family) for family in STANDARD_FAMILIES}
    family = max(readings, key=lambda key: (len(readings[key]), _most(readings[key])))
    lengths = {name: _updates_that_left(fit) for name, fit in zip(names, fits, strict=True)}
    rows = [
        [
            name,
            f"{lengths[name]:,}",
            ", ".join(one.name for one in fit.defenses or ()) or "none",
            f"{utilities[name]:.3f}" if name in utilities else _last_utility(fit),
            *(_cell(one, key.name) for key in STANDARD_FAMILIES),
            next(fact.value for fact in one.facts if fact.name == "Gate"),
        ]
        for name, fit, one in zip(names, fits, overviews, strict=True)
    ]
    decisions = zip(names, fits, strict=True)
    stopped = [n for n, fit in decisions if any(one.did == "stopped" for one in fit.decisions)]
    if 0 < len(stopped) < len(fits):
        sentence = _stop(stopped[0], lengths, readings[family])
    else:
        price = "" if is_training(metric) else metric
        sentence = _difference(readings[family], price, f"{fits[0].unit} {step}", utilities)
        lengths = {}
    titles = [one.short_title for one in STANDARD_FAMILIES]
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
    metric = next((name for name in curves[0] if all(name in one for one in curves)), "")
    values = [dict(one.get(metric, [])) for one in curves]
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
        for name, one in zip(names, overviews, strict=True)
        for reading in one.readings
        if reading.family == family.name and reading.rate and reading.verdict != "unknown"
    }


def _updates_that_left(fit: FitSummary) -> int:
    """Return the updates that no gate kept back; of a Trainer, its steps."""
    if fit.unit == "round" and fit.updates:
        return fit.updates - fit.withheld
    return fit.length or fit.steps or 0


def _most(readings: Mapping[str, Reading]) -> float:
    return max((one.height for one in readings.values()), default=-1.0)


def _cell(one: Overview, family: str) -> str:
    reading = next(reading for reading in one.readings if reading.family == family)
    interval = brief_interval(reading.rate) if reading.rate else ""
    silent = f"; no result of {', '.join(reading.silent)}" if reading.silent else ""
    if not interval or reading.verdict == "unknown":
        return reading.answer.lower() + silent
    return f"{reading.answer} ({interval}), {reading.measure} of {reading.attack}{silent}"


def _last_utility(fit: FitSummary) -> str:
    """Return the first of a run's metrics at its last step, where runs have none in common."""
    name, points = next(iter(utility(fit).items()), ("", ()))
    return f"{name} {points[-1][1]:.3f} at {points[-1][0]}" if points else "not recorded"


def _stop(stopped: str, lengths: Mapping[str, int], readings: Mapping[str, Reading]) -> Sentence:
    """Return what a gate that stopped a run kept back, beside the longest run."""
    longest = max((name for name in lengths if name != stopped), key=lambda name: lengths[name])
    start = (
        Part("The gate stopped "),
        Part(stopped, "strong"),
        Part(f" after {lengths[stopped]} updates. In "),
        Part(longest, "strong"),
    )
    reading = readings.get(longest)
    if reading is None or reading.verdict != "read":
        return (*start, Part(f" all {lengths[longest]} left."))
    words = f" all {lengths[longest]} left: {reading.title.lower()}, {reading.measure} "
    return (*start, Part(words), Part(reading.answer, "read"), Part("."))


def _difference(
    readings: Mapping[str, Reading], metric: str, at: str, utilities: Mapping[str, float]
) -> Sentence:
    """Return how far the highest and the lowest reading are apart, and for what price."""
    if len(readings) < 2:
        return (Part("These runs have no kind of leak in common that was measured."),)
    high, low = (pick(readings, key=lambda name: readings[name].height) for pick in (max, min))
    top, bottom = readings[high], readings[low]
    start = (
        Part(f"{top.title}: {top.measure} "),
        Part(top.answer, "read" if top.verdict == "read" else "strong"),
        *(Part(" in "), Part(high, "strong"), Part(f", {bottom.answer} in "), Part(low, "strong")),
    )
    if bottom.silent:
        words = f". There {', '.join(bottom.silent)} gave no result: no difference is shown."
        return (*start, Part(words))
    if bottom.attack != top.attack:
        return (*start, Part(f" by another attack, {bottom.attack}: no difference is shown."))
    end = bottom.rate.high if bottom.rate else None
    begin = top.rate.low if top.rate else None
    if end is None or begin is None or end >= begin:
        return (*start, Part(". The intervals overlap: no difference is shown."))
    if metric and high in utilities and low in utilities:
        price = utilities[low] - utilities[high]
        return (*start, Part(f", for {price:+.2f} {metric} by {at}."))
    return (*start, Part("."))
