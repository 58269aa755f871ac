"""A gate that turns defences up on two gloo processes: the cases of harden_ddp_worker.py."""

from __future__ import annotations

import pytest

from tests.helpers.cases import of
from tests.helpers.processes import launched

pytestmark = [pytest.mark.ddp, pytest.mark.slow]
HEAD = "model.lm_head.weight"


ranks = launched("tests.callbacks.harden_ddp_worker")


TWO_NOTCHES = [f"{d} {c}" for d in ("noise", "dpsgd") for c in ("rank", "world")]
ONE_NOTCH = ["freeze rank", "both rank"]


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_every_rank_is_turned_up_at_the_same_steps_and_then_stops(ranks, name: str) -> None:
    most = 1 if name in ONE_NOTCH else 2
    defenses = 2 if name.startswith("both") else 1
    for found in of(ranks, name):
        assert found["seen"] == [[step, [step] * defenses] for step in range(most + 1)]
        assert found["steps"] == found["looks"] == most + 1
        assert (found["notches"], found["unknown"], found["saved"]) == (most, 0, 1)


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_weights_stay_equal_between_ranks(ranks, name: str) -> None:
    for found in of(ranks, name):
        assert found["equal"]
        assert found["resumed equal"]


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_the_gate_is_logged_once_for_all_ranks(ranks, name: str) -> None:
    first, second = of(ranks, name)
    steps = list(range(first["steps"]))
    assert first["fired"] == steps
    assert first["rows"] == len(steps)
    most = first["notches"]
    assert first["noted"] == [[step, min(step + 1.0, most)] for step in steps]
    assert second["rows"] == 0


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_a_resumed_run_keeps_the_notches_on_every_rank(ranks, name: str) -> None:
    for found in of(ranks, name):
        most = found["notches"]
        assert [step for step, _ in found["resumed"]] == list(range(most + 1, most + 7))
        assert all(set(notches) == {most} for _, notches in found["resumed"])
        assert (found["resumed notches"], found["resumed failures"]) == (most, 0)


@pytest.mark.parametrize("name", [*TWO_NOTCHES, *ONE_NOTCH])
def test_what_was_frozen_stays_where_it_was_and_all_else_trains_on(ranks, name: str) -> None:
    for found in of(ranks, name):
        assert found["still"] == ([HEAD] if name in ONE_NOTCH else [])
        assert found["exposed"] == (0 if name in ONE_NOTCH else 1)


def test_the_first_process_decides_for_all(ranks) -> None:
    first, second = of(ranks, "one decides")
    assert first["own"] != second["own"]
    assert first["value"] == second["value"]
    assert first["seen"] == second["seen"] == [[s, [s // 2]] for s in range(6)]


@pytest.mark.parametrize("name", ["freeze", "both"])
def test_freezing_in_mid_run_is_refused_where_a_reducer_would_wait(ranks, name: str) -> None:
    for found in of(ranks, "refused"):
        assert "cannot freeze in the middle of a run of one client under DDP" in found[name]
        assert "Use DefendedStrategy(client='rank'), or Freeze(when='always')" in found[name]
