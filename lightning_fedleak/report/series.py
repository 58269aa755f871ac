"""The data of the charts, without their drawing.

These are leakage curves, bins of steps, heat maps of clients by rounds, leakage against utility,
results before and after a defence, and utility curves. ``charts`` draws them. A *look* is a
measurement of leakage at one step, or round of a federation; a look's *point* is an attack's main
metric there. A *gate* may withhold an update, so that it does not leave its client.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lightning_fedleak.report.attacks import (
    NEXT_TO_NONE,
    RELEASED,
    SUM,
    AttackSummary,
    Point,
    Points,
)
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.logs import grouped
from lightning_fedleak.report.records import MetricValue
from lightning_fedleak.report.records.lines import is_lower_better, is_training, is_validation
from lightning_fedleak.report.wording import brief, brief_interval, measure

MAX_ROUNDS, MAX_CLIENTS = 24, 20
"""Maximum number of columns (rounds) and rows (clients) of a heat map with legible numbers."""
MAX_DRAWN = 1e300  # differences of larger values may overflow
# The lowest and the highest value of an axis.
Span = tuple[float, float]


def is_leak(rate: MetricValue, chance: float) -> bool:
    """Return whether a leak shows: the interval is above chance, and the value well above it."""
    if rate.value is None or rate.low is None:
        return False
    return rate.low > chance and rate.value - chance > NEXT_TO_NONE


def are_apart(higher: MetricValue | None, lower: MetricValue | None) -> bool:
    """Return whether the interval of one rate lies above that of another."""
    low, high = higher.low if higher else None, lower.high if lower else None
    return low is not None and high is not None and low > high


class Cell(NamedTuple):
    """A cell of a table: its text, and the class of page.css that sets it off (``tone``)."""

    text: str
    tone: str = ""


class Row(NamedTuple):
    """A row of a table: its name, its cells, and its position on the axis (``place``)."""

    name: str
    cells: Sequence[Cell]
    place: float = 0.0


@dataclass(frozen=True, eq=False)
class Curve:
    """A leakage curve.

    Attributes:
        name: The name in the chart.
        family: The name of the kind of leak.
        chance: The value of guessing.
        points: The looks, in order.
        conclusive: Whether all looks together exclude guessing; None if that does not apply. If
            False, no point is shown as a leak.
        dash: The class of page.css for a dashed line; empty for a solid one.
    """

    name: str
    family: str
    chance: float
    points: Sequence[Point]
    conclusive: bool | None = None
    dash: str = ""

    @property
    def last(self) -> Point:
        """The latest point with a value."""
        return [point for point in self.points if point.value is not None][-1]

    def tone(self, point: Point) -> str:
        """Return ``"read"`` (red) if the point shows a visible leak, otherwise ``"calm"``."""
        is_red = self.conclusive is not False and is_leak(point.rate, self.chance)
        return "read" if is_red else "calm"

    def cell(self, point: Point | None) -> Cell:
        """Return a point as a cell of a table."""
        if point is None or point.value is None:
            return Cell("" if point is None else "unknown")
        interval, n = brief_interval(point.rate), "" if point.n is None else f", n {point.n:,}"
        text = brief(point.value) + (f" ({interval})" if interval else "") + n
        return Cell(text, "read" if self.tone(point) == "read" else "")


def curve_of(attack: AttackSummary, name: str, dash: str = "") -> Curve:
    """Return the highest value of all clients at each step, without withheld updates."""
    sent = [p for p in attack.points if not p.withheld]
    by_step = grouped(sent, lambda point: point.step).values()
    points = [max(ps, key=lambda p: -1.0 if p.value is None else p.value) for ps in by_step]
    return Curve(name, attack.family.name, attack.chance, points, attack.conclusive, dash)


class Bins:
    """Bins of neighbouring steps. A chart shows the highest value of each bin.

    Args:
        steps: The steps to bin; repeats are allowed.
        max_bins: The largest number of bins.
    """

    def __init__(self, steps: Iterable[int], max_bins: int) -> None:
        distinct = sorted(set(steps))
        self.size = max(1, math.ceil(len(distinct) / max_bins))  # steps in a bin
        self._bins = {step: index // self.size for index, step in enumerate(distinct)}
        self.steps = [distinct[i : i + self.size] for i in range(0, len(distinct), self.size)]
        self.names = [str(p[0]) if len(p) == 1 else f"{p[0]}\u2013{p[-1]}" for p in self.steps]

    def highest(self, points: Iterable[Point]) -> dict[int, Point]:
        """Return the point with the highest value of each bin."""
        parts = grouped([p for p in points if p.step in self._bins], lambda p: self._bins[p.step])
        return {
            index: max(part, key=lambda p: -math.inf if p.value is None else p.value)
            for index, part in sorted(parts.items())
        }

    def downsample(self, line: Points) -> dict[int, tuple[int, float]]:
        """Return each bin's point with the highest value; of the last bin, the newest point."""
        finite = [(s, v) for s, v in line if v is not None and abs(v) < MAX_DRAWN]
        parts = sorted(grouped(finite, lambda p: self._bins[p[0]]).items())
        highest = {index: max(part, key=lambda p: p[1]) for index, part in parts}
        return highest | ({parts[-1][0]: parts[-1][1][-1]} if parts else {})

    def rows(self, cells: Callable[[int], Sequence[Cell]]) -> list[Row]:
        """Return a row of a table for each bin."""
        return [Row(n, cells(i), self.steps[i][-1]) for i, n in enumerate(self.names)]

    def span(self, length: int | None) -> Span:
        """Return the range of an axis, from 0 to the last step or the run's length."""
        return 0.0, float(max([length or 0, 1, *(part[-1] for part in self.steps)]))

    @property
    def caption(self) -> str:
        """What a bin shows; empty if each bin is a single step."""
        return f" Each point is the highest of {self.size} measurements." if self.size > 1 else ""


