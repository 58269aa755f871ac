"""Two processes: canaries, what an account allows, and a file that one of them does not see."""

import math
from pathlib import Path

import pytest

from lightning_fedleak.defenses.accounting.accounting import curve_of
from lightning_fedleak.evaluation.auditing import curve_auc
from tests.engine.channels.test_memorization import lines
from tests.helpers.processes import two_processes


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_know_the_same_of_canaries_and_of_an_account(tmp_path: Path) -> None:
    pair = two_processes("tests.engine.channels.shared_weights_worker", tmp_path)
    for name in ("canaries", "world", "lost"):
        first, second = (rank[name]["latest"] for rank in pair)
        assert first == pytest.approx(second, nan_ok=True)
    first, second = (rank["canaries"] for rank in pair)
    assert first["base"] == second["base"]
    assert len(first["base"]) == 90
    assert first["latest"]["audit/canary_x8/exposure"] > 1
    assert len(lines(tmp_path / "canaries", "canary_x8")) == 3
    # One client: half of each batch of 16 is on either process.
    world = pair[0]["world"]
    curve = curve_of([(1.0, 16 / 260, world["step"])], "prv")
    assert world["latest"]["leakage/bound/auc"] == pytest.approx(curve_auc(curve), rel=1e-3)
    assert world["latest"]["leakage/combined/refuted"] == 0
    assert math.isnan(pair[0]["lost"]["latest"]["leakage/combined/auc"])
    [line] = lines(tmp_path / "lost" / "resumed", "combined")
    assert "resumed without their file" in line["unknown"]
