"""Two gloo processes: a loop of one's own and transformers' Trainer, watched and defended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cases import of
from tests.helpers.processes import Found, two_processes
from tests.trainers.hosts import BATCH, N
from tests.trainers.test_watch import lines

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    """What each rank found, by case."""
    return two_processes("tests.trainers.ddp_worker", folder)


def test_each_process_shares_its_own_gradient_and_gates_agree(ranks, folder: Path) -> None:
    """Training is bit-identical too."""
    for found in of(ranks, "watched trainer"):
        assert found == {"same": True, "steps": 2, "saved": True}
    assert of(ranks, "watched loop") == [{"loop": 1.0}] * 2
    first = lines(folder / "watched-trainer" / "gate")[0]
    assert (first["client"], first["metrics"]["f1"]["value"]) == ("pooled", 1.0)


def test_two_processes_release_one_clipped_sum(ranks) -> None:
    """Sums are those of the rows of both, each in one process; noise, weights and account agree."""
    pairs = zip(of(ranks, "defended trainer"), of(ranks, "defended loop"), strict=True)
    for trainer, loop in pairs:
        assert trainer["distance"] < 1e-6
        assert trainer["distance of adapters"] < 1e-6
        assert loop["distance"] < 1e-6
        assert trainer["releases"] == N // (2 * BATCH) == 3
        assert trainer["resumed"] == [6, 4]
        assert trainer["epsilons"][0] == pytest.approx(trainer["epsilons"][1])
        assert 3.9 < trainer["epsilons"][0] <= 4.0
        for name in ("alike", "apart", "noisy alike", "resumed alike"):
            assert trainer[name], name
        assert loop["alike"]
        assert loop["apart"]
        assert "Wrap the model in DistributedDataParallel" in loop["refused"]
