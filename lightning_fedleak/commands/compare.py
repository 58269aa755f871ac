"""``fedleak compare``: what changed between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_fedleak.report import NothingToReport, findings, read
from lightning_fedleak.report.page import claimed, interval, known, share


def compare(before: Path, after: Path, console: Console | None = None) -> None:
    """Prints the newest fit of each folder side by side.

    Args:
        before: log folder of the first run.
        after: that of the second.
        console: where to print; stdout by default.

    Raises:
        NothingToReport: one of them holds no run.
    """
    console = console or Console()
    first, second = (_newest(place) for place in (before, after))
    table = Table(show_lines=True)
    for title in ("measured", escape(str(before)), escape(str(after)), "change"):
        table.add_column(title, overflow="fold")  # a name is never cut
    for name in dict.fromkeys([*first["utility"], *second["utility"]]):
        ends = [_last(fit["utility"].get(name)) for fit in (first, second)]
        table.add_row(escape(f"utility/{name}"), *map(known, ends), _change(*ends))
    attacks = [{(a["name"], a["stage"]): a for a in fit["attacks"]} for fit in (first, second)]
    for key in dict.fromkeys([*attacks[0], *attacks[1]]):
        of = [named.get(key) for named in attacks]
        headline = next(a["headline"] for a in of if a)
        means = [a["mean"] if a and a["exposed"] else None for a in of]
        name, stage = key
        table.add_row(
            escape(f"{name}\n{headline}, {stage}"),
            *map(_measured, of),
            _change(*means) + _otherwise(*of),
        )
    if any(fit["withheld"] for fit in (first, second)):
        kept = [f"{fit['withheld']} of {fit['updates']}" for fit in (first, second)]
        table.add_row("updates kept back", *kept, "")
    spent = [{(p["defense"], p["unit"]): p for p in fit["privacy"]} for fit in (first, second)]
    for key in dict.fromkeys([*spent[0], *spent[1]]) or [("", "")]:
        accounts = [of.get(key) for of in spent]
        of_what = " of ".join(filter(None, ("epsilon", key[1])))
        by = f" ({key[0]})" if key[0] else ""
        told = [escape(claimed(one)) if one else "none accounted" for one in accounts]
        table.add_row(escape(f"{of_what}{by}"), *told, "")
    console.print(table)
    for place, fit in ((before, first), (after, second)):
        if fit["of"] > 1:
            console.print(
                f"{escape(str(place))} holds {fit['of']} runs: the newest is compared.",
                highlight=False,
            )
    lasts = [fit["steps"] for fit in (first, second)]
    if None not in lasts and lasts[0] != lasts[1]:
        console.print(
            f"Last measured at {first['unit']} {lasts[0]} and at {second['unit']} {lasts[1]}: a "
            "change may come from how long was trained.",
            highlight=False,
        )
    console.print(
        "Leakage: mean of all measurements, then the latest result with its 95% interval. Where "
        "intervals overlap, the difference may be chance.",
        highlight=False,
    )


def _newest(place: Path) -> Mapping[str, Any]:
    runs = findings(read([place]))["runs"]
    if not runs:
        raise NothingToReport(f"'{place}' holds results of commands, and no run of a Trainer")
    return {**runs[-1], "of": len(runs)}


def _last(line: list[tuple[int, float | None]] | None) -> float | None:
    values = [value for _, value in line or () if value is not None]
    return values[-1] if values else None


def _measured(attack: Mapping[str, Any] | None) -> str:
    if attack is None:
        return "not tested"
    if not attack["exposed"]:
        return "not shared"
    if attack["mean"] is None:
        return "unknown"
    looks = f"{attack['looks']} result{'s' * (attack['looks'] != 1)}"
    unknown = f", unknown at {attack['unknown']} more" if attack["unknown"] else ""
    last = interval(attack["last"]).replace(" (", "\n(")
    return f"mean {share(attack['mean'])}\nlast {last}\n{looks}{unknown}"


def _otherwise(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """Why a change may be of the attack and not of the run."""
    alike = before is None or after is None or before["config"] == after["config"]
    return "" if alike else " (other settings of the attack)"


def _change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{after - before:+.3f}"


__all__ = ["compare"]
