"""DefendedStrategy over FSDP2 on two gloo processes: the cases of fsdp2_worker.py, one launch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats

from tests.helpers.cases import of
from tests.helpers.processes import launched

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


ranks = launched("tests.strategies.fsdp2_worker", gpus=True)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("accumulation and clipping", 2), ("manual", 6)],
)
def test_without_defences_it_is_the_plain_strategy(ranks, name: str, steps: int) -> None:
    stages = ["aggregate", "local", "shared"]
    for found in of(ranks, f"identity {name}"):
        assert found == {"same": True, "stages": stages, "sharded": True, "steps": steps}


def test_one_client_shares_the_reduced_gradient_with_noise_of_every_shards_own(ranks) -> None:
    for found in of(ranks, "noise accumulated"):
        assert found["local"] < 1e-5
        n = found["coordinates"]
        low, high = scipy.stats.chi2.ppf([1e-9, 1 - 1e-9], n)
        assert low < n * found["noise mean square"] < high
        assert abs(found["correlation of shards"]) < 0.35  # about 0.55 if shards got the same noise
        assert found["releases"] == 3
        for fact in ("one update", "aggregate is shared", "finite"):
            assert found[fact], fact


def test_activation_noise_differs_between_the_processes_of_one_client(ranks) -> None:
    for facts in of(ranks, "activation noise"):
        assert facts["std"] == pytest.approx(1.0, abs=0.2)
        assert facts["coordinates"] == 48 * 16
        assert abs(facts["correlation"]) < 0.4  # 1 if both processes drew the same


def test_resume_restores_defences_and_making_optimizer_state_is_no_release(ranks) -> None:
    expected: dict[str, Any] = {
        "saved": {"gradient_noise": {"notches": 0, "releases": 3, "spent": math.inf}},
        "same": True,
        "releases": 6,
        "steps": 6,
        "taps": 9,
    }
    for found in of(ranks, "resume"):
        assert found == {"folder": expected, "file": expected}


def test_refusals_when_the_model_is_known(ranks) -> None:
    for found in of(ranks, "refused"):
        assert "embedding.weight, head.weight, head.bias is not sharded" in found["partly"]
        assert "cannot act under tensor parallelism" in found["layers"]
        assert found["nan, clipped"] == "nothing was refused"
        assert "norm is not finite; nothing was released" in found["nan"]


def test_norm_and_numbers_of_shards(ranks) -> None:
    first, second = of(ranks, "shards")
    assert first["norm"] == second["norm"] == pytest.approx(1.0, rel=1e-6)
    assert (first["numbers"], second["numbers"]) == ([0, 0, 0], [1, 0, 0])
    assert (first["grid"], second["grid"]) == ([0, 0, 0], [1, 0, 1])
