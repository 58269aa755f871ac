"""``fedleak compare``: what changed between two runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_fedleak.report import findings, read
from lightning_fedleak.report.attacks import AttackSummary
from lightning_fedleak.report.fits import FitSummary, last_and_best
from lightning_fedleak.report.records.utility import is_training, title_of
from lightning_fedleak.report.wording import in_words, interval, share


def run(options: Namespace) -> int:
    """Print the newest fit of two log folders side by side, and return 0.

    Raises:
        ReportError: one of them cannot be read, or holds no run.
    """
    console, before, after = Console(highlight=False), options.before, options.after
    runs = [_runs(place) for place in (before, after)]
    first, second = (listed[-1] for listed in runs)
    table = Table(show_lines=True)
    for title in ("measured", escape(str(before)), escape(str(after)), "change"):
        table.add_column(title, overflow="fold")  # a name is never cut
    table.add_row(f"{first.unit}s, looked at", *map(_extent, (first, second)), "")
    _add_utility(table, first, second)
    _add_attacks(table, first, second)
    if first.withheld or second.withheld:
        withheld = [f"{fit.withheld} of {fit.updates}" for fit in (first, second)]
        table.add_row("updates kept back", *withheld, "")
    _add_privacy(table, first, second)
    console.print(table)
    for place, listed in zip((before, after), runs, strict=True):
        if len(listed) > 1:
            console.print(f"{escape(str(place))} holds {len(listed)} runs: the newest is compared.")
    if None not in (first.steps, second.steps) and first.steps != second.steps:
        console.print(
            f"Last measured at {first.unit} {first.steps} and at {second.unit} {second.steps}: a "
            "change may come from the length of training."
        )
    console.print(
        "Leakage: mean of all measurements, then the latest result with its 95% interval. Where "
        "intervals overlap, the difference may be chance."
    )
    return 0


def _extent(fit: FitSummary) -> str:
    return f"{in_words(fit.length)}, {fit.looked_at:,}"


def _add_utility(table: Table, first: FitSummary, second: FitSummary) -> None:
    """Add the metrics of validation; those of training batches where a run has no others.

    The change of a loss of one batch is that of the batches.
    """
    metrics = [last_and_best(fit.utility) for fit in (first, second)]
    shared = [name for name in metrics[0] if name in metrics[1] and not is_training(name)]
    for name in shared or dict.fromkeys([*metrics[0], *metrics[1]]):
        pair = [by_name.get(name) for by_name in metrics]
        lasts = [None if one is None else one[0] for one in pair]
        change = "of two batches, not of the runs" if is_training(name) else _change(*lasts)
        table.add_row(escape(f"utility/{title_of(name)}"), *map(_last_and_best, pair), change)


def _last_and_best(pair: tuple[float, float] | None) -> str:
    return "not recorded" if pair is None else f"{in_words(pair[0])}\nbest {in_words(pair[1])}"


def _add_attacks(table: Table, first: FitSummary, second: FitSummary) -> None:
    attacks = [{(a.name, a.stage): a for a in fit.attacks} for fit in (first, second)]
    for key in dict.fromkeys([*attacks[0], *attacks[1]]):
        pair = [by_name.get(key) for by_name in attacks]
        headline = next(a.headline for a in pair if a)
        means = [a.mean if a and a.exposed else None for a in pair]
        name, stage = key
        table.add_row(
            escape(f"{name}\n{headline}, {stage}"),
            *map(_measured, pair),
            _change(*means) + _other_settings(*pair) + _low_controls(*pair),
        )


def _add_privacy(table: Table, first: FitSummary, second: FitSummary) -> None:
    accounts = [{(a.defense, a.unit): a for a in fit.privacy} for fit in (first, second)]
    for defense, unit in dict.fromkeys([*accounts[0], *accounts[1]]) or [("", "")]:
        claims = [
            escape(by_name[defense, unit].claim) if (defense, unit) in by_name else "none accounted"
            for by_name in accounts
        ]
        title = " of ".join(filter(None, ("epsilon", unit))) + f" ({defense})" * bool(defense)
        table.add_row(escape(title), *claims, "")


def _runs(place: Path) -> Sequence[FitSummary]:
    return findings(read([place])).runs


def _measured(attack: AttackSummary | None) -> str:
    if attack is None:
        return "not tested"
    if not attack.exposed:
        return "not shared"
    if attack.mean is None:
        return "unknown"
    looks = f"{attack.looks} result{'s' * (attack.looks != 1)}"
    unknown = f", unknown at {attack.unknown} more" if attack.unknown else ""
    last = interval(attack.last).replace(" (", "\n(")
    control = f"\ncontrol {share(attack.control)}" if attack.has_control else ""
    if attack.control_of_a_part is not None:
        control += f", of a part {share(attack.control_of_a_part)}"
    note = f"\n{attack.control_note}" if attack.control_note else ""
    return f"mean {share(attack.mean)}\nlast {last}\n{looks}{unknown}{control}{note}"


def _other_settings(before: AttackSummary | None, after: AttackSummary | None) -> str:
    """Return a note where a change may be of the attack and not of the run."""
    same = before is None or after is None or before.config == after.config
    return "" if same else " (other settings of the attack)"


def _low_controls(*pair: AttackSummary | None) -> str:
    """Return a note where a number is low, and says nothing by its control."""
    blind = any(attack is not None and attack.is_blind for attack in pair)
    return " (says nothing: a control is low)" if blind else ""


def _change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{after - before:+.3f}"
