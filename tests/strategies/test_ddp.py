"""DefendedStrategy on two gloo processes: gradient noise, DP-SGD and TokenLDP, in one launch."""

from collections import defaultdict
from typing import Any

import pytest
import scipy.stats

from lightning_fedleak.defenses.token_ldp.mechanisms import grr_keep
from tests.helpers.cases import of
from tests.helpers.models import VOCAB
from tests.helpers.processes import launched
from tests.strategies.token_ldp_worker import BATCH, EPSILON, LENGTH, ROWS

pytestmark = pytest.mark.ddp


ranks = launched("tests.strategies.ddp_worker", gpus=True)


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


# ---- DP-SGD ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most"), [("exact tied 32", 1e-6), ("exact pieces", 1e-6), ("exact tied bf16", 2e-2)]
)
def test_each_rank_shares_its_own_clipped_sum(ranks, name: str, most: float) -> None:
    for found in of(ranks, name):
        assert found["distance"] < most
        assert found["mean"] < 1e-6
        assert found["masks differ"]
        assert found["agree"]
        assert found["rate"] == pytest.approx(4 / 12)
        assert found["steps"] == found["releases"] == 3


@pytest.mark.parametrize(("name", "std"), [("noise local", 1.0), ("noise central", 2**-0.5)])
def test_ranks_draw_different_noise_and_stay_equal(ranks, name: str, std: float) -> None:
    for found in of(ranks, name):
        assert found["std"] == pytest.approx(std, rel=0.05)
        assert abs(found["correlation"]) < 0.1  # of 9168 numbers: by chance once in 1e21 runs
        assert found["agree"]


def test_a_rank_with_an_empty_batch_releases_with_the_others(ranks) -> None:
    for found in of(ranks, "rare"):
        assert found["steps"] == found["releases"] == 10
        assert found["ran"] < 10
        assert found["sizes positive"]
        assert found["agree"]


# ---- TokenLDP: who shares a replacement, for how long, and what leaves ------------------------


Row = tuple[int, ...]
BY_CHANCE = 1e-9
"""Nothing here is seeded: each right law is rejected so often."""


def pairs(facts: dict[str, Any]) -> list[tuple[Row, Row]]:
    """True rows with what they were replaced by, in the order of training."""
    return [
        (tuple(true), tuple(replacement))
        for true, replacement in zip(facts["true"], facts["rows"], strict=True)
    ]


def replacements(*facts: dict[str, Any]) -> dict[Row, set[Row]]:
    """All replacements of each true row."""
    by_row: dict[Row, set[Row]] = defaultdict(set)
    for true, replacement in (pair for one in facts for pair in pairs(one)):
        by_row[true].add(replacement)
    return by_row


def surviving(row_pairs: list[tuple[Row, Row]]) -> list[bool]:
    """Word by word, whether it survived."""
    return [
        a == b for true, replacement in row_pairs for a, b in zip(true, replacement, strict=True)
    ]


def independent(one: list[tuple[Row, Row]], other: list[tuple[Row, Row]]) -> bool:
    """Whether words survive in both as often as by independent draws of GRR, not more.

    Draws that are independent are taken for such ones but for ``BY_CHANCE``.
    """
    assert [true for true, _ in one] == [true for true, _ in other]
    both = sum(a and b for a, b in zip(surviving(one), surviving(other), strict=True))
    keep = grr_keep(VOCAB - 3, EPSILON)
    n = len(one) * LENGTH
    same = scipy.stats.binomtest(both, n, keep).pvalue
    return bool(scipy.stats.binomtest(both, n, keep**2).pvalue > BY_CHANCE > same)


TOKEN_CASES = ["rank memoised", "rank fresh", "rank shuffled"]
TOKEN_CASES += ["world memoised", "world fresh", "world shuffled"]


