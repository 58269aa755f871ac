"""TensorBoard's page of the trained weights names what is logged, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fedleak import DPSGD, DefendedStrategy
from lightning_fedleak.evaluation.canaries import leave_out
from tests.callbacks.test_monitor import charts_and_tags
from tests.engine.channels.test_canaries import planted, watch
from tests.engine.channels.test_memorization import fit, monitor, rows


@pytest.mark.parametrize("coins", [True, False])
def test_a_limit_has_a_line_where_an_account_is_compared(tmp_path: Path, coins: bool) -> None:
    board = TensorBoardLogger(tmp_path)
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)
    data = leave_out(rows(), 140, seed=1, coins=coins)[0]
    strategy = DefendedStrategy("auto", [defense])
    fit([monitor(tmp_path)], data=data, strategy=strategy, logger=board, max_epochs=1)
    charts, logged, _ = charts_and_tags(board)
    named = {n for c in charts for s in c.margin.series for n in (s.value, s.lower, s.upper)}
    limits = {"leakage/bound/auc", "leakage/bound/tpr_at_fpr_0.01"}
    assert named & limits == (limits if coins else set())
    # So few others show no rate yet.
    unknown = {f"leakage/{name}/shown" for name in ("combined", "loss")}
    assert named - logged == unknown | {f"{name}_low" for name in unknown}


def test_an_exposure_without_an_upper_end_is_a_line(tmp_path: Path) -> None:
    board, data = TensorBoardLogger(tmp_path), planted(times=(8,))
    fit([watch(data, tmp_path)], data=data, logger=board, max_epochs=1)
    charts, _, _ = charts_and_tags(board)
    [chart] = [chart for chart in charts if chart.title == "audit/canary_x8/exposure"]
    assert list(chart.multiline.tag) == ["^audit/canary_x8/exposure$"]
    assert "audit/canary_x8: AUC, 95% interval (0 to 1)" in {chart.title for chart in charts}
