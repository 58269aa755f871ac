"""The comparison of several runs, as a sentence and a table.

:func:`comparison` takes the overviews of the runs. An overview has one *reading* for each kind of
leak: the value of the attack that recovered most, and a verdict. For each kind of leak the sentence
compares the run with the highest and the run with the lowest reading (:class:`_Clause`). A *gate*
is a rule that acts if a leak exceeds a limit; if one stopped some of the runs, the sentence says
instead how many updates left before, and what the longest other run leaked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.overview import Overview, Part, Reading, Sentence, of_what_left, plain
from lightning_fedleak.report.records import STANDARD_FAMILIES, WORDS, Family
from lightning_fedleak.report.records.lines import is_training
from lightning_fedleak.report.series import are_apart, utility
from lightning_fedleak.report.wording import brief_interval

Runs = Sequence[tuple[str, FitSummary, Overview]]
"""The runs that are compared, each with its name and its overview."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of several runs.

    Attributes:
        sentence: The differences between the runs.
        family: The kind of leak that the charts compare, which the sentence names first.
        metric: The utility metric that all runs have; empty without one.
        step: The last step at which all runs have it; None without one.
        unit: The unit of the step, ``"step"`` or ``"round"``.
        lengths: The number of updates that left, by the runs' names, if a gate stopped some of the
            runs; otherwise empty.
        columns, rows: The table of the runs.
        readings: The readings of the family, by the runs' names.
        utilities: The values of the metric at the step, by the runs' names.
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
    """Return a name for each run: its folder, and its id if another run has the same name."""
    names = [fit.name for fit in fits]
    return [f"{f.name} ({f.run})" if names.count(f.name) > 1 else f.name for f in fits]


def comparison(fits: Sequence[FitSummary], overviews: Sequence[Overview]) -> Comparison:
    """Return the comparison of runs; the kind of leak that fell to chance comes first."""
    runs = [*zip(names_of(fits), fits, overviews, strict=True)]
    metric, step, utilities = _utilities(runs)
    readings = {family.name: _readings(runs, family) for family in STANDARD_FAMILIES}
    several = (by_run for by_run in readings.values() if len(by_run) > 1)
    # A kind of leak that fell to chance comes first, then one that differs, then the highest.
    clauses = sorted((_clause(by_run, runs) for by_run in several), reverse=True)
    family = clauses[0].family if clauses else WORDS.name
    lengths = {name: _updates_that_left(fit) for name, fit, _ in runs}
    rows = [
        [name, f"{lengths[name]:,}", *_cells(fit, overview, utilities.get(name))]
        for name, fit, overview in runs
    ]
    stopped = [n for n, fit, _ in runs if any(x.did == "stopped" for x in fit.decisions)]
    if 0 < len(stopped) < len(fits):
        sentence = _stop_sentence(stopped, lengths, readings.values(), runs)
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


def _utilities(runs: Runs) -> tuple[str, int | None, dict[str, float]]:
    """Return a metric that all runs have, the last step at which they do, and its values there."""
    curves = [utility(fit) for _, fit, _ in runs]
    metric = next((name for name in curves[0] if all(name in curve for curve in curves)), "")
    values = [dict(curve.get(metric, [])) for curve in curves]
    step = max(set.intersection(*map(set, values)), default=None)
    if step is None:
        return metric, None, {}
    return metric, step, {n: v[step] or 0.0 for (n, *_), v in zip(runs, values, strict=True)}


def _readings(runs: Runs, family: Family) -> dict[str, Reading]:
    """Return the readings of a family that have a value, by the runs' names."""
    return {
        name: reading
        for name, _, overview in runs
        for reading in overview.readings
        if reading.family == family.name and reading.rate and reading.verdict != "unknown"
    }


def _updates_that_left(fit: FitSummary) -> int:
    """Return the number of updates that no gate withheld; without rounds, the number of steps."""
    if fit.unit == "round" and fit.updates:
        return fit.updates - fit.withheld
    return fit.length or fit.steps or 0


def _cells(fit: FitSummary, overview: Overview, utility_at_step: float | None) -> list[str]:
    """Return a run's cells: defences, utility, one for each kind of leak, and gate."""
    return [
        "; ".join([*(d.name for d in fit.defenses or ()), *(a.claim_in_short for a in fit.privacy)])
        or "none",
        _last_utility(fit) if utility_at_step is None else f"{utility_at_step:.3f}",
        *(_cell(overview, family.name) for family in STANDARD_FAMILIES),
        next(fact.value for fact in overview.facts if fact.name == "Gate"),
    ]


