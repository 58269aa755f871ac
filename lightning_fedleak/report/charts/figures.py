"""The charts of one run and of several runs, as SVG in HTML, each with a table of its numbers.

:func:`figures` returns the charts of one run, :func:`compared_figures` those that compare runs.
Each chart is drawn in two widths, for a desktop and for a phone; the page shows one of them. Names
of lines and texts such as ``read`` (red: a leak), ``calm``, ``ink`` and ``use`` (utility) are
classes of ``page.css``. Numbers without a name are distances in pixels, chosen by eye.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from lightning_fedleak.report.attacks import AttackSummary, Point, Points
from lightning_fedleak.report.comparing import Comparison, names_of
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.overview import Overview, best_of_family, limits_of, of_what_left
from lightning_fedleak.report.records import MetricValue, standard_family
from lightning_fedleak.report.series import (
    Bins,
    Cell,
    Curve,
    Row,
    Span,
    before_and_after,
    curve_of,
    heat_maps,
    is_leak,
    knee,
    utility,
)
from lightning_fedleak.report.wording import brief, brief_interval, capitalized, digits, measure

DESK, HALF, PHONE = 1064, 510, 354
"""Widths of a chart in pixels: the page's column, half of it, and the column on a phone."""
MAX_DOTS = 48  # bins up to which each has a symbol: more would touch
QUARTERS = (0, 0.25, 0.5, 0.75, 1)  # ticks of a rate; more ticks crowd a phone's chart
SHAPES = {
    "words": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
    "membership": "m-3-3h6v6h-6z",
    "texts": "m0-4l4 4-4 4-4-4z",
    "memorization": "m0-4l4 7h-8z",
}
"""SVG path of the symbol of each family of attacks. Other families have the symbol of words."""
# A point in the values of the two axes; y is None where it is unknown.
Place = tuple[float, float | None]


