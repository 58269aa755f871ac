"""ZeRO-1, 2 and 3 on two gloo processes: the cases of worker.py."""

import pytest

from tests.helpers.cases import of
from tests.helpers.processes import launched

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.ddp


ranks = launched("tests.deepspeed.worker")


def test_a_trainer_shares_the_clipped_mean_and_is_not_disturbed(ranks) -> None:
    for found in of(ranks, "trainers"):
        assert len(found) == 10
        for name, case in found.items():
            assert case.pop("distance") < (5e-7 if "tied" in name else 3e-7), name
            assert case.pop("flatchat") > (0.9 if "tied" in name else 0.95), name
            assert min(case.pop("controls")) > 0.95, name
            assert case == {
                "same": True, "lowest": 1.0, "clipped": True, "distinct": True, "looks": 3,
                "f1": 1.0, "strategy": f"Recorded under ZeRO-{name[0]}",
            }, name  # fmt: skip


def test_words_of_both_processes_are_read_off_a_lora(ranks) -> None:
    for found in of(ranks, "lora"):
        assert found == {stage: {"same": True, "lowest": 1.0} for stage in "23"}


def test_words_are_read_in_bfloat16(ranks) -> None:
    for found in of(ranks, "mixed precision"):
        assert len(found) == 4
        for name, case in found.items():
            assert case["lowest"] > 0.95, name
            assert case["control"] > 0.7, name  # the lowest of three, since words are few
            assert case["facts"] == "parameters in bfloat16, gradients reduced in bfloat16"


def test_a_step_without_a_look_has_no_collective_more_and_a_look_what_it_reads(ranks) -> None:
    for found in of(ranks, "collectives"):
        declared = found.pop("declared")
        assert found.keys() == {"1", "2", "3"}
        for counts in found.values():
            plain, watched = counts["plain"], counts["watched"]
            # Under ZeRO-3 a control's call has shown the order of layers one step earlier.
            assert all(watched[step] <= plain[step] for step in (1, 3))
            assert all(watched[step] > plain[step] > 0 for step in (0, 2, 4))
            assert counts["f1"] == 1
            assert [counts["brought"][step] for step in (1, 3)] == [0, 0]
            assert all(0 < counts["brought"][step] <= 1.1 * declared for step in (0, 2, 4))


def test_attacks_choose_themselves(ranks) -> None:
    for found in of(ranks, "attacks choose themselves"):
        played = {name.split("/")[1] for name in found}
        assert {"aligned_flatchat", "bag_of_words", "subspace_words"} <= played
        assert not {name for name in played if "membership" in name}
        assert found["leakage/worst/words"] == 1.0


def test_a_gate_stops_both_processes_at_one_step(ranks) -> None:
    for found in of(ranks, "gate"):
        assert found == {"steps": 2, "saved": True}


def test_a_resumed_trainer_goes_on_as_one_that_was_not_stopped(ranks) -> None:
    for found in of(ranks, "resumed"):
        assert found == {"same": True, "steps": [0, 1, 2, 3], "f1": 1.0}


def test_trained_weights_are_asked_where_they_are_sharded(ranks) -> None:
    for found in of(ranks, "weights"):
        assert found["same"]
        assert 0 <= found["auc"] <= 1
        assert found["looks"][-1] == 12


def test_words_are_read_in_a_loop_by_accelerate_and_by_an_engine(ranks) -> None:
    for found in of(ranks, "loops"):
        assert all(value in (None, 1.0) for value in found.pop("zeroed")["f1"])
        assert len(found) == 3
        for name, case in found.items():
            strategy = f"ZeRO-{name[0]}"
            assert case == {"same": True, "lowest": 1.0, "looks": 3, "strategy": strategy}, name


def test_what_cannot_be_told_or_is_not_tested_is_refused_with_its_name(ranks) -> None:
    for found in of(ranks, "refused"):
        assert "LeakageCallback: ZeRO-2 reduces" in found.pop("rank")
        assert "plays membership games, which need whole layers" in found.pop("membership")
        assert "'stage': 0" in found.pop("stage")
        assert "pass the engine that deepspeed.initialize" in found.pop("inner")
        assert len(found) == 10
        assert all(name in message for name, message in found.items())
