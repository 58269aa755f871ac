"""Two gloo processes, started by torchrun: a loop of one's own, and transformers' Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, SECONDS, environment_of_own, free_port
from tests.trainers.test_watch import lines

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


def test_two_processes(tmp_path: Path) -> None:
    """What each process shares is its own gradient; training is bit-identical; gates agree."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    worker = ["-m", "tests.trainers.ddp_worker", str(tmp_path)]
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
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    expected = {"loop": 1.0, "same": True, "steps": 2, "saved": True}
    assert ranks == [expected, expected]
    first = lines(tmp_path / "gate")[0]
    assert (first["client"], first["metrics"]["f1"]["value"]) == ("pooled", 1.0)