class _Plot:
    """A drawing with two axes.

    Args:
        size: width and height in pixels.
        x, y: lowest and highest value of each axis. An ``x`` axis may also run from high to low.
        margins: left, right, top and bottom in pixels.
    """

    def __init__(self, size: Span, x: Span, y: Span, margins: tuple[int, int, int, int]) -> None:
        self.width, self.height = size
        self._x, self._y = x, y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5)
        self.left, right, self.top, bottom = margins
        self.right, self.bottom = self.width - right, self.height - bottom
        self._parts: list[str] = []
        self._labels: list[tuple[float, str, str]] = []

    def x(self, value: float) -> float:
        """Return the horizontal pixel of a value."""
        low, high = self._x
        return self.left + (value - low) / (high - low or 1) * (self.right - self.left)

    def y(self, value: float | None) -> float:
        """Return the vertical pixel of a value; None, an open upper end, is the top of the plot."""
        low, high = self._y
        share = 1.0 if value is None else (value - low) / (high - low)
        return self.bottom - share * (self.bottom - self.top)

    def rule(self, kind: str, x: Sequence[float], y: Sequence[float]) -> None:
        """Draw a straight line in pixels; an axis with one coordinate has it at both ends."""
        ends = f'x1="{x[0]:.1f}" x2="{x[-1]:.1f}" y1="{y[0]:.1f}" y2="{y[-1]:.1f}"'
        self._parts.append(f'<line class="{kind}" {ends}/>')

    def level(self, kind: str, value: float, label: str = "") -> None:
        """Draw a horizontal line at a value, with a label at its right."""
        self.rule(kind, (self.left, self.right), [self.y(value)])
        if label:
            self.label(value, label, "ink" if kind == "gate" else "")

    def levels(
        self, chances: Iterable[float], limits: Iterable[float] = (), *, are_named: bool = False
    ) -> None:
        """Draw a horizontal line at each value of guessing above 0, and at each gate's limit."""
        for chance in sorted({chance for chance in chances if chance}):
            self.level("chance", chance, "guessing" if are_named else "")
        for limit in limits:
            self.level("gate", limit, f"gate {brief(limit)}" if are_named else "")

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "start") -> None:
        """Write a text at a pixel."""
        style = f' class="{kind}"' if kind else ""
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}{end}>{escape(str(text))}</text>')

    def axes(self, values: Iterable[float], steps: Iterable[float], label: str = "") -> None:
        """Draw grid lines at ``values``, the numbers of both axes, and a label for the x axis."""
        for value in values:
            self.level("grid", value)
            self.text(self.left - 8, self.y(value) + 4, f"{value:.4g}", anchor="end")
        for step in steps:
            self.text(self.x(step), self.bottom + 16, f"{step:.4g}", anchor="middle")
        if label:
            self.text((self.left + self.right) / 2, self.bottom + 31, label, anchor="middle")

    def line(self, kind: str, places: Iterable[Place]) -> None:
        """Draw a line; unknown values are gaps."""
        path, is_gap = [], True
        for x, y in places:
            if y is not None:
                path.append(f"{'M' if is_gap else 'L'}{self.x(x):.1f} {self.y(y):.1f}")
            is_gap = y is None
        self._parts.append(f'<path class="line {kind}" d="{"".join(path)}"/>')

    def band(self, kind: str, points: Sequence[Point]) -> None:
        """Draw the intervals of points as an area; unknown values are gaps."""
        runs: list[list[Point]] = [[]]
        for point in points:
            if point.value is None or point.low is None:
                runs.append([])
            else:
                runs[-1].append(point)
        for run in filter(None, runs):
            if len(run) == 1:
                ends = self.y(run[0].low), self.y(run[0].high)
                self.rule(f"whisker {kind}", [self.x(run[0].step)], ends)
                continue
            upper = [f"{self.x(p.step):.1f} {self.y(p.high):.1f}" for p in run]
            lower = [f"{self.x(p.step):.1f} {self.y(p.low):.1f}" for p in reversed(run)]
            self._parts.append(f'<path class="band {kind}" d="M{"L".join([*upper, *lower])}z"/>')

    def whisker(self, x: float, rate: MetricValue, tone: str, kind: str = "whisker") -> None:
        """Draw a value with its interval as a vertical line."""
        if rate.low is not None:
            self.rule(f"{kind} {tone}", [self.x(x)], (self.y(rate.low), self.y(rate.high)))
        self.dots(tone, [(x, rate.value)])

    def dots(self, kind: str, places: Iterable[Place], family: str = "words") -> None:
        """Draw a symbol at each place."""
        shape = SHAPES.get(family, SHAPES["words"])
        marks = [f"M{self.x(x):.1f} {self.y(y):.1f}{shape}" for x, y in places if y is not None]
        if marks:
            self._parts.append(f'<path class="dot {kind}" d="{"".join(marks)}"/>')

    def curve(self, curve: Curve, points: Sequence[Point], max_dots: int = MAX_DOTS) -> None:
        """Draw a line of leakage with its intervals, and with symbols if there are few."""
        tone = curve.tone(curve.last)
        self.band(tone, points)
        self.line(f"{tone} {curve.dash}".strip(), [(p.step, p.value) for p in points])
        for kind in ("read", "calm") if len(points) <= max_dots else ():
            places = [(p.step, p.value) for p in points if curve.tone(p) == kind]
            self.dots("read" if kind == "read" else "calm hollow", places, curve.family)

    def label(self, value: float, text: str, kind: str) -> None:
        """Name a value at the right of the drawing."""
        self._labels.append((self.y(value), text, kind))

    def svg(self, description: str) -> str:
        """Return the SVG element. Labels that would overlap are moved apart."""
        heights: list[float] = []
        labels = sorted(self._labels)
        for y, _, _ in labels:
            heights.append(max(y, heights[-1] + 15) if heights else y)
        overflow = max(0.0, (heights or [0.0])[-1] - self.bottom)
        for height, (_, text, kind) in zip(heights, labels, strict=True):
            self.text(self.right + 10, height - overflow + 4, text, kind)
        box = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        axis = " ".join(f"{n:g}" for n in (self.left, self.right, *self._x, self.bottom))
        name = f'role="img" aria-label="{escape(description)}"'
        return f"<svg {box} data-axis='{axis}' {name}>{''.join(self._parts)}</svg>"