def _cell(overview: Overview, family: str) -> str:
    """Return the reading of a kind of leak, with its interval and attack."""
    reading = next(reading for reading in overview.readings if reading.family == family)
    interval = brief_interval(reading.rate) if reading.rate else ""
    silent = f"; no result of {', '.join(reading.silent)}" if reading.silent else ""
    if not interval or reading.verdict == "unknown":
        return reading.answer.lower() + silent
    return f"{reading.answer} ({interval}), {reading.measure} of {reading.attack}{silent}"


def _last_utility(fit: FitSummary) -> str:
    """Return a run's first metric at its last step, for runs without a metric in common."""
    name, points = next(iter(utility(fit).items()), ("", ()))
    return f"{name} {points[-1][1]:.3f} at {points[-1][0]}" if points else "not recorded"


def _stop_sentence(
    stopped: Sequence[str],
    lengths: Mapping[str, int],
    readings: Iterable[Mapping[str, Reading]],
    runs: Runs,
) -> Sentence:
    """Return the sentence on a gate that stopped a run, compared with the longest other run.

    If several runs were not stopped, their comparison comes first.

    Args:
        stopped: The names of the runs that a gate stopped.
        lengths: The number of updates that left, by the runs' names.
        readings: For each kind of leak, the readings by the runs' names.
        runs: The runs.
    """
    name, unstopped = stopped[0], [name for name in lengths if name not in stopped]
    longest = max(unstopped, key=lambda name: lengths[name])
    parts = [Part("The gate stopped "), Part(name, "strong")]
    parts += [Part(f" after {lengths[name]} updates. In "), Part(longest, "strong")]
    parts.append(Part(f" all {lengths[longest]} left"))
    if len(unstopped) > 1:
        _, *fits_and_overviews = zip(*(run for run in runs if run[0] in unstopped), strict=True)
        length = Part(f" after {lengths[name]} of {lengths[longest]} updates.")
        return (*comparison(*fits_and_overviews).sentence, Part(" "), *parts[:2], length)
    mark = ":"
    for reading in (by_run[longest] for by_run in readings if longest in by_run):
        if reading.verdict == "read":
            words = f"{mark} {reading.title.lower()}, {reading.measure} "
            parts, mark = [*parts, Part(words), Part(reading.answer, "read")], ";"
    return (*parts, Part("."))


class _Clause(NamedTuple):
    """A clause on the highest and the lowest reading of a kind of leak; sorted by its fields.

    Attributes:
        fell: Whether the lowest reading is next to chance and significantly below the highest.
        differs: Whether it is significantly lower: the intervals do not overlap.
        height: The distance of the highest reading above guessing.
        family: The kind of leak.
        runs: The names of the runs with the highest and the lowest reading.
        parts: The clause without its full stop.
    """

    fell: bool
    differs: bool
    height: float
    family: str
    runs: tuple[str, str]
    parts: Sentence


def _clause(readings: Mapping[str, Reading], runs: Runs) -> _Clause:
    """Return the clause on a kind of leak.

    The readings differ only if the lower run measured the same attack as the higher one, no attack
    on this kind of leak was silent (without a result) there, and the intervals do not overlap.

    Args:
        readings: At least two readings, by the runs' names.
        runs: The runs.
    """
    low, *_, high = sorted(readings, key=lambda name: readings[name].height)
    top, bottom = readings[high], readings[low]
    attacks = [a for name, fit, _ in runs if name == low for a in of_what_left(fit, top.family)]
    same_attack = [a.quoted.rate for a in attacks if a.name == top.attack and a.quoted]
    doubt = ""
    if bottom.silent:
        doubt = f"; there {', '.join(bottom.silent)} gave no result"
    elif not same_attack:
        doubt = f" by another attack, {bottom.attack}"
    elif not all(are_apart(top.rate, rate) for rate in (bottom.rate, *same_attack)):
        doubt = "; the intervals overlap"
    answer, differs = bottom.answer, not doubt
    fell = differs and bottom.verdict == "little"
    if fell:
        answer = f"next to {'guessing' if bottom.chance else 'none'} ({answer})"
    lower = Part(answer, "read" if bottom.verdict == "read" else "")
    where: Sentence = (Part(high, "strong"), Part(", "), lower, Part(" in "), Part(low, "strong"))
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
    """Return the difference between the runs in each kind of leak, and its price in utility.

    Args:
        clauses: The clauses in their order.
        metric: The utility metric; empty if no price is stated.
        at: The step of the utilities, in words.
        utilities: The utility of each run at that step, by its name.
    """
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
