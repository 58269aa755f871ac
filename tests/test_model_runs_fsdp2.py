"""Hidden states of a model that FSDP2 shards over two gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import two_processes


@pytest.mark.ddp
def test_a_model_sharded_by_fsdp2_gathers_and_gives_back(tmp_path: Path) -> None:
    for found in two_processes("tests.model_runs_fsdp2_worker", tmp_path):
        for policy in ("full", "half"):
            facts = ("quiet", "sharded", "same", "same again")
            assert all(found[policy][fact] for fact in facts), policy
        assert found["full"]["worst"] < 1e-5
        assert 0 < found["half"]["worst"] < 0.1
        # A sum of the rows that each process has, and no gathering of the matrix.
        assert found["rows"] == {"same": True, "collectives": {"c10d_functional.all_reduce": 1}}