def views(draw: Callable[[float], str], desk: float = DESK) -> Markup:
    """Return a chart in its two widths, for a desktop and a phone; the page shows one of them."""
    return Markup(f'<div class="desk">{draw(desk)}</div><div class="phone">{draw(PHONE)}</div>')


def ticks(span: Span, max_intervals: int) -> list[float]:
    """Return round numbers that divide a span into at most ``max_intervals`` intervals."""
    low, high = min(span), max(span)
    unit = 10 ** math.floor(math.log10((high - low) / max_intervals or 1.0))
    step = next(
        s for s in (unit, 2 * unit, 5 * unit, 10 * unit) if (high - low) / s <= max_intervals
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * number, 12) for number in range(first, last + 1)]


MAX_BINS = 120
"""Largest number of points of a line. If there are more looks, adjacent ones share a bin."""
MAX_RUNS = 3
"""Largest number of runs for which a page has charts of each run; more runs have fewer points.

With more runs the page would exceed 150 KB. Charts that compare runs are always drawn.
"""


@dataclass(frozen=True)
class _Figure:
    """A chart with its title, its caption and the table of its numbers; or a set of heat maps."""

    title: str
    caption: str
    drawing: Markup = Markup("")  # noqa: RUF009
    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    kind: str = ""
    heat: Mapping[str, Sequence[Row]] = field(default_factory=dict)


# ---- one run ------------------------------------------------------------------------------------


def figures(fit: FitSummary, overview: Overview, n_runs: int) -> list[_Figure]:
    """Return the charts of a run for which there are data; [] with more than ``MAX_RUNS`` runs.

    Args:
        fit: The run.
        overview: The summary of the run.
        n_runs: The number of runs on the page.
    """
    if n_runs > MAX_RUNS:
        return []
    # Fewer points on each of several charts, so that the page stays small (MAX_RUNS).
    max_bins = MAX_BINS if n_runs == 1 else MAX_BINS // (4 * (n_runs - 1))
    spendings = [_draw_spending(fit, a.defense, a.series, max_bins) for a in fit.privacy]
    charts = [
        _draw_heat_map(fit),
        _draw_knee(fit),
        _draw_steps(fit, overview, max_bins),
        _draw_defense(fit),
        _draw_attacks(fit),
        *spendings,
    ]
    return [chart for chart in charts if chart is not None]


def _curves(fit: FitSummary, overview: Overview) -> dict[Curve, AttackSummary]:
    """Return a curve for each family, with the attack whose value the overview quotes."""
    quoted = {r.title.lower(): best_of_family(fit, r.family) for r in overview.readings if r.rate}
    return {curve_of(attack, title): attack for title, attack in quoted.items() if attack}


def _measured_attacks(fit: FitSummary) -> list[AttackSummary]:
    """Return the attacks on shared data that have a value."""
    return [attack for attack in of_what_left(fit) if attack.quoted]


def _draw_heat_map(fit: FitSummary) -> _Figure | None:
    """Draw a table of clients by rounds for each attack, in which colours show the leakage."""
    attacks = [a for a in _measured_attacks(fit) if len(a.clients) > 1]
    if not attacks:
        return None
    bins, tables = heat_maps(fit, attacks)
    binned = f" A square is the highest of {bins.size} rounds." * (bins.size > 1)
    caption = (
        "Each square is one client's update in one round: red if a leak shows, grey if guessing is "
        f"not excluded, in brackets if a gate kept it back.{binned}"
    )
    columns = ["round", *bins.names, "mean"]
    return _Figure("Who leaked, and when", caption, columns=columns, heat=tables, kind="heat_map")


