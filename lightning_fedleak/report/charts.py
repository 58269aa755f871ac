"""Pictures of a fit as SVG, drawn here so that the page loads nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup, escape

from lightning_fedleak.report.attacks import RELEASED, SUM, AttackSummary
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.records.utility import title_of

Points = Sequence[tuple[float, float | None]]
Scale = Callable[[float], float]
"""A function that returns the pixel of a value."""

WIDTH = 420
"""Width of a picture in pixels. The page scales it."""
MARGIN, RIGHT, TOP, BOTTOM = 46, 14, 10, 28
"""Margins in pixels, which hold the numbers at the axes."""
MOST_POINTS = 200
"""Most points of a line. Longer lines show each part's lowest and highest value. Not tuned."""
COLOURS = 8
"""Number of colours in the page's style sheet, and so of lines that can be told apart."""
LARGEST_DRAWN = 1e300
"""Larger values are not drawn, because differences of two would be infinite."""


def pictures(fit: FitSummary) -> dict[str, Markup]:
    """Return the pictures of a fit, by their titles."""
    gate_steps: dict[str, list[float]] = {}
    for decision in fit.decisions:
        suffix = "" if decision.client is None else f", client {decision.client}"
        gate_steps.setdefault(f"{decision.gate} {decision.did}{suffix}", []).append(decision.step)
    unit = fit.unit
    marks = "dashed: guessing" + "; ring: its control" * any(a.has_control for a in fit.attacks)
    titled = {
        f"Each attack: latest result, 95% interval ({marks})": intervals(
            fit.attacks, label="attacks with intervals, unknown ones first"
        )
    }
    single = {name: parts[""] for name, parts in fit.headlines.items() if set(parts) == {""}}
    on_model = {attack.name for attack in fit.attacks if attack.stage == RELEASED}
    for source in ("of what was shared", "of the trained model"):
        series = {
            name: line
            for name, line in single.items()
            if (name in on_model) == (source == "of the trained model")
        }
        values = (value for line in series.values() for _, value in line)
        if series:
            titled[f"Leakage over {unit}s, {source}"] = lines(
                series,
                label=f"each attack's headline over {unit}s, {source}",
                span=(lowest(values), 1.0),
                marks=gate_steps,
                unit=unit,
            )
    for name, parts in fit.headlines.items():
        if name not in single:
            by_client = {c if c == SUM else f"client {c}": line for c, line in parts.items()}
            headline = next(a.headline for a in fit.attacks if a.name == name)
            titled[f"{name}, {headline}, by client"] = lines(
                few(by_client, last=SUM),
                label=f"{name} over {unit}s, one line for each client",
                span=(0.0, 1.0),
                marks=gate_steps,
                unit=unit,
            )
    if fit.utility:
        titled[f"Utility over {unit}s"] = lines(
            few({title_of(name): line for name, line in fit.utility.items()}),
            label=f"utility over {unit}s",
            marks=gate_steps,
            unit=unit,
        )
    for account in fit.privacy:
        target = account.target_epsilon
        protected = {"client": ", for a whole client", "row": ", for a text",
                     "user": ", for a user"}.get(account.unit, "")  # fmt: skip
        titled[f"Epsilon spent ({account.defense}{protected})"] = lines(
            {"epsilon": account.series},
            label=f"epsilon over {unit}s",
            level=target if isinstance(target, int | float) else None,
            unit=unit,
        )
    return titled


def few(series: Mapping[str, Points], *, last: str = "") -> dict[str, Points]:
    """Return one line for each colour at most: those with the highest means, and the others' mean.

    Args:
        series: as :func:`lines` takes them.
        last: name of a line that is always drawn.
    """
    if len(series) <= COLOURS:
        return dict(series)

    def mean_value(name: str) -> float:
        values_of_line = [value for _, value in series[name] if value is not None]
        return math.fsum(values_of_line) / len(values_of_line) if values_of_line else -math.inf

    order = sorted((name for name in series if name != last), key=mean_value, reverse=True)
    highest = set(order[: COLOURS - 2])
    others: dict[float, list[float]] = {}
    for name in order[COLOURS - 2 :]:
        for step, value in series[name]:
            others.setdefault(step, []).extend([] if value is None else [value])
    mean = [(x, math.fsum(v) / len(v) if v else None) for x, v in sorted(others.items())]
    lines = {name: line for name, line in series.items() if name in highest}
    lines[f"mean of the {len(order) - len(highest)} others"] = mean
    return lines | ({last: series[last]} if last in series else {})


