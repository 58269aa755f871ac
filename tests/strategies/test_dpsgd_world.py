"""DPSGD where two gloo processes are one client: under DDP and FSDP2, in one launch."""

from typing import Any

import pytest

from tests.helpers.cases import of
from tests.helpers.processes import Found, launched

pytestmark = [pytest.mark.slow, pytest.mark.ddp]
MODELS = ("gpt2 tied", "gpt2 untied", "llama", "lora", "experts", "one by one")
SHARDED = ("own model", "whole module", "leaves", "checkpointed", "replicated")
BOTH = ("ddp", "fsdp2")
EXACT = [
    *((strategy, f"exact {name}", 1e-6, 3) for strategy in BOTH for name in MODELS),
    *(("fsdp2", f"exact {name}", 1e-6, 3) for name in SHARDED),
    ("ddp", "exact static_graph", 1e-6, 3),
    ("fsdp2", "exact MixedPrecisionPolicy", 2e-2, 3),
    *((s, f"bf16-mixed {name}", 2e-2, 2) for s in BOTH for name in ("gpt2 tied", "lora")),
]

both = launched("tests.strategies.dpsgd_world_worker")


def under(strategy: str, both: list[Found]) -> list[Found]:
    """The cases under one strategy, and the one that broke the launch off."""
    start = f"{strategy} "
    return [
        {
            name.removeprefix(start): found
            for name, found in rank.items()
            if name.startswith(start) or "error" in found
        }
        for rank in both
    ]


@pytest.fixture(scope="module")
def ddp(both: list[Found]) -> list[Found]:
    return under("ddp", both)


@pytest.fixture(scope="module")
def fsdp2(both: list[Found]) -> list[Found]:
    return under("fsdp2", both)


@pytest.fixture(params=BOTH)
def ranks(request: pytest.FixtureRequest) -> list[Found]:
    """What each rank found, by case."""
    found: list[Found] = request.getfixturevalue(request.param)
    return found


def check_exact(found: dict[str, Any], most: float, releases: int = 3) -> None:
    assert found["distance"] < most
    assert found["undefended"] > 0.1
    assert found["longest"] > 1.5
    assert found["releases"] == releases
    assert found["rate"] == pytest.approx(4 / 12)
    for fact in ("aggregate", "agree", "masks differ"):
        assert found[fact], fact


@pytest.mark.parametrize(("strategy", "name", "most", "releases"), EXACT)
def test_the_client_shares_the_clipped_sum(request, strategy, name, most, releases) -> None:
    for found in of(request.getfixturevalue(strategy), name):
        check_exact(found, most, releases)