def _draw_steps(fit: FitSummary, overview: Overview, max_bins: int) -> _Figure | None:
    """Draw leakage above utility, with the same axis of steps."""
    curves, metrics = _curves(fit, overview), dict(list(utility(fit).items())[:2])
    steps = [point.step for curve in curves for point in curve.points]
    steps += [step for line in metrics.values() for step, _ in line]
    if not steps:
        return None
    bins = Bins(steps, max_bins)
    points_of = {curve: bins.highest(curve.points) for curve in curves}
    lines = {name: thin for name, line in metrics.items() if (thin := bins.downsample(line))}
    x = bins.span(fit.length)

    def draw(width: float) -> str:
        leakage = (
            _plot_leakage(fit, width, x, attack, curve, points_of[curve])
            for curve, attack in curves.items()
        )
        return "".join(leakage) + (_plot_utility(fit, width, x, lines) if lines else "")

    def cells(number: int) -> list[Cell]:
        rates = [curve.cell(points.get(number)) for curve, points in points_of.items()]
        values = [line[number][1] if number in line else None for line in lines.values()]
        return [*rates, *(Cell("" if v is None else f"{v:.3f}", "use") for v in values)]

    caption = f"Band: 95% interval.{bins.caption}"
    columns = [fit.unit, *(curve.name for curve in curves), *lines]
    rows = bins.rows(cells)
    return _Figure("Leakage and utility", caption, views(draw), columns, rows, "over_steps")


def _plot_leakage(
    fit: FitSummary,
    width: float,
    x: Span,
    attack: AttackSummary,
    curve: Curve,
    points: Mapping[int, Point],
) -> str:
    """Return the chart of one kind of leakage by step, as SVG, with its own line for guessing."""
    is_narrow = width < HALF
    margins = (40, 116 if is_narrow else 150, 24, 20)
    plot = _Plot((width, 136), x, (_lower_end({curve: points}), 1), margins)
    plot.axes((0, 0.5, 1), _step_ticks(x, is_narrow))
    plot.text(plot.left, 12, f"{capitalized(curve.name)}, {measure(attack.headline)}", "ink b")
    roots = (f"/worst/{curve.family}", f"/{attack.name}/")
    plot.levels([curve.chance], limits_of(fit, *roots), are_named=True)
    plot.curve(curve, list(points.values()))
    plot.label(curve.last.value or 0.0, brief(curve.last.value), f"b {curve.tone(curve.last)}")
    if decision := next(
        (d for d in fit.decisions if any(r in (d.metric or "") for r in roots)), None
    ):
        labels = {"warn": "over the gate: warned", "stopped": "stopped by the gate"}
        at = plot.x(decision.step)
        plot.rule("gate", [at], (plot.top, plot.bottom))
        text = labels.get(decision.did, f"gate: {decision.did}")
        plot.text(max(at, plot.left + 200), 12, text, "ink")
    rate = f"{brief(curve.last.value)} ({brief_interval(curve.last.rate)})"
    return plot.svg(f"Leakage by {fit.unit}: {curve.name} {rate}")


def _lower_end(points_of: Mapping[Curve, Mapping[int, Point]]) -> float:
    """Return the lower end of an axis of rates: 0, or the lowest value if it is negative."""
    return min([0.0, *(p.low or 0.0 for points in points_of.values() for p in points.values())])


def _plot_utility(
    fit: FitSummary, width: float, x: Span, lines: Mapping[str, Mapping[int, tuple[int, float]]]
) -> str:
    """Return the chart of utility by step, as SVG."""
    is_narrow = width < HALF
    values = [value for line in lines.values() for _, value in line.values()]
    y = min(values), max(values)
    plot = _Plot((width, 138), x, y, (40, 116 if is_narrow else 150, 12, 36))
    plot.axes(ticks(y, 3), _step_ticks(x, is_narrow), fit.unit)
    for number, (name, line) in enumerate(lines.items()):
        places = list(line.values())
        plot.line("use thin" if number else "use", places)
        if not number and len(places) <= MAX_DOTS:
            plot.dots("use", places)
        label = f"{_shorten(name, 11 if is_narrow else 16)} {places[-1][1]:.2f}"
        plot.label(places[-1][1], label, "use" if number else "use b")
    ends = {name: [value for _, value in line.values()] for name, line in lines.items()}
    words = [f"{name} from {line[0]:.3f} to {line[-1]:.3f}" for name, line in ends.items()]
    return plot.svg(f"Utility by {fit.unit}: {'; '.join(words)}")


