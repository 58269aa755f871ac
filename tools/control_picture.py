"""Draw what the control of a look is, as the test button of a smoke alarm.

::

    python tools/control_picture.py             # docs/control.svg

What each row concludes is what the rule of gates says of its numbers.
"""

import argparse
import math
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_fedleak.report.records import Judgement, judge_value

LIMIT = 0.5
"""The limit of the README's gate, which the dashed line shows."""
ROWS = ((0.05, 1.0, math.nan), (0.22, 0.3, math.nan), (0.22, 0.3, 0.95))
"""What an attack reads of the step, of its control, and of the control of a part of the batch."""
WIDTH, ROW = 360, 112
"""In pixels, for the screen of a phone."""
BAR, LEFT = 200, 88
"""Length of a bar at 1, and where bars begin, in pixels."""
STYLE = """
svg { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5b6675; --rule: #d9dee5;
  --read: #2563c9; --known: #c2410c; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181f; --ink: #e6eaf0; --soft: #9aa6b6;
  --rule: #323a46; --read: #7fb0ff; --known: #ff9d66; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.bold { font-weight: 600; } .soft { fill: var(--soft); }
.paper { fill: var(--paper); } .read { fill: var(--read); } .known { fill: var(--known); }
.line { fill: none; stroke: var(--ink); stroke-width: 2; stroke-linecap: round; }
.rule { stroke: var(--rule); } .limit { stroke: var(--ink); stroke-dasharray: 3 2; }
"""


def conclusion(counted: Judgement) -> str:
    """Return what may be said of a low number."""
    if math.isnan(counted.value):
        return "The button is silent: unknown"
    if counted.by_aggregation:
        return "It rings for a part: low by aggregation"
    return "The test button rings: little is read"


def alarm(x: float, y: float, *, rings: bool) -> str:
    """Return a smoke alarm whose test button is pressed."""
    parts = [
        f'<circle class="line" cx="{x}" cy="{y}" r="20"/>',
        f'<circle class="known" cx="{x}" cy="{y}" r="6"/>',
    ]
    for side in (-1, 1):
        if rings:
            for radius in (27, 34):
                ends = [
                    f"{x + side * radius * math.cos(angle):.1f} {y + radius * math.sin(angle):.1f}"
                    for angle in (-0.5, 0.5)
                ]
                arc = f"A{radius} {radius} 0 0 {int(side > 0)} {ends[1]}"
                parts.append(f'<path class="line" d="M{ends[0]} {arc}"/>')
    return "".join(parts)


def bar(y: float, name: str, value: float, kind: str) -> str:
    """Return a bar with its name above and its number behind it."""
    length, limit = max(2.0, BAR * value), LEFT + BAR * LIMIT
    return (
        f'<text class="soft" x="{LEFT}" y="{y - 4}">{escape(name)}</text>'
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:g}" height="10" rx="2"/>'
        f'<line class="limit" x1="{limit:g}" x2="{limit:g}" y1="{y - 2}" y2="{y + 12}"/>'
        f'<text x="{LEFT + length + 6:g}" y="{y + 10}">{value:.2f}</text>'
    )


def picture() -> str:
    """Return the picture as SVG, which loads nothing and is readable in light and in dark."""
    parts = []
    y = 12
    for value, control, part in ROWS:
        counted = judge_value(value, control, part=part, at_most=LIMIT, chance=0.0)
        has_part = not math.isnan(part)
        height = ROW + 30 * has_part
        if y > 12:
            parts.append(f'<line class="rule" x1="12" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="bold" x="12" y="{y + 20}">{conclusion(counted)}</text>')
        parts.append(alarm(44, y + 66, rings=max(control, part if has_part else 0) > LIMIT))
        parts.append(bar(y + 48, "read of the step", value, "read"))
        parts.append(bar(y + 80, "read of known words", control, "known"))
        if has_part:
            parts.append(bar(y + 112, "read of known words, a part of them", part, "known"))
        y += height
    parts.append(f'<text class="soft" x="12" y="{y + 14}">dashed: the limit of a gate</text>')
    y += 28
    label = (
        "A smoke alarm has a test button. It rings: a low number is low. It is silent: a low "
        "number says nothing. It rings for a part of the batch: the number is low by aggregation."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="{escape(label)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{y}" rx="8"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="default: docs")
    path = parser.parse_args().out / "control.svg"
    path.write_text(picture(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
