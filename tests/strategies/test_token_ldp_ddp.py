"""TokenLDP on two gloo processes: who shares a replacement, for how long, and what leaves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import scipy.stats

from lightning_fedleak.defenses.token_ldp.mechanisms import grr_keep
from tests.helpers.models import VOCAB
from tests.helpers.processes import Found, two_processes
from tests.strategies.token_ldp_worker import BATCH, EPSILON, LENGTH, ROWS

pytestmark = pytest.mark.ddp

Row = tuple[int, ...]
BY_CHANCE = 1e-9
"""Nothing here is seeded: each right law is rejected so often."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("token_ldp")
    return two_processes("tests.strategies.token_ldp_worker", folder, gpus=True)


def of(ranks: list[Found], name: str) -> list[dict[str, Any]]:
    """One case on both ranks; fails with the traceback of the case that stopped a worker."""
    for found in ranks:
        if name not in found or "error" in found[name]:
            errors = [v["error"] for v in found.values() if "error" in v]
            pytest.fail("\n".join(errors) or f"{name} did not run")
    return [found[name] for found in ranks]


def pairs(found: dict[str, Any]) -> list[tuple[Row, Row]]:
    """True rows with what they were replaced by, in the order of training."""
    return [
        (tuple(true), tuple(seen)) for true, seen in zip(found["true"], found["seen"], strict=True)
    ]


def replacements(*found: dict[str, Any]) -> dict[Row, set[Row]]:
    """All replacements of each true row."""
    by_row: dict[Row, set[Row]] = defaultdict(set)
    for true, seen in (pair for one in found for pair in pairs(one)):
        by_row[true].add(seen)
    return by_row


def kept(found: list[tuple[Row, Row]]) -> list[bool]:
    """Word by word, whether it survived."""
    return [a == b for true, seen in found for a, b in zip(true, seen, strict=True)]


def independent(one: list[tuple[Row, Row]], other: list[tuple[Row, Row]]) -> bool:
    """Whether words survive in both as often as by independent draws of GRR, not more.

    Draws that are independent are taken for such ones but for ``BY_CHANCE``.
    """
    assert [true for true, _ in one] == [true for true, _ in other]
    both = sum(a and b for a, b in zip(kept(one), kept(other), strict=True))
    keep = grr_keep(VOCAB - 3, EPSILON)
    n = len(one) * LENGTH
    same = scipy.stats.binomtest(both, n, keep).pvalue
    return bool(scipy.stats.binomtest(both, n, keep**2).pvalue > BY_CHANCE > same)


CASES = ["rank memoised", "rank fresh", "rank shuffled"]
CASES += ["world memoised", "world fresh", "world shuffled"]


@pytest.mark.parametrize("name", CASES)
def test_words_survive_by_the_mechanisms_law_and_ranks_stay_equal(ranks, name: str) -> None:
    found = of(ranks, name)
    for one in found:
        # Shuffled rows may come twice, and those that are memoised are drawn once.
        survived = kept(sorted(set(pairs(one)[:ROWS])))
        law = grr_keep(VOCAB - 3, EPSILON)
        assert len(survived) >= ROWS // 2 * LENGTH
        assert scipy.stats.binomtest(sum(survived), len(survived), law).pvalue > BY_CHANCE
        assert len(one["seen"]) == 2 * ROWS
        assert one["labels are inputs"]
        assert one["ranks agree"]
        assert one["moved"]


def test_each_rank_is_a_client_with_replacements_of_its_own(ranks) -> None:
    first, second = of(ranks, "rank memoised")
    assert first["true"] == second["true"]
    assert independent(pairs(first)[:ROWS], pairs(second)[:ROWS])
    for found in (first, second):
        assert {len(seen) for seen in replacements(found).values()} == {1}
        assert found["seen"][:ROWS] == found["seen"][ROWS:]
        assert found["releases"] == 1
        assert found["epsilon"] == LENGTH * EPSILON


def test_a_row_that_moves_between_clients_is_released_by_each_once(ranks) -> None:
    first, second = of(ranks, "rank shuffled")
    moved = replacements(first).keys() & replacements(second).keys()
    assert len(moved) > ROWS // 4
    # Two clients replace one row alike with a chance of 7e-8: one of all rows may be, not two.
    assert sum(replacements(first)[row] == replacements(second)[row] for row in moved) <= 1
    for found in (first, second):
        assert {len(seen) for seen in replacements(found).values()} == {1}
        assert found["releases"] == 1


def test_all_ranks_of_one_client_share_a_rows_replacement(ranks) -> None:
    for name in ("world memoised", "world shuffled"):
        found = of(ranks, name)
        assert replacements(found[0]).keys() & replacements(found[1]).keys()
        assert {len(seen) for seen in replacements(*found).values()} == {1}
        assert [one["releases"] for one in found] == [1, 1]


@pytest.mark.parametrize("client", ["rank", "world"])
def test_without_memoisation_every_process_and_epoch_draws_apart(ranks, client: str) -> None:
    found = of(ranks, f"{client} fresh")
    draws = [half for one in found for half in (pairs(one)[:ROWS], pairs(one)[ROWS:])]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert independent(one, other)
    # Both processes hold all rows: those of one client release each of them twice as often.
    releases = 4 if client == "world" else 2
    for one in found:
        assert one["releases"] == releases
        assert one["epsilon"] == releases * LENGTH * EPSILON


@pytest.mark.parametrize("memoize", ["memoised", "fresh"])
def test_a_resumed_fit_draws_anew_and_counts_on(ranks, memoize: str) -> None:
    found = of(ranks, f"resume {memoize}")
    for one in found:
        before, after = one["before"], one["after"]
        assert len(after["seen"]) == ROWS
        assert independent(pairs(before), pairs(after))
        assert (before["releases"], after["releases"]) == (1, 2)
        assert after["epsilon"] == 2 * LENGTH * EPSILON
        assert after["ranks agree"]
        # Counts and costs alone: no secret from which the replacements would follow.
        counts = {"batches": ROWS // BATCH, "releases": 1, "longest": LENGTH}
        assert one["state"] == {**counts, "epsilon": LENGTH * EPSILON}
    assert independent(pairs(found[0]["after"]), pairs(found[1]["after"]))


def test_a_resumed_process_remembers_what_only_it_released(ranks) -> None:
    """The checkpoint is process 0's, whose rows were shorter and all different."""
    for one in of(ranks, "resume uneven"):
        assert one["releases"] == BATCH + 1
        assert one["epsilon"] == (BATCH + 1) * (LENGTH + 4) * EPSILON


def test_the_update_is_of_the_replaced_words_alone(ranks) -> None:
    for found in of(ranks, "update"):
        assert found["replaced"] < 1e-5
        assert found["true"] > 1e-3
