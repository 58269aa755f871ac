"""Two processes by torchrun are one client: transformers' Trainer, and a loop of one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, SECONDS, environment_of_own, free_port

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


def test_two_processes_release_one_clipped_sum(tmp_path: Path) -> None:
    """Sums are those of the rows of both, each in one process; noise, weights and account agree."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    worker = ["-m", "tests.trainers.defended_ddp_worker", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *launch, str(free_port()), *worker],
        cwd=ROOT,
        env=environment_of_own(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        trainer, loop = found["trainer"], found["loop"]
        assert trainer["distance"] < 1e-6
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
