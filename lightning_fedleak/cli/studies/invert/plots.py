"""Zheng's Fig. 1 and 2: attack and task accuracy against noise and against length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_fedleak.cli.studies.invert.adversaries import ADVERSARIES
from lightning_fedleak.cli.studies.invert.cells import ActivationCell

COLORS = dict(
    zip(ADVERSARIES, ("tab:green", "tab:cyan", "tab:blue", "tab:red", "tab:orange"), strict=True)
)
STYLES = {"token_accuracy": "-", "rouge_l": ":", "exact_sentences": "--"}
NAMES = {"token_accuracy": "tokens", "rouge_l": "ROUGE-L", "exact_sentences": "exact texts"}
PANEL = (4.4, 3.2)  # inches of one panel
DPI = 100  # of the picture

Axis = Literal["sigma", "length"]


def worth_drawing(cells: Sequence[ActivationCell], x_axis: Axis) -> bool:
    """Return whether there are results at two points or more of the axis."""
    return len({getattr(c, x_axis) for c in cells if c.rates}) > 1


def plot_cells(
    cells: Sequence[ActivationCell], x_axis: Axis, path: Path, *, model: str = ""
) -> None:
    """Write a picture: a column for each split, a row for each length (or noise level).

    Solid lines are token accuracy (Eq. 5) with its 95% interval, dotted ROUGE-L, dashed the share
    of texts without an error. The black line is the task accuracy of the whole model from the same
    noised states, the grey one its perplexity (right axis).

    Args:
        cells: of one model, from :func:`~lightning_fedleak.cli.studies.invert.cells.run_cells`.
        x_axis: ``"sigma"`` for Fig. 1, ``"length"`` for Fig. 2.
        path: file that is written, its suffix the format.
        model: its name, for the title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    row_axis: Axis = "length" if x_axis == "sigma" else "sigma"
    layers = sorted({c.layer for c in cells})
    row_values = sorted({getattr(c, row_axis) for c in cells})
    figure = Figure(
        figsize=(PANEL[0] * len(layers) + 0.6, PANEL[1] * len(row_values) + 0.9),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(row_values), len(layers), squeeze=False, sharey=True)
    for row, row_value in enumerate(row_values):
        for column, layer in enumerate(layers):
            panel_cells = [
                c for c in cells if c.layer == layer and getattr(c, row_axis) == row_value
            ]
            last = column == len(layers) - 1
            _panel(axes[row, column], panel_cells, x_axis, perplexity_label=last)
            place = f"split {layer} of {cells[0].blocks}"
            condition = f"{row_value} tokens" if row_axis == "length" else f"noise {row_value:g}"
            axes[row, column].set_title(f"{place}, {condition}", fontsize=9)
        axes[row, 0].set_ylabel("share")
    for axis in axes[-1]:
        axis.set_xlabel(_label(x_axis, cells[0].relative))
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.suptitle(model, fontsize=10)
    figure.savefig(path, dpi=DPI)


def _label(x_axis: Axis, relative: bool) -> str:
    if x_axis == "length":
        return "tokens"
    return "noise, in standard deviations per dimension" if relative else "standard deviation"


def _panel(
    axis: Any, cells: Sequence[ActivationCell], x_axis: Axis, *, perplexity_label: bool
) -> None:
    points = sorted({getattr(c, x_axis) for c in cells})
    _attack_lines(axis, cells, x_axis)
    _task_lines(axis, cells, x_axis, perplexity_label=perplexity_label)
    axis.set_ylim(-0.03, 1.03)
    positive = [p for p in points if p > 0]
    if x_axis == "length":
        axis.set_xscale("log", base=2)
        axis.set_xticks(points, [str(p) for p in points])
    elif positive and max(positive) > 4 * min(positive):
        axis.set_xscale("symlog", linthresh=min(positive))
        axis.set_xticks(points, [f"{p:g}" for p in points])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _attack_lines(axis: Any, cells: Sequence[ActivationCell], x_axis: Axis) -> None:
    for attack in (a for a in ADVERSARIES if any(c.attack == a for c in cells)):
        attack_cells = sorted(
            (c for c in cells if c.attack == attack and c.rates), key=lambda c: getattr(c, x_axis)
        )
        x = [getattr(c, x_axis) for c in attack_cells]
        for rate, style in STYLES.items():
            values = [c.rates[rate] for c in attack_cells]
            axis.plot(
                x,
                [v.value for v in values],
                style,
                color=COLORS[attack],
                marker="o" if rate == "token_accuracy" else None,
                markersize=4,
                linewidth=1.8 if rate == "token_accuracy" else 1.0,
                label=f"{attack}: {NAMES[rate]}",
            )
            if rate == "token_accuracy":
                low, high = [v.low for v in values], [v.high for v in values]
                axis.fill_between(x, low, high, color=COLORS[attack], alpha=0.1, linewidth=0)


def _task_lines(
    axis: Any, cells: Sequence[ActivationCell], x_axis: Axis, *, perplexity_label: bool
) -> None:
    useful = {getattr(c, x_axis): c.utility for c in cells if c.utility is not None}
    x = sorted(useful)
    if x:
        accuracy = [useful[p].accuracy for p in x]
        axis.plot(x, accuracy, "ks-", markersize=3, label=f"task: {useful[x[0]].task}")
    perplexities = [(p, useful[p].perplexity) for p in x if useful[p].perplexity is not None]
    if perplexities:
        right = axis.twinx()
        right.plot(*zip(*perplexities, strict=True), color="0.6", linewidth=1, label="perplexity")
        right.set_yscale("log")
        right.tick_params(colors="0.5", labelsize=7)
        if perplexity_label:
            right.set_ylabel("task: perplexity", color="0.5", fontsize=8)