def _draw_knee(fit: FitSummary) -> _Figure | None:
    """Draw the trained model's leakage against utility, with a dot for each look."""
    tradeoff = knee(fit)
    if tradeoff is None:
        return None
    name, looks, curve = tradeoff.metric, tradeoff.looks, tradeoff.curve
    best = tradeoff.best
    losses = [loss for loss, _ in looks]
    x, y = (max(losses), min(losses)), (min([0.4, *(p.low or 0.4 for _, p in looks)]), 1.0)
    pad = 0.08 * (x[0] - x[1]) or 0.1

    def draw(width: float) -> str:
        is_narrow = width < HALF
        margins = (40, 24 if is_narrow else 150, 22, 40)
        plot = _Plot((width, 320), (x[0] + pad, x[1] - pad), y, margins)
        plot.axes(ticks(y, 6), ticks(x, 4 if is_narrow else 7), f"{name}, better to the right")
        plot.levels([curve.chance], limits_of(fit), are_named=not is_narrow)
        at = plot.x(best[0])
        plot.rule("best", [at], (plot.top, plot.bottom))
        label = f"best {name}: {fit.unit} {best[1].step}"
        plot.text(at - 8, plot.bottom - 8, label, "use", "end")
        plot.line("faint", [(loss, point.value) for loss, point in looks])
        for loss, point in looks:
            plot.whisker(loss, point.rate, curve.tone(point))
        for loss, point in {looks[0], looks[-1], best}:
            label = f"{fit.unit} {point.step}: {brief(point.value)}"
            anchor = "end" if plot.x(loss) > 0.7 * plot.right else "start"
            plot.text(plot.x(loss), plot.y(point.value) + 18, label, "ink b", anchor)
        return plot.svg(f"{curve.name}, AUC against {name}. {tradeoff.sentence}")

    rows = [Row(str(p.step), [curve.cell(p), Cell(f"{loss:.3f}", "use")]) for loss, p in looks]
    caption = f"A dot is a measurement. Higher: the trained model leaks more. {tradeoff.sentence}"
    columns = [fit.unit, "AUC", name]
    return _Figure("When learning turned into memorizing", caption, views(draw), columns, rows)


def _draw_defense(fit: FitSummary) -> _Figure | None:
    """Draw the leakage that each attack measured before and after the defence."""
    pairs = before_and_after(fit)
    if not pairs:
        return None

    def draw(width: float) -> str:
        is_narrow = width < HALF
        row, margins = (62, (12, 84, 8, 26)) if is_narrow else (54, (200, 100, 8, 26))
        plot = _Plot((width, row * len(pairs) + 36), (0, 1), (0, 1), margins)
        for tick in QUARTERS:
            plot.rule("grid", [plot.x(tick)], (plot.top, plot.bottom))
        plot.axes((), QUARTERS)
        for number, pair in enumerate(pairs):
            y = plot.top + row * (number + (0.62 if is_narrow else 0.5))
            if pair.chance:
                plot.rule("chance", [plot.x(pair.chance)], (y - 16, y + 16))
            is_red = pair.is_conclusive and is_leak(pair.after, pair.chance)
            tone = "read" if is_red else "calm"
            middle = [plot.x(rate.value or 0.0) for rate in (pair.before, pair.after)]
            plot.rule("faint", middle, (y - 7, y + 7))
            for rate, at, kind in ((pair.before, y - 7, "calm"), (pair.after, y + 7, tone)):
                if rate.low is not None:
                    ends = plot.x(rate.low), plot.x(1.0 if rate.high is None else rate.high)
                    plot.rule(f"bar {kind}", ends, [at])
                height = (plot.bottom - at) / (plot.bottom - plot.top)
                kind = "ink hollow" if rate is pair.before else kind
                plot.dots(kind, [(rate.value or 0.0, height)])
            place = (12, y - 20, "start") if is_narrow else (plot.left - 14, y + 4, "end")
            plot.text(place[0], place[1], pair.attack, "ink", place[2])
            change = f"{brief(pair.before.value)} \u2192 {brief(pair.after.value)}"
            plot.text(plot.right + 10, y + 4, change, "ink")
        return plot.svg("What each attack read before the defence and after it")

    rows = [
        # p[2:4]: the rates before and after the defence
        Row(p.attack, [Cell(f"{brief(r.value)} ({brief_interval(r)})") for r in p[2:4]])
        for p in pairs
    ]
    caption = (
        "Each line runs from before the defence (ring) to what left (dot), with 95% intervals."
    )
    columns = ["attack", "before", "of what left"]
    return _Figure("What the defence took away", caption, views(draw), columns, rows)


