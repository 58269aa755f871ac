"""Two gloo processes: what each client shares, pooled results, decisions that agree."""

import pytest
from sklearn.metrics import roc_auc_score

from tests.callbacks.ddp_worker import documents, first_rows
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.processes import launched

pytestmark = pytest.mark.ddp


ranks = launched("tests.callbacks.ddp_worker")


def test_training_is_bit_identical(ranks):
    for rank in ranks:
        assert rank["same"]
        looks, steps, failures = rank["looks"]
        assert looks == steps > 0
        assert failures == 0


@pytest.mark.parametrize("case", ["plain", "world"])
def test_each_stage_holds_the_gradient_computed_by_hand(ranks, case):
    assert all(rank[f"seen/{case}"] for rank in ranks)
    assert ranks[0][f"values/{case}"] == ranks[1][f"values/{case}"]


@pytest.mark.parametrize("client", ["rank", "world"])
@pytest.mark.parametrize(("precision", "at_most"), [("32-true", 1e-5), ("bf16-mixed", 0.02)])
def test_of_an_untouched_step_little_is_unexplained(ranks, client, precision, at_most):
    for rank in ranks:
        assert rank[f"unexplained/{client}/{precision}"] <= at_most


def types_of(rows):
    data = random_token_loader(16).dataset
    return {int(t) for i in rows for t in data[i]["labels"][1:]}


def test_rank_clients_are_pooled_and_a_world_client_is_one(ranks):
    first = [first_rows(r) for r in (0, 1)]
    each = sum(len(types_of(rows)) for rows in first)
    together = len(types_of(first[0] + first[1]))
    assert ranks[0]["line/plain"] == ["pooled", each]
    assert ranks[0]["line/world"] == [0, together]
    assert together < each


def test_texts_packed_in_a_row_count_as_each_clients_own(ranks):
    texts = documents()
    each = [[texts[i]["input_ids"].tolist() for i in first_rows(rank)] for rank in (0, 1)]
    labels = [len({token for text in rows for token in text[1:]}) for rows in each]
    assert ranks[0]["packed"]["n"] == {"probe": ["pooled", sum(labels)]}
    for rank in ranks:
        assert rank["packed"]["same"]
        assert rank["packed"]["failures"] == 0
        assert rank["packed"]["auc"] > 0.9


def test_with_a_defence_the_server_gets_the_mean_of_what_was_shared(ranks):
    assert all(rank["defended local"] and rank["defended aggregate"] for rank in ranks)


def test_a_failure_on_one_client_is_unknown_on_all_and_nobody_waits(ranks):
    for rank in ranks:
        assert rank["failing"]["finished"] == 2
        assert rank["failing"]["failures"] == 1
        assert rank["failing"]["unknown"]


@pytest.mark.parametrize("client", ["rank", "world"])
def test_a_batch_that_one_client_cannot_read_is_unknown_on_all(ranks, client):
    for rank in ranks:
        assert rank[f"unreadable/{client}"] == [2, 2, 1]


def test_a_first_batch_that_one_client_cannot_read_is_refused_on_all(ranks):
    assert [rank["first"] for rank in ranks] == ["BatchError", "FailsThere"]


def test_the_worst_client_is_logged_beside_the_pooled_value_on_the_first_process_alone(ranks):
    first, second = (dict(rank["failing"]) for rank in ranks)
    assert first.pop("worst") > first["pooled"] > 0
    assert second.pop("worst") is None
    assert [part.pop("worst in metrics") for part in (first, second)] == [True, False]
    assert first == second


def test_a_gate_on_the_worst_client_stops_everywhere_at_once_and_saves(ranks):
    steps, value, saved = ranks[0]["gate worst"]
    assert (steps, saved) == (1, True)
    assert value == ranks[0]["failing"]["worst"]
    assert ranks[1]["gate worst"] == [steps, value, True]


def test_a_cadence_by_cost_agrees_over_ranks(ranks):
    assert ranks[0]["overhead looks"] == ranks[1]["overhead looks"]


def told_to_all(values):
    """Return what process 0 tells the others: the worst client and the likeliest are its alone."""
    ends = ("_worst_client", "/p_of_this_look", "/p_over_looks")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


def test_each_client_plays_its_own_games_and_training_is_the_same(ranks):
    first, second = (rank["games"] for rank in ranks)
    assert first["same"]
    assert second["same"]
    assert (first["looks"], first["failures"]) == (4, 1)
    assert first["clients"] == [0, 1]
    for part in ("looks", "failures"):
        assert first[part] == second[part]
    assert second["values"] == told_to_all(first["values"])


def test_what_one_client_gave_away_goes_to_the_first_process_alone(ranks):
    first, second = (rank["games"] for rank in ranks)
    assert first["gathered"] == second["gathered"] == []
    assert second["games"] == second["clients"] == []
    first, second = (rank["games again"] for rank in ranks)
    assert (first["steps"], first["looks"]) == (second["steps"], second["looks"]) == (8, 8)
    assert first["first"]
    assert first["games"] > 3 * 2 * 8
    assert second["games"] == 0


def test_games_are_pooled_over_clients_and_the_worst_client_is_logged(ranks):
    found = ranks[0]["games"]
    look, client, score, member, _ = zip(*found["games"], strict=True)
    assert len(look) == 3 * 2 * 8
    for at in range(3):
        for c in (0, 1):
            bits = [m for a, k, m in zip(look, client, member, strict=True) if (a, k) == (at, c)]
            assert sorted(bits) == [0] * 4 + [1] * 4
    assert any(s for s, c in zip(score, client, strict=True) if c == 0)
    assert not any(s for s, c in zip(score, client, strict=True) if c == 1)
    values = found["values"]
    pooled = roc_auc_score(member, score)
    assert float(values["leakage/blind_on_one/auc"]) == pytest.approx(pooled)
    assert pooled < 1
    assert float(values["leakage/blind_on_one/auc_worst_client"]) == 1
    assert float(values["leakage/games_fail_on_one/auc"]) == 1