@pytest.mark.parametrize("name", TOKEN_CASES)
def test_words_survive_by_the_mechanisms_law_and_ranks_stay_equal(ranks, name: str) -> None:
    facts = of(ranks, name)
    for one in facts:
        # Shuffled rows may come twice, and those that are memoised are drawn once.
        words = surviving(sorted(set(pairs(one)[:ROWS])))
        law = grr_keep(VOCAB - 3, EPSILON)
        assert len(words) >= ROWS // 2 * LENGTH
        assert scipy.stats.binomtest(sum(words), len(words), law).pvalue > BY_CHANCE
        assert len(one["rows"]) == 2 * ROWS
        assert one["labels are inputs"]
        assert one["ranks agree"]
        assert one["moved"]


def test_each_rank_is_a_client_with_replacements_of_its_own(ranks) -> None:
    first, second = of(ranks, "rank memoised")
    assert first["true"] == second["true"]
    assert independent(pairs(first)[:ROWS], pairs(second)[:ROWS])
    for facts in (first, second):
        assert {len(replacement) for replacement in replacements(facts).values()} == {1}
        assert facts["rows"][:ROWS] == facts["rows"][ROWS:]
        assert facts["releases"] == 1
        assert facts["epsilon"] == LENGTH * EPSILON


def test_a_row_that_moves_between_clients_is_released_by_each_once(ranks) -> None:
    first, second = of(ranks, "rank shuffled")
    moved = replacements(first).keys() & replacements(second).keys()
    assert len(moved) > ROWS // 4
    # Two clients replace one row alike with a chance of 7e-8: one of all rows may be, not two.
    assert sum(replacements(first)[row] == replacements(second)[row] for row in moved) <= 1
    for facts in (first, second):
        assert {len(replacement) for replacement in replacements(facts).values()} == {1}
        assert facts["releases"] == 1


def test_all_ranks_of_one_client_share_a_rows_replacement(ranks) -> None:
    for name in ("world memoised", "world shuffled"):
        facts = of(ranks, name)
        assert replacements(facts[0]).keys() & replacements(facts[1]).keys()
        assert {len(replacement) for replacement in replacements(*facts).values()} == {1}
        assert [one["releases"] for one in facts] == [1, 1]


@pytest.mark.parametrize("client", ["rank", "world"])
def test_without_memoisation_every_process_and_epoch_draws_apart(ranks, client: str) -> None:
    facts = of(ranks, f"{client} fresh")
    draws = [half for one in facts for half in (pairs(one)[:ROWS], pairs(one)[ROWS:])]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert independent(one, other)
    # Both processes hold all rows: those of one client release each of them twice as often.
    releases = 4 if client == "world" else 2
    for one in facts:
        assert one["releases"] == releases
        assert one["epsilon"] == releases * LENGTH * EPSILON


@pytest.mark.parametrize("memoize", ["memoised", "fresh"])
def test_a_resumed_fit_draws_anew_and_counts_on(ranks, memoize: str) -> None:
    facts = of(ranks, f"resume {memoize}")
    for one in facts:
        before, after = one["before"], one["after"]
        assert len(after["rows"]) == ROWS
        assert independent(pairs(before), pairs(after))
        assert (before["releases"], after["releases"]) == (1, 2)
        assert after["epsilon"] == 2 * LENGTH * EPSILON
        assert after["ranks agree"]
        # Counts and costs alone: no secret from which the replacements would follow.
        counts = {"batches": ROWS // BATCH, "releases": 1, "longest": LENGTH}
        assert one["state"] == {**counts, "epsilon": LENGTH * EPSILON}
    assert independent(pairs(facts[0]["after"]), pairs(facts[1]["after"]))


def test_a_resumed_process_remembers_what_only_it_released(ranks) -> None:
    """The checkpoint is process 0's, whose rows were shorter and all different."""
    for one in of(ranks, "resume uneven"):
        assert one["releases"] == BATCH + 1
        assert one["epsilon"] == (BATCH + 1) * (LENGTH + 4) * EPSILON
