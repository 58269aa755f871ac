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
PANEL = (4.4, 3.2)  # inches of one panel
DPI = 100  # of the picture

Axis = Literal["sigma", "length"]


def plot_cells(
    cells: Sequence[ActivationCell], x_axis: Axis, path: Path, *, model: str = ""
) -> None:
    """Write a picture: a column for each split, a row for each length (or noise level).

    Solid lines are token accuracy (Eq. 5) with its 95% interval, dashed ones the share of texts
    without an error. The black line is the task accuracy of the whole model from the same noised
    states.

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
            _draw_panel(axes[row, column], panel_cells, x_axis)
            place = f"split {layer} of {cells[0].blocks}"
            condition = f"{row_value} tokens" if row_axis == "length" else f"noise {row_value:g}"
            axes[row, column].set_title(f"{place}, {condition}", fontsize=9)
        axes[row, 0].set_ylabel("share")
    for axis in axes[-1]:
        axis.set_xlabel(
            "tokens"
            if x_axis == "length"
            else "noise" + ", in standard deviations per dimension" * cells[0].relative
        )
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.suptitle(model, fontsize=10)
    figure.savefig(path, dpi=DPI)


def _draw_panel(axis: Any, cells: Sequence[ActivationCell], x_axis: Axis) -> None:
    for attack in (a for a in ADVERSARIES if any(c.attack == a for c in cells)):
        attack_cells = sorted(
            (c for c in cells if c.attack == attack and c.rates), key=lambda c: getattr(c, x_axis)
        )
        x = [getattr(c, x_axis) for c in attack_cells]
        accuracy = [c.rates["token_accuracy"] for c in attack_cells]
        exact = [c.rates["exact_sentences"].value for c in attack_cells]
        color = COLORS[attack]
        axis.plot(x, [r.value for r in accuracy], "o-", color=color, label=f"{attack}: tokens")
        axis.plot(x, exact, "--", color=color, linewidth=1, label=f"{attack}: exact texts")
        low, high = [r.low for r in accuracy], [r.high for r in accuracy]
        axis.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
    tasks = {getattr(c, x_axis): c.utility for c in cells if c.utility is not None}
    points = sorted(tasks)
    if points:
        accuracies = [tasks[p].accuracy for p in points]
        label = f"task: {tasks[points[0]].task}"
        axis.plot(points, accuracies, "ks-", markersize=3, label=label)
    axis.set_ylim(-0.03, 1.03)
    if x_axis == "length":
        axis.set_xscale("log", base=2)
    else:
        positive = [c.sigma for c in cells if c.sigma > 0]
        axis.set_xscale("symlog", linthresh=min(positive, default=1.0))
    axis.grid(alpha=0.3)
