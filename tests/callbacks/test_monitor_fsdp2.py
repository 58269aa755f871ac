"""LeakageMonitor on a sharded run of two gloo processes: the cases of monitor_fsdp2_worker.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.processes import two_processes

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    return two_processes("tests.callbacks.monitor_fsdp2_worker", tmp_path_factory.mktemp("fsdp2"))


def of(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    for result in ranks:
        assert "error" not in result[name], result[name]["error"]
    return [result[name] for result in ranks]


def compared(values):
    """Return the values of a look that all processes have, and that are not of shuffled words."""
    ends = ("/control", "/control_of_a_part", "/p_of_this_look", "/p_over_looks")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


def test_every_look_is_what_one_process_logs_on_all_texts(ranks) -> None:
    for result in of(ranks, "values clipped"):
        sharded, single = result["sharded"], result["single"]
        assert sharded["failures"] == single["failures"] == 0
        assert len(sharded["looks"]) == len(single["looks"]) == 3
        for looks in zip(sharded["looks"], single["looks"], strict=True):
            mine, reference = map(compared, looks)
            assert mine.keys() == reference.keys()
            for prefix in ("leakage", "leakage_local"):
                assert float(mine[f"{prefix}/flatchat/f1"]) > 0.3
                assert float(mine[f"{prefix}/prefix_inversion/token_accuracy"]) == 1
            for metric, value in mine.items():
                # Sums in another order change the last digits of what is taken for the number of
                # types, of which the metric is the small difference to the true one. The precision
                # of an attack that names nothing is NaN.
                is_count = metric.endswith("type_count_error")
                limits = {"abs": 1e-4, "rel": 0} if is_count else {"rel": 1e-12}
                other = pytest.approx(float(reference[metric]), nan_ok=True, **limits)
                assert float(value) == other, metric


def test_values_are_of_what_left_noise_and_all(ranks) -> None:
    for result in of(ranks, "values noised"):
        assert result["failures"] == 0
        assert result["noise"] > 1
        for stage in result["stages"].values():
            assert stage["logged"] == pytest.approx(stage["by hand"], abs=1e-12)
        assert result["stages"]["local"] != result["stages"]["shared"]


def test_attacks_choose_themselves(ranks) -> None:
    for result in of(ranks, "auto"):
        assert result["lora"] == {"played": ["subspace_words", "worst"], "worst": 1.0}
        assert {"aligned_flatchat", "subspace_words"} <= set(result["whole"]["played"])
        assert "subspace_membership" not in result["whole"]["played"]
        assert result["whole"]["worst"] == 1.0


def test_training_is_bit_identical(ranks) -> None:
    for result in of(ranks, "undisturbed"):
        assert result == {"same": True, "sharded": True, "steps": 3}


def test_a_failure_on_one_process_is_unknown_on_both_and_nobody_waits(ranks) -> None:
    for result in of(ranks, "fails on one"):
        unknown = {name for name, value in result["values"].items() if math.isnan(float(value))}
        assert unknown == {
            "leakage/fails_on_one/f1",
            "leakage/reads_fail_on_one/token_accuracy",
        }
        assert (result["steps"], result["failures"]) == (3, 6)
        assert len(result["values"]) > len(unknown)


def test_without_defences_it_is_what_one_process_finds_too(ranks) -> None:
    for result in of(ranks, "values undefended"):
        sharded, single = result["sharded"], result["single"]
        assert sharded["failures"] == single["failures"] == 0
        assert [len(looks) for looks in sharded["looks"]] == [3, 1]
        mine, reference = (
            [[compared(look) for look in looks] for looks in side["looks"]]
            for side in (sharded, single)
        )
        assert mine == reference
        assert all(float(looks[0]["leakage/flatchat/f1"]) > 0.3 for looks in sharded["looks"])


def test_a_gate_hardens_both_processes_and_a_resumed_run_stays_so(ranks) -> None:
    for result in of(ranks, "hardened"):
        first = {"notches": [2, 2], "steps": 3, "equal": True, "looks": 3}
        assert result == {"first": first, "resumed": first | {"steps": 6, "looks": 6}}
