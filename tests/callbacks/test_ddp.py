"""Two gloo processes: what each client shares, pooled results, decisions that agree."""

import math

import pytest
from sklearn.metrics import roc_auc_score

from tests.callbacks.ddp_worker import documents, first_rows
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.processes import two_processes

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_processes("tests.callbacks.ddp_worker", tmp_path_factory.mktemp("ddp"))


def known_to_all(values):
    """Return what process 0 sends on: the worst client and the likeliest are its alone."""
    ends = ("_worst_client", "/p_of_this_look", "/p_over_looks")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


def test_training_is_bit_identical(ranks):
    for rank in ranks:
        assert rank["bits"] == [True, True, 0]


@pytest.mark.parametrize("client", ["rank", "world"])
def test_each_stage_holds_the_gradient_computed_by_hand(ranks, client):
    first, second = (rank["gradients"][client] for rank in ranks)
    assert first["close"]
    assert second["close"]
    assert first["recall"] == second["recall"]


def test_with_a_defence_the_server_gets_the_mean_of_what_was_shared(ranks):
    assert all(rank["gradients"]["defended"] for rank in ranks)


def test_rank_clients_are_pooled_and_a_world_client_is_one(ranks):
    data = random_token_loader(16).dataset
    types = [{int(t) for i in first_rows(r) for t in data[i]["labels"][1:]} for r in (0, 1)]
    each, together = sum(map(len, types)), len(types[0] | types[1])
    gradients = ranks[0]["gradients"]
    assert gradients["rank"]["line"] == ["pooled", each]
    assert gradients["world"]["line"] == [0, together]
    assert together < each


def test_texts_packed_in_a_row_count_as_each_clients_own(ranks):
    texts = documents()
    each = [[texts[i]["input_ids"].tolist() for i in first_rows(rank)] for rank in (0, 1)]
    labels = [len({token for text in rows for token in text[1:]}) for rows in each]
    assert ranks[0]["packed"]["line"] == ["probe", "pooled", sum(labels)]
    for rank in ranks:
        assert rank["packed"]["same"]
        assert rank["packed"]["failures"] == 0
        assert rank["packed"]["auc"] > 0.9


def test_a_failure_on_one_client_is_unknown_on_all_and_nobody_waits(ranks):
    first, second = (dict(rank["failing"]) for rank in ranks)
    assert (first["finished"], first["failures"], first["unknown"]) == (2, 1, True)
    assert first.pop("worst") > first["pooled"] > 0
    assert second.pop("worst") is None  # it is known to the first process alone
    assert [part.pop("worst in metrics") for part in (first, second)] == [True, False]
    assert first == second


def test_a_batch_that_one_client_cannot_read_is_unknown_on_all(ranks):
    for rank in ranks:
        assert rank["unreadable/rank"] == [2, 2, 1]
        assert rank["unreadable/world"] == [2, 2, 2]
    assert [rank["first"] for rank in ranks] == ["BatchError", "FailsThere"]


def test_a_gate_on_the_worst_client_stops_everywhere_at_once_and_saves(ranks):
    worst = ranks[0]["failing"]["worst"]
    assert [rank["gate"] for rank in ranks] == [[1, 0, worst, True]] * 2


def test_a_cadence_by_cost_agrees_over_ranks(ranks):
    assert ranks[0]["overhead"] == ranks[1]["overhead"]


def test_both_packages_of_lightning_defend_measure_and_stop_alike(ranks):
    for rank in ranks:
        lightning, pytorch_lightning = (
            dict(rank["either package"][name])
            for name in ("lightning.pytorch", "pytorch_lightning")
        )
        assert lightning.pop("strategy") == "lightning.pytorch.strategies.ddp"
        assert pytorch_lightning.pop("strategy") == "pytorch_lightning.strategies.ddp"
        assert (lightning["steps"], lightning["saved"]) == (2, True)
        assert lightning["values"]["leakage/probe/recall"] > 0
        assert pytorch_lightning == lightning
    first, second = (rank["either package"]["lightning.pytorch"] for rank in ranks)
    assert second == {**first, "values": known_to_all(first["values"])}


def test_each_client_plays_its_own_games_and_what_it_leaks_goes_to_process_0_alone(ranks):
    first, second = (rank["games"] for rank in ranks)
    assert first["same"]
    assert second["same"]
    assert (first["looks"], first["failures"]) == (second["looks"], second["failures"]) == (4, 1)
    assert first["gathered"] == second["gathered"] == []
    assert second["values"] == known_to_all(first["values"])
    assert second["games"] == []
    assert first["again"] == second["again"] == [8, 8]
    assert first["first"]
    assert first["more"] > len(first["games"])
    assert second["more"] == 0


def test_games_are_pooled_over_clients_and_the_worst_client_is_logged(ranks):
    result = ranks[0]["games"]
    look, client, score, member, _ = zip(*result["games"], strict=True)
    assert len(look) == 3 * 2 * 8
    for at in range(3):
        for c in (0, 1):
            bits = [m for a, k, m in zip(look, client, member, strict=True) if (a, k) == (at, c)]
            assert sorted(bits) == [0] * 4 + [1] * 4
    assert any(s for s, c in zip(score, client, strict=True) if c == 0)
    assert not any(s for s, c in zip(score, client, strict=True) if c == 1)
    pooled = roc_auc_score(member, score)
    values = {name: float(value) for name, value in result["values"].items()}
    assert values["leakage/blind_on_one/auc"] == pytest.approx(pooled)
    assert pooled < 1
    assert values["leakage/blind_on_one/auc_worst_client"] == 1
    assert values["leakage/games_fail_on_one/auc"] == 1


def test_texts_of_every_process_are_pooled_and_training_is_the_same(ranks):
    first, second = (rank["inversion"] for rank in ranks)
    assert first["same"]
    assert second["same"]
    assert (first["looks"], first["failures"]) == (2, 2)
    assert second["values"] == known_to_all(first["values"])
    values = {name: float(value) for name, value in first["values"].items()}
    assert (first["line"]["attack"], first["line"]["n"]) == ("reads_one", 6)
    accuracy = values["leakage/reads_one/token_accuracy"]
    assert 0.3 < accuracy <= 0.5
    assert math.isnan(values["leakage/reads_fail_on_one/token_accuracy"])
    worst = values["leakage/reads_one/token_accuracy_worst_client"]
    assert worst == pytest.approx(2 * accuracy)