@pytest.mark.parametrize(
    ("strategy", "name", "releases"),
    [
        *((s, "gpt2 tied", 3) for s in BOTH),
        *((s, "lora", 2) for s in BOTH),
        ("ddp", "static_graph", 2),
        ("fsdp2", "replicated", 2),
    ],
)
def test_the_same_of_logical_batches_in_equally_many_pieces(request, strategy, name, releases):
    for found in of(request.getfixturevalue(strategy), f"pieces {name}"):
        check_exact(found, 1e-6, releases)
        first, second = found["ran"]
        steps = [*zip(*found["drawn"], strict=True)]
        assert len(first) == len(second) == sum(max(-(-a // 2), -(-b // 2)) for a, b in steps)
        assert max(first + second) == 2


def test_a_rank_with_fewer_pieces_or_none_takes_part(ranks) -> None:
    for found in of(ranks, "rare pieces"):
        assert found["distance"] < 1e-6
        assert found["one empty"] > 0
        assert found["steps"] == [10, 10, found["pieces"]]
        assert found["pieces"] > 10
        assert found["agree"]


def test_users_are_clipped_with_all_of_their_rows(ranks) -> None:
    for found in of(ranks, "users"):
        assert found["distance"] < 1e-6
        assert found["rate"] == 2 / 4
        assert found["agree"]
        assert found["releases"] == 2
        assert max(map(max, found["drawn"])) > 6
        assert len(found["ran"][0]) == len(found["ran"][1]) > 3


@pytest.mark.parametrize(
    ("strategy", "name", "shards"),
    [("ddp", "noise", 1.0), ("fsdp2", "noise", 0.0), ("fsdp2", "noise replicated", 1.0)],
)
def test_one_noise_is_added_whoever_holds_the_weights(request, strategy, name, shards) -> None:
    for found in of(request.getfixturevalue(strategy), name):
        assert found["coordinates"] > 150_000
        assert found["std"] == pytest.approx([1.0, 1.0], rel=0.01)
        assert found["shards"] == pytest.approx(shards, abs=0.02)
        assert abs(found["steps"]) < 0.02
        assert found["measured"] == pytest.approx(50.0, rel=0.02)
        assert found["isolation"] == (strategy == "ddp")  # FSDP2's guarantee says that it is not
        assert found["same on both"]
        assert found["agree"]
        assert found["epsilon"] == pytest.approx([found["of one process"]] * 2, rel=1e-12)


def test_a_rank_without_samples_takes_part_and_adds_nothing(ranks) -> None:
    for found in of(ranks, "rare"):
        assert found["distance"] < 1e-6
        assert found["one empty"] > 0
        assert found["both empty"] > 0
        assert found["released nothing"]
        assert found["steps"] == [10, 10, 10]
        assert found["agree"]


def test_what_cannot_stand_in_for_an_empty_batch_is_refused_by_all(ranks) -> None:
    first, second = of(ranks, "no stand-in")
    assert first["message"] == "process 1 of this client refused: the file is gone"
    assert second["message"] == "the file is gone"


def test_resume_with_one_ledger_forgets_nothing_and_repeats_no_noise(ranks) -> None:
    for found in of(ranks, "resume"):
        assert found["counted"] == [3, 8]  # two of them were lost by the checkpoint
        assert (found["releases"], found["steps"]) == (6, 6)
        assert (found["lines"], found["files"]) == (8, ["ledger"])
        assert found["alike"] < 0.1
        assert found["epsilon"][0] == found["epsilon"][1]
        assert found["agree"]


REFUSED = {
    "buffer": "training_step changed the buffer 'counter'",
    "none": "training_step returned no loss",
    "sum": "not known to be a mean of per-sample means",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_all_refuse(ranks, name: str) -> None:
    first, second = of(ranks, f"refused {name}")
    assert first["message"].startswith("process 1 of this client refused: DPSGD: ")
    assert second["message"].startswith("DPSGD: ")
    for found in (first, second):
        assert REFUSED[name] in found["message"]
        assert found["releases"] == 1


def test_samples_of_one_rank_without_a_finite_gradient_stop_none(ranks) -> None:
    for found in of(ranks, "refused nan"):
        assert found["message"] == "nothing was refused"
        assert found["releases"] == 3
        assert found["finite"]


def test_gradients_that_one_rank_changes_and_samples_that_mix_are_refused(ranks) -> None:
    for found in of(ranks, "changed"):
        assert "is not the sum of its recorded per-sample gradients" in found["message"]
    for facts in of(ranks, "mixed"):
        # The check of isolation, which comes first, or that of the loss's graph.
        assert "of other samples" in facts["message"] or "other rows of a batch" in facts["message"]


def test_examples_that_two_processes_may_hold_are_refused(ddp) -> None:
    for found in of(ddp, "shares"):
        assert "needs use_distributed_sampler=True" in found["whole"]
        assert (
            "noise_multiplier differs between the client's processes, from 1.0 to 2.0"
            in found["apart"]
        )
        assert "by one seed in all processes" in found["shuffled"]


def test_noise_that_one_process_alone_turns_up_is_refused(ddp) -> None:
    for facts in of(ddp, "hardened apart"):
        assert (
            "noise_multiplier differs between the client's processes, from 20.0 to 40.0"
            in facts["message"]
        )
        assert facts["releases"] == 1


def test_tensor_parallelism_is_refused(fsdp2) -> None:
    for found in of(fsdp2, "refusals"):
        assert "tensor_parallel_size=1, data_parallel_size=" in found["tensor parallel"]