def _draw_attacks(fit: FitSummary) -> _Figure | None:
    """Draw a small chart for each attack on shared updates or on the trained model."""
    attacks = [a for a in _measured_attacks(fit) if len(a.clients) < 2]
    if len(attacks) < 2:
        return None
    curves = {curve_of(a, a.name): measure(a.headline) for a in attacks}
    bins = Bins([p.step for curve in curves for p in curve.points], MAX_DOTS)
    x = bins.span(fit.length)
    drawing, rows = Markup(""), []
    for curve, metric in curves.items():
        points = bins.highest(curve.points)
        last = f"{metric} {brief(curve.last.value)}"

        plot = _Plot((240, 118), x, (_lower_end({curve: points}), 1), (28, 8, 8, 20))
        plot.axes([0, 0.5, 1], ticks(x, 3))
        plot.levels([curve.chance], limits_of(fit, f"/{curve.name}/"))
        plot.curve(curve, list(points.values()), max_dots=2)
        title = '<div><p class="t">{}<span class="{}">{}</span></p>{}</div>'
        svg = Markup(plot.svg(f"{curve.name} at {fit.unit} {curve.last.step}: {last}"))
        drawing += Markup(title).format(curve.name, curve.tone(curve.last), last, svg)
        ends = [curve.cell(point) for point in (curve.points[0], curve.last)]
        rows.append(Row(curve.name, [Cell(metric), *ends]))
    columns = ["attack", "measure", "first", "last"]
    drawing = Markup('<div class="grid">{}</div>').format(drawing)
    return _Figure("Each attack", bins.caption.strip(), drawing, columns, rows)


def _draw_spending(fit: FitSummary, defense: str, series: Points, max_bins: int) -> _Figure | None:
    """Draw the epsilon that a defence has spent by each step."""
    bins = Bins([step for step, value in series if value is not None], max_bins)
    if len(bins.steps) < 2:
        return None
    epsilons, x = bins.downsample(series), bins.span(fit.length)
    last = list(epsilons.values())[-1][1]

    def draw(width: float) -> str:
        is_narrow, y = width < HALF, (0.0, 1.08 * max(value for _, value in epsilons.values()))
        plot = _Plot((width, 150), x, y, (40, 60 if is_narrow else 150, 14, 36))
        plot.axes(ticks(y, 4), _step_ticks(x, is_narrow), fit.unit)
        plot.line("ink", epsilons.values())
        if len(epsilons) <= MAX_DOTS:
            plot.dots("ink", epsilons.values())
        plot.label(last, f"\u03b5 {digits(last)}", "ink b")
        return plot.svg(f"Epsilon by {fit.unit}: {digits(last)} at the end")

    rows = bins.rows(lambda number: [Cell(digits(epsilons[number][1]))])
    caption = f"\u03b5 of {defense} by {fit.unit}, of all releases until then."
    return _Figure("Privacy spent", caption, views(draw), [fit.unit, "epsilon"], rows)


# ---- several runs -------------------------------------------------------------------------------


def compared_figures(fits: Sequence[FitSummary], compared: Comparison) -> list[_Figure]:
    """Return the charts that compare several runs.

    The charts are utility against leakage, and leakage by step. The first is left out if a gate
    stopped some of the runs, but not all.
    """
    curves = [
        curve_of(attack, name, f"dash{number % 4}")
        for number, (name, fit) in enumerate(zip(names_of(fits), fits, strict=True))
        if (attack := best_of_family(fit, compared.family))
    ]
    tradeoff = None if compared.lengths else _draw_tradeoff(compared)
    overlay = _draw_overlay(curves, compared.family, fits[0].unit, max(f.length or 0 for f in fits))
    return [chart for chart in (tradeoff, overlay) if chart is not None]


