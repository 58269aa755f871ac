"""A drawing with two axes as SVG, as a desk and as a phone show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup, escape

from lightning_fedleak.report.attacks import Point
from lightning_fedleak.report.records import MetricValue
from lightning_fedleak.report.series import Curve, Span
from lightning_fedleak.report.wording import brief

DESK, HALF, PHONE = 1064, 510, 354
"""Widths in pixels: of the page's column, of half of it, and of the column on a phone."""
MAX_DOTS = 48  # bins up to which each has a symbol: more would touch
QUARTERS = (0, 0.25, 0.5, 0.75, 1)  # ticks of a rate; more ticks crowd a phone's chart
SHAPES = {
    "words": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
    "membership": "m-3-3h6v6h-6z",
    "texts": "m0-4l4 4-4 4-4-4z",
    "memorization": "m0-4l4 7h-8z",
}
"""Paths of the symbols of each kind of leak; others have that of words."""
Place = tuple[float, float | None]


class Plot:
    """A drawing with two axes.

    Args:
        size: width and height in pixels.
        x, y: lowest and highest value of each axis; of ``x`` the first may be the higher one.
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
        """Return the pixel of a value."""
        low, high = self._x
        return self.left + (value - low) / (high - low or 1) * (self.right - self.left)

    def y(self, value: float | None) -> float:
        """Return the pixel of a value; an unknown upper end is the highest value."""
        low, high = self._y
        share = 1.0 if value is None else (value - low) / (high - low)
        return self.bottom - share * (self.bottom - self.top)

    def rule(self, kind: str, x: Sequence[float], y: Sequence[float]) -> None:
        """Draw a line between two pixels."""
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
        """Draw what guessing reaches, where that is above 0, and the limits of gates."""
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
        """Draw a line for each value, the numbers at both axes, and the name of the lower one."""
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
        """Return the drawing, with its labels one below the other."""
        heights: list[float] = []
        labels = sorted(self._labels)
        for y, _, _ in labels:
            heights.append(max(y, heights[-1] + 15) if heights else y)
        over = max(0.0, (heights or [0.0])[-1] - self.bottom)
        for height, (_, text, kind) in zip(heights, labels, strict=True):
            self.text(self.right + 10, height - over + 4, text, kind)
        box = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        axis = " ".join(f"{n:g}" for n in (self.left, self.right, *self._x, self.bottom))
        name = f'role="img" aria-label="{escape(description)}"'
        return f"<svg {box} data-axis='{axis}' {name}>{''.join(self._parts)}</svg>"


def views(draw: Callable[[float], str], desk: float = DESK) -> Markup:
    """Return a chart as it is drawn for a desk and for a phone, of which the page shows one."""
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
