"""Two gloo processes: a loop of one's own and transformers' Trainer, watched and defended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import two_processes
from tests.trainers.test_watch import lines

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


def test_two_processes(tmp_path: Path) -> None:
    """What each process shares is its own gradient; training is bit-identical; gates agree."""
    ranks = two_processes("tests.trainers.ddp_worker", tmp_path)
    expected = {"loop": 1.0, "same": True, "steps": 2, "saved": True}
    assert ranks == [expected, expected]
    first = lines(tmp_path / "gate")[0]
    assert (first["client"], first["metrics"]["f1"]["value"]) == ("pooled", 1.0)


def test_two_processes_release_one_clipped_sum(tmp_path: Path) -> None:
    """Sums are those of the rows of both, each in one process; noise, weights and account agree."""
    for found in two_processes("tests.trainers.defended_ddp_worker", tmp_path):
        trainer, loop = found["trainer"], found["loop"]
        assert trainer["distance"] < 1e-6
        assert trainer["distance of adapters"] < 1e-6
        assert loop["distance"] < 1e-6
        assert trainer["releases"] == found["steps"] == 3
        assert trainer["resumed"] == [6, 4]
        assert trainer["epsilons"][0] == pytest.approx(trainer["epsilons"][1])
        assert 3.9 < trainer["epsilons"][0] <= 4.0
        for name in ("alike", "apart", "noisy alike", "resumed alike"):
            assert trainer[name], name
        assert loop["alike"]
        assert loop["apart"]
        assert "Wrap the model in DistributedDataParallel" in loop["refused"]