def _draw_tradeoff(compared: Comparison) -> _Figure | None:
    """Draw the leakage of each run against its utility."""
    runs = [
        (name, compared.utilities[name], reading, reading.rate)
        for name, reading in compared.readings.items()
        if name in compared.utilities and reading.rate
    ]
    if len(runs) < 2:
        return None
    values = [value for _, value, _, _ in runs]
    pad = 0.25 * (max(values) - min(values)) or 0.2
    x = min(values) - pad, max(values) + pad

    def draw(width: float) -> str:
        plot = _Plot((width, 300), x, (0, 1), (40, 20, 14, 40))
        plot.axes(QUARTERS, ticks(x, 4), f"{compared.metric} at {compared.unit} {compared.step}")
        plot.levels([runs[0][2].chance])
        for name, value, reading, rate in runs:
            tone = "read" if reading.verdict == "read" else "calm"
            plot.whisker(value, rate, tone, "bar")
            low = rate.value or 0.0 if rate.low is None else rate.low
            high = rate.value if rate.low is None else rate.high
            y = plot.y(low) + 18 if low > 0.2 else plot.y(high) - 10
            label = f"{_shorten(name, 22)}  {reading.answer}"
            plot.text(plot.x(value), y, label, "ink b", "middle")
        return plot.svg(f"{compared.family} against {compared.metric}, each run")

    rows = [Row(name, [Cell(reading.answer), Cell(f"{v:.3f}")]) for name, v, reading, _ in runs]
    columns = ["run", compared.family, compared.metric]
    caption = "Down is less leakage. Bars: 95% interval."
    return _Figure("Utility against leakage", caption, views(draw, HALF), columns, rows)


def _draw_overlay(curves: Sequence[Curve], family: str, unit: str, length: int) -> _Figure | None:
    """Draw the leakage of each run in one kind of leak by step, up to the longest run's length."""
    if not curves:
        return None
    bins = Bins([p.step for curve in curves for p in curve.points], MAX_DOTS)
    points_of = {curve: bins.highest(curve.points) for curve in curves}
    x, title = bins.span(length), standard_family(family).short_title

    def draw(width: float) -> str:
        plot = _Plot((width, 300), x, (_lower_end(points_of), 1), (40, 110, 14, 40))
        plot.axes(QUARTERS, _step_ticks(x, True), unit)
        plot.levels([curves[0].chance])
        for curve, points in points_of.items():
            plot.curve(curve, list(points.values()), max_dots=0)
            plot.dots(curve.tone(curve.last), [(curve.last.step, curve.last.value)])
            label, kind = _shorten(curve.name, 14), f"b {curve.tone(curve.last)}"
            if curve.last.step < 0.7 * x[1]:  # it ended early: the label stands there
                plot.text(plot.x(curve.last.step) + 8, plot.y(curve.last.value) + 16, label, kind)
            else:
                plot.label(curve.last.value or 0.0, label, kind)
        return plot.svg(f"{title} by {unit}, each run")

    rows = bins.rows(lambda i: [curve.cell(points.get(i)) for curve, points in points_of.items()])
    caption = f"The attack that recovered most, each run.{bins.caption}"
    columns = [unit, *(curve.name for curve in curves)]
    return _Figure(f"{capitalized(title)} by {unit}", caption, views(draw, HALF), columns, rows)


def _shorten(name: str, max_length: int) -> str:
    """Return a name that is cut to a number of characters, with an ellipsis."""
    return name if len(name) <= max_length else f"{name[: max_length - 1]}\u2026"


def _step_ticks(span: Span, is_narrow: bool) -> list[float]:
    """Return the ticks of an axis of steps; only whole numbers are steps."""
    return [tick for tick in ticks(span, 4 if is_narrow else 10) if tick == int(tick)]
