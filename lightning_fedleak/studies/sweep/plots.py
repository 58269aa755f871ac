"""Utility against leakage, one panel for each attack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_fedleak.studies.sweep.cell import CellResult, GridCell, pareto


def plot_pareto(
    results: Sequence[tuple[GridCell, CellResult]], path: Path, *, loss_before: float | None = None
) -> None:
    """Draw validation loss against leakage; cells that no other beats in both are joined.

    Args:
        results: cells with a loss and at least one known leakage; others are left out.
        path: of the PNG.
        loss_before: validation loss of the model before training, drawn as a line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [(c, r, r.val_loss) for c, r in results if r.val_loss is not None]
    attacks = list(dict.fromkeys(name for _, r, _ in measured for name in r.leakage))
    figure = Figure(figsize=(1 + 4.2 * max(1, len(attacks)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(1, len(attacks)), squeeze=False, sharey=True)[0]
    kinds = list(dict.fromkeys(c.defense.kind for c, _, _ in measured))
    for axis, attack in zip(axes, attacks, strict=False):
        points: list[tuple[float, float]] = []
        for cell, result, loss in measured:
            leakage = result.leakage.get(attack)
            if leakage is None or leakage.value is None:
                continue
            points.append((leakage.value, loss))
            color = f"C{kinds.index(cell.defense.kind)}"
            if leakage.low is not None and leakage.high is not None:
                axis.plot([leakage.low, leakage.high], [loss, loss], color=color, alpha=0.4)
            axis.plot([leakage.value], [loss], "o", color=color)
            right = leakage.value > 0.5
            axis.annotate(
                str(cell.defense),
                points[-1],
                fontsize=6,
                xytext=(-4 if right else 4, 3),
                textcoords="offset points",
                ha="right" if right else "left",
            )
            axis.set_xlabel(f"{attack}: {leakage.metric}")
        front = [points[i] for i in pareto(points)]
        axis.plot([x for x, _ in front], [y for _, y in front], color="0.6", lw=0.8, zorder=0)
        if loss_before is not None:
            axis.axhline(loss_before, color="0.8", lw=0.8, ls="--")
            axis.annotate(
                "before training", (1.0, loss_before), fontsize=6, ha="right", va="bottom"
            )
        axis.set_xlim(-0.05, 1.05)
    axes[0].set_ylabel("validation loss")
    figure.suptitle("less leakage to the left, more utility below", fontsize=9)
    figure.savefig(path, dpi=130)
