"""Hidden states of a model that FSDP2 shards over two gloo processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import SECONDS, environment_of_own


@pytest.mark.ddp
def test_a_model_sharded_by_fsdp2_gathers_and_gives_back() -> None:
    worker = Path(__file__).with_name("fsdp2_worker.py")
    root = str(Path(__file__).parents[2])
    environment = environment_of_own(PYTHONPATH=root, MASTER_ADDR="127.0.0.1", WORLD_SIZE="2")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        answers = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [r.returncode for r in ranks] == [0, 0], answers[0][1][-3000:] + answers[1][1][-3000:]
    full, half = json.loads(answers[0][0].splitlines()[-1])
    assert full == {"worst": full["worst"], "quiet": True, "sharded": True, "same": [True, True]}
    assert half == {"worst": half["worst"], "quiet": True, "sharded": True, "same": [True, True]}
    assert full["worst"] < 1e-5
    assert 0 < half["worst"] < 0.1