def heat_maps(
    fit: FitSummary, attacks: Sequence[AttackSummary]
) -> tuple[Bins, dict[str, list[Row]]]:
    """Return the bins, and for each attack a table of clients (rows) by rounds (columns).

    Tables are sorted by their attacks' mean above chance, rows by the clients' mean, both highest
    first. The last row is the sum over the clients, if the attack also ran on it.
    """
    summed = {a.name: list(a.points) for a in fit.attacks if a.stage == "aggregate"}
    bins = Bins([p.step for a in attacks for p in a.points], MAX_ROUNDS)
    tables: dict[str, list[Row]] = {}
    for attack in sorted(attacks, key=lambda a: a.chance - (a.mean or 0.0)):
        by_client = grouped(attack.points, lambda point: f"client {point.client}")
        clients = sorted(by_client.items(), key=lambda item: -_mean_value(item[1]))
        if len(clients) > MAX_CLIENTS:
            merged = clients[MAX_CLIENTS - 1 :]
            points = [point for _, of_client in merged for point in of_client]
            clients[MAX_CLIENTS - 1 :] = [(f"highest of {len(merged)} more", points)]
        clients += [("sum of all clients", summed[attack.name])] if attack.name in summed else []
        tables[f"{attack.name}, {measure(attack.headline)}"] = [
            Row(name, _heat_cells(attack, points, bins)) for name, points in clients
        ]
    return bins, tables


def _heat_cells(attack: AttackSummary, points: Sequence[Point], bins: Bins) -> list[Cell]:
    """Return the cells of a row of a heat map, and their mean.

    Tones are classes of page.css: ``h0`` (guessing) to ``h10``, ``h`` unknown, ``b`` the mean.
    """
    highest, cells = bins.highest(points), []
    for index in range(len(bins.steps)):
        point = highest.get(index)
        if point is None or point.value is None:
            cells.append(Cell("" if point is None else "?", "" if point is None else "h"))
            continue
        excess = (point.value - attack.chance) / (1 - attack.chance)
        if attack.conclusive is False or not is_leak(point.rate, attack.chance):
            excess = 0.0
        text = f"({brief(point.value)})" if point.withheld else brief(point.value)
        cells.append(Cell(text, f"h{round(10 * min(1.0, max(0.0, excess)))}"))
    is_known = any(point.value is not None for point in points)
    return [*cells, Cell(brief(_mean_value(points)) if is_known else "?", "b")]


def _mean_value(points: Iterable[Point]) -> float:
    """Return the mean of the known values; -1, which sorts last, if none is known."""
    values = [point.value for point in points if point.value is not None]
    return fmean(values) if values else -1.0


@dataclass(frozen=True)
class _Knee:
    """The trade-off between the trained model's leakage and utility, one point per look.

    Attributes:
        curve: The leakage.
        metric: The name of the utility.
        looks: The pairs (utility, leakage point), one per look.
        best: The look with the best utility: the lowest, since the metric is a loss.
        sentence: The text on what stopping at the best utility would have changed.
    """

    curve: Curve
    metric: str
    looks: Sequence[tuple[float, Point]]
    best: tuple[float, Point]
    sentence: str