def lines(
    series: Mapping[str, Points],
    *,
    label: str,
    height: int = 190,
    span: tuple[float, float] | None = None,
    marks: Mapping[str, Sequence[float]] | None = None,
    level: float | None = None,
    unit: str = "step",
) -> Markup:
    """Return a picture of lines over steps or rounds, with a legend; gaps are unknown values.

    Args:
        series: (step, value) by name; None is unknown.
        label: description of the picture, for screen readers.
        height: height in pixels.
        span: lowest and highest value of the vertical axis; by default those of the lines.
        marks: steps of events, by the event's name.
        level: a value that is marked by a dashed line.
        unit: unit of the horizontal axis.
    """
    series = {
        name: [(x, None if y is None or abs(y) > LARGEST_DRAWN else y) for x, y in line]
        for name, line in series.items()
    }
    points = [p for line in series.values() for p in line]
    values = [v for _, v in points if v is not None] + ([] if level is None else [level])
    if not values:
        return Markup('<p class="unknown">nothing is known</p>')
    low, high = span or _span(values)
    first = min(x for x, _ in points)
    last = max(first + 1, *(x for x, _ in points))
    x_scale = _scale(first, last, MARGIN, WIDTH - RIGHT)
    y_scale = _scale(low, high, height - BOTTOM, TOP)
    parts = [*_axes(height, _ticks(low, high), y_scale, _ticks(first, last), x_scale)]
    if level is not None:
        parts.append(_dashed(MARGIN, y_scale(level), WIDTH - RIGHT, y_scale(level), "level"))
    for event, steps in (marks or {}).items():
        for step in steps:
            x = x_scale(step)
            title = f"<title>{escape(event)}: {unit} {step:g}</title>"
            parts.append(f"<g>{title}{_dashed(x, TOP, x, height - BOTTOM, 'mark')}</g>")
    for number, (name, line) in enumerate(series.items()):
        parts += _curve(line, name, f"c{number % COLOURS}", x_scale, y_scale)
    legend = "".join(
        f'<li><i class="c{number % COLOURS}"></i>{escape(name)}</li>'
        for number, name in enumerate(series)
    )
    picture = _svg(height, label, parts)
    return Markup(f'<figure>{picture}<ul class="legend">{legend}</ul></figure>')


def intervals(attacks: Sequence[AttackSummary], *, label: str) -> Markup:
    """Return a picture of each attack's last value with its interval, on an axis up to 1.

    Args:
        attacks: the attacks, in the order of their lines.
        label: description of the picture, for screen readers.
    """
    if not attacks:
        return Markup('<p class="unknown">no attack was played</p>')
    step = 36
    height = TOP + step * len(attacks) + BOTTOM
    ends_of_all = (x for a in attacks if a.last for x in (a.last.low, a.last.value))
    x_scale = _scale(lowest(ends_of_all), 1.0, RIGHT, WIDTH - RIGHT)
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x = x_scale(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{tick:g}</text>')
    for number, attack in enumerate(attacks):
        top = TOP + step * number
        y = top + 25
        title = f"{attack.name} ({attack.stage}), {attack.headline}"
        if attack.last_client is not None:
            title += f", worst client {attack.last_client}"
        last = attack.last
        if last is None or last.value is None:
            unknown = escape(f"{title}: unknown")
            parts.append(f'<text class="unknown" x="{RIGHT}" y="{top + 13}">{unknown}</text>')
            continue
        parts.append(f'<text x="{RIGHT}" y="{top + 13}">{escape(title)}</text>')
        if last.low is not None and last.high is not None:
            ends = f'x1="{x_scale(last.low):.1f}" x2="{x_scale(last.high):.1f}"'
            parts.append(f'<line class="whisker" {ends} y1="{y}" y2="{y}"/>')
        if attack.chance:
            x = x_scale(attack.chance)
            parts.append(_dashed(x, y - 7, x, y + 7, "level"))
        parts.append(f'<circle class="dot c0" cx="{x_scale(last.value):.1f}" cy="{y}" r="4"/>')
        if attack.control is not None:
            title = f"<title>control {attack.control:.3f}</title>"
            place = f"{x_scale(attack.control):.1f}"
            parts.append(f'<circle class="ring" cx="{place}" cy="{y}" r="6">{title}</circle>')
    return Markup(f"<figure>{_svg(height, label, parts)}</figure>")


# ---- parts ------------------------------------------------------------------------------------


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:g}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _dashed(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _curve(line: Points, name: str, colour: str, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    """Yield the parts of a line between unknown values; a part with one value is a dot."""
    title = f"<title>{escape(name)}</title>"
    for run in _known_runs(_thinned(line)):
        corners = [f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in run]
        if len(run) > 1:
            yield f'<polyline class="{colour}" points="{" ".join(corners)}">{title}</polyline>'
        else:
            x, y = corners[0].split(",")
            yield f'<circle class="{colour} dot" cx="{x}" cy="{y}" r="3">{title}</circle>'


def _axes(
    height: int, values: Sequence[float], y_scale: Scale, steps: Sequence[float], x_scale: Scale
) -> Iterator[str]:
    """Yield a horizontal line for each value, and the numbers at both axes."""
    for value in values:
        y = y_scale(value)
        yield f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for step in (one for one in steps if one == int(one)):
        x = x_scale(step)
        yield f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{step:g}</text>'


def lowest(values: Iterable[float | None]) -> float:
    """Return where an axis of rates begins: at 0, or lower if a value is negative."""
    return max(-1.0, min((value for value in values if value is not None and value < 0), default=0))


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    high = high if high > low else low + 1.0
    factor = (end - start) / (high - low)
    return lambda value: start + factor * (value - low)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers."""
    step = 10 ** math.floor(math.log10((high - low) / 4 or 1.0))
    step = next(step * times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 5)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _thinned(line: Points) -> list[tuple[float, float | None]]:
    """Return at most ``MOST_POINTS`` points: each part's lowest and highest value, in order."""
    if len(line) <= MOST_POINTS:
        return list(line)
    size = math.ceil(2 * len(line) / MOST_POINTS)
    points: list[tuple[float, float | None]] = []
    for start in range(0, len(line), size):
        part = line[start : start + size]
        values_of_line = [(x, y) for x, y in part if y is not None]
        if not values_of_line:
            points.append((part[0][0], None))
            continue
        ends = {min(values_of_line, key=lambda p: p[1]), max(values_of_line, key=lambda p: p[1])}
        points += sorted(ends)
    return points


def _known_runs(line: Points) -> list[list[tuple[float, float]]]:
    """Return the parts of a line between unknown values."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
