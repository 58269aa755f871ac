"""FSDP2 on two gloo processes, without Lightning: the cases of fsdp2_worker.py."""

import pytest

from tests.helpers.cases import of
from tests.helpers.processes import launched

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


ranks = launched("tests.trainers.fsdp2_worker")


def test_a_loop_shares_the_clipped_mean_and_is_not_disturbed(ranks) -> None:
    for found in of(ranks, "own loop"):
        assert found.pop("distance") < 3e-7
        assert found == {
            "same": True, "named": True, "clipped": True, "f1": 1.0, "client": 0,
            "strategy": "FSDP2",
        }  # fmt: skip


def test_a_step_without_a_look_has_no_collective_more(ranks) -> None:
    for found in of(ranks, "collectives"):
        plain, watched = found["plain"], found["watched"]
        assert plain[0] > 0
        assert watched[1] == plain[1]
        assert watched[0] > plain[0] < watched[2]


def test_a_control_that_fails_on_one_process_is_unknown_on_both_and_nobody_waits(ranks) -> None:
    for found in of(ranks, "control fails on one"):
        assert found == {"same": True, "controls": [None, None, None]}


def test_parts_are_gathered_where_an_embedding_gives_its_weight(ranks) -> None:
    for found in of(ranks, "embedding's own weight"):
        assert found == {"rows": True, "norm": True}


def test_words_are_read_in_the_dtypes_of_the_policy(ranks) -> None:
    for found in of(ranks, "mixed precision"):
        assert len(found) == 9
        for name, case in found.items():
            assert case["f1"] > 0.95, name
            assert case["control"] > 0.7, name  # the lowest of three, since words are few
            assert case["certified"] == 0, name
        reduced = "parameters in bfloat16, gradients reduced in float32"
        assert found["reduced in float32, lora"]["facts"] == reduced


def test_what_is_not_tested_is_refused_with_what_to_do(ranks) -> None:
    for found in of(ranks, "refused"):
        assert "pass client='world'" in found["rank"]
        assert "one mesh of one dimension" in found["hybrid"]
        assert "'model.embed_tokens.weight'" in found["partly"]
        assert "use bfloat16" in found["half"]
        assert "without ignored_params" in found["ignored"]


def test_words_of_both_processes_are_read_under_a_trainer(ranks) -> None:
    for found in of(ranks, "trainers"):
        assert len(found) == 8
        for name, case in found.items():
            assert case.pop("lowest") > (0.95 if "bf16" in name else 0.999), name
            assert case == {"same": True, "distinct": True, "looks": 3, "f1": 1.0}, name


def test_attacks_choose_themselves_under_a_trainer(ranks) -> None:
    for found in of(ranks, "trainer's attacks choose themselves"):
        for values in found.values():
            played = {name.split("/")[1] for name in values}
            assert {"aligned_flatchat", "bag_of_words", "subspace_words"} <= played
            assert not {name for name in played if "membership" in name}
            assert values["leakage/worst/words"] == 1.0


def test_attacks_on_a_lora_choose_themselves_without_the_whole_model(ranks) -> None:
    for found in of(ranks, "attacks on a LoRA choose themselves"):
        assert found == {"f1": 1.0, "whole": 0}


def test_a_resumed_trainer_goes_on_as_one_that_was_not_stopped(ranks) -> None:
    for found in of(ranks, "trainer saves and resumes"):
        assert found == {"same": True, "steps": [0, 1, 2, 3], "f1": 1.0}


def test_a_gate_stops_both_processes_at_one_step(ranks) -> None:
    for found in of(ranks, "trainer's gate"):
        assert found == {"steps": 2, "saved": True}


def test_trained_weights_are_asked_under_a_trainer(ranks) -> None:
    for found in of(ranks, "trainer's weights"):
        assert found["same"]
        assert 0 <= found["auc"] <= 1
        assert found["looks"][-1] == 12


def test_what_shards_cannot_tell_is_refused_under_a_trainer(ranks) -> None:
    for found in of(ranks, "trainer refuses"):
        assert "LeakageCallback: FSDP2 reduces" in found["rank"]
        assert "pass client='world'" in found["rank"]
        assert "plays membership games, which need whole layers" in found["membership"]