def knee(fit: FitSummary) -> _Knee | None:
    """Return the trained model's leakage against a validation loss; None without two such looks.

    The knee is the look with the best loss: leakage that grows after it buys no utility.
    """
    attacks = [a for a in fit.attacks if a.stage == RELEASED and a.chance and a.quoted]
    metrics = ((n, p) for n, p in utility(fit).items() if is_validation(n) and is_lower_better(n))
    name, line = next(metrics, ("", []))
    if not attacks or not line:
        return None
    # An attack of the family memorization, and of several the one with the highest mean.
    attack = min(attacks, key=lambda a: (a.family.name != "memorization", -(a.mean or 0.0)))
    curve, looks = curve_of(attack, attack.name), []
    for point in curve.points:
        values = [value for step, value in line if step <= point.step and value is not None]
        if values and point.value is not None:
            looks.append((values[-1], point))
    if len(looks) < 2:
        return None
    best = min(looks, key=lambda look: look[0])
    advice = _advice(f"{fit.unit} {best[1].step}", name, best[1], looks[-1][1])
    return _Knee(curve, name, looks, best, advice)


def _advice(at: str, metric: str, best: Point, last: Point) -> str:
    """Return, in a sentence, how stopping at the best utility would have changed the leakage."""
    if best.step >= last.step:
        return f"{metric} still improved at the last measurement: no knee within this run."
    auc_at_best, auc_at_end = best.value or 0.0, last.value or 0.0
    if auc_at_end - auc_at_best >= 0.01:  # a difference that two decimals show
        return (
            f"Stopping at {at}, the best {metric}, would have left an AUC of {brief(auc_at_best)} "
            f"instead of {brief(auc_at_end)}: later steps did not improve {metric}."
        )
    return f"{metric} was best at {at}, when the AUC was already {brief(auc_at_best)}."


class _Pair(NamedTuple):
    """An attack's result before and after the defence.

    For attacks whose highest look is quoted, both are means over the looks that measured both.
    """

    attack: str
    chance: float
    before: MetricValue
    after: MetricValue
    is_mean: bool
    is_conclusive: bool


def before_and_after(fit: FitSummary) -> list[_Pair]:
    """Return each attack's result on the gradient before the defence and on the shared one."""
    shared = {a.name: a for a in fit.attacks if a.stage == "shared"}
    pairs = []
    for before in fit.attacks:
        after = shared.get(before.name)
        if before.stage != "local" or not before.quoted or after is None or not after.quoted:
            continue
        rate_before, rate_after = before.quoted.rate, after.quoted.rate
        is_mean, is_conclusive = not before.quoted.is_latest, after.conclusive is not False
        if is_mean:
            steps = {p.step for p in before.points if p.value is not None}
            steps &= {p.step for p in after.points if p.value is not None}
            rate_before, rate_after = _mean_of(before, steps), _mean_of(after, steps)
        rates = rate_before, rate_after
        pairs.append(_Pair(before.name, before.chance, *rates, is_mean, is_conclusive))
    return [pair for pair in pairs if pair.before.value is not None]


def _mean_of(attack: AttackSummary, steps: set[int]) -> MetricValue:
    """Return an attack's mean over some steps, with the lowest low end and highest high end."""
    points = [p for p in attack.points if p.step in steps]
    values = [p.value for p in points if p.value is not None]
    lows = [p.low for p in points if p.low is not None]
    highs = [p.high for p in points if p.high is not None]
    mean = fmean(values) if values else None
    return MetricValue(mean, min(lows, default=None), max(highs, default=None))


def utility(fit: FitSummary) -> dict[str, Points]:
    """Return the user's metrics, validation first.

    In a federation it is the metric logged for the sum over clients, or else the clients' mean.
    """
    by_name: dict[str, dict[str, Points]] = {}
    for title, points in fit.utility.items():
        name, _, client = title.partition(", ")  # a title is "metric" or "metric, client 3"
        by_name.setdefault(name, {})[client] = points
    series: dict[str, Points] = {}
    for name in sorted(by_name, key=lambda name: (is_training(name), not is_validation(name))):
        lines = by_name[name]
        steps: dict[int, list[float]] = {}
        for line in [lines[SUM]] if SUM in lines else lines.values():
            for step, value in line:
                steps.setdefault(step, []).extend([] if value is None else [value])
        points = [(step, fmean(values)) for step, values in sorted(steps.items()) if values]
        if points:
            series[name] = points
    return series
