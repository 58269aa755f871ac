"""DefendedStrategy on two gloo processes: the cases of ddp_worker.py, in one launch, and spawn."""

from __future__ import annotations

import pytest
import scipy.stats

from tests.helpers.cases import of
from tests.helpers.processes import Found, two_processes

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("ddp")
    return two_processes("tests.strategies.ddp_worker", folder, gpus=True)


@pytest.mark.parametrize("name", ["accumulation and clipping", "manual"])
def test_without_gradient_defences_it_is_plain_ddp(ranks, name: str) -> None:
    expected = {"same": True, "wrapped": True, "stages": ["aggregate"], "separates": False}
    for found in of(ranks, f"identity {name}"):
        assert found == expected


def test_a_defence_knows_its_client_and_its_share_of_the_clients_data(ranks) -> None:
    for rank, found in enumerate(of(ranks, "processes of one client")):
        assert found["rank"] == [rank, 0]
        assert found["world"] == [0, rank]
        assert found["world entropy alike"]
        assert not found["rank entropy alike"]


@pytest.mark.parametrize(("name", "steps"), [("clipping", 3), ("reducer settings", 1)])
def test_each_rank_is_a_client(ranks, name: str, steps: int) -> None:
    (control, _) = of(ranks, "control: plain DDP reduces")
    besides_gradients = control["all-reduces"] - control["steps"]
    for found in of(ranks, f"rank {name}"):
        assert found["steps"] == steps
        for stage in ("local", "shared", "aggregate"):
            assert found[stage] < 1e-5, stage
        assert found["ranks saw different data"]
        assert found["ranks share different updates"]
        assert found["ranks agree"]
        # Nothing is reduced but each shared gradient, once.
        assert found["all-reduces"] == found["parameters"] * steps + besides_gradients
        assert not found["wrapped"]
        assert found["separates"]


def test_all_ranks_are_one_client(ranks) -> None:
    for found in of(ranks, "world"):
        assert found["local"] < 1e-5
        n = found["coordinates"]
        low, high = scipy.stats.chi2.ppf([1e-9, 1 - 1e-9], n)
        assert low < n * found["noise mean square"] < high
        for fact in ("same noise", "aggregate is shared", "ranks agree", "wrapped", "separates"):
            assert found[fact], fact
