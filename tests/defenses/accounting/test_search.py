"""The search for settings: its law of tries, its account, and what fails in it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from lightning_fedleak.defenses import (
    BestTry,
    Candidate,
    DefenseError,
    Tries,
    TryResult,
    private_search,
)
from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.accounting import (
    composed_rdp,
    epsilon_of,
)
from lightning_fedleak.defenses.accounting.renyi import ORDERS, SamplingScheme, TruncatedPoisson
from lightning_fedleak.defenses.accounting.search import Releases

pytest.importorskip("opacus")

RELEASES: Releases = [(1.0, 0.05, 100, "poisson")]
DELTA = 1e-5


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 300.0])
def test_the_search_costs_what_google_says(shape: float, mean: float) -> None:
    google = pytest.importorskip("dp_accounting.dp_event")
    from dp_accounting import rdp

    account = rdp.RdpAccountant(ORDERS)
    one = google.SelfComposedDpEvent(google.GaussianDpEvent(3.0), 10)
    account.compose(google.RepeatAndSelectDpEvent(one, mean, shape))
    ours = BestTry(0, None, Tries(mean, shape).rdp(composed_rdp([(3.0, 1.0, 10)], "poisson")))
    assert ours.epsilon(DELTA) == pytest.approx(account.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
def test_the_number_of_tries_follows_its_law(shape: float) -> None:
    """Definition 1 of Papernot & Steinke, of which neighbouring chances have a simple ratio."""
    tries, draws = Tries(4.0, shape), 20_000
    counts = Counter(tries.draw() for _ in range(draws))
    assert min(counts) == 1
    chances = [1.0]
    for k in range(1, 2000):
        chances.append(chances[-1] * (1 - tries.stop) * (k + shape) / (k + 1))
    law = np.asarray(chances) / math.fsum(chances)
    assert float(law @ np.arange(1, 2001)) == pytest.approx(4.0, rel=1e-6)
    for k in range(1, 9):
        deviation = math.sqrt(law[k - 1] * draws)
        assert abs(counts[k] - draws * law[k - 1]) < 5 * deviation


def test_the_curve_is_the_largest_of_any_candidate() -> None:
    candidates = [
        Candidate(0, [(1.0, 0.05, 10, "poisson")]),
        Candidate(1, [(3.0, 0.5, 100, "poisson")]),
    ]
    tries = Tries(2.0)
    both = private_search(candidates, lambda i: TryResult(i, candidates[i].releases), tries)
    alone = [
        tries.rdp(composed_rdp([row[:3] for row in candidate.releases], "poisson"))
        for candidate in candidates
    ]
    assert (both.rdp >= np.max(alone, axis=0) - 1e-12).all()


class Law(Tries):
    """A number of tries that is fixed, to see what they do."""

    def draw(self) -> int:
        return 40


def test_the_best_try_is_returned_and_a_failed_one_is_the_worst() -> None:
    calls: list[int] = []

    def train(number: int) -> TryResult:
        calls.append(number)
        if number == 0:
            raise RuntimeError("diverged")
        return TryResult([0.0, math.nan, 0.3, -2.0][number], RELEASES, result=f"weights {number}")

    candidates = [Candidate(number, RELEASES) for number in range(4)]
    found = private_search(candidates, train, Law(2.0))
    assert len(calls) == 40  # neither capped nor cut short by failures
    assert set(calls) == {0, 1, 2, 3}
    assert found.settings == 2
    assert found.trial == TryResult(0.3, RELEASES, "weights 2")


@pytest.mark.parametrize("score", [math.nan, None])
def test_where_every_try_fails_nothing_is_returned(score: Any) -> None:
    found = private_search(
        [Candidate("a", RELEASES)], lambda _: TryResult(score, RELEASES), Law(2.0)
    )
    assert found.trial is None
    assert found.epsilon(DELTA) > 0


def test_a_try_that_released_more_than_planned_is_refused() -> None:
    more: Releases = [*RELEASES, (4.0, 1.0, 1, "poisson")]  # its score on private data
    with pytest.raises(DefenseError, match="no epsilon holds for the search"):
        private_search([Candidate(0, RELEASES)], lambda _: TryResult(1.0, more), Law(2.0))
    private_search([Candidate(0, more)], lambda _: TryResult(1.0, RELEASES), Law(2.0))


@pytest.mark.parametrize(
    "sampling", ["without_replacement", TruncatedPoisson(10_001, 64), TruncatedPoisson(10_001, 80)]
)
def test_the_best_of_several_tries_costs_more_than_one(sampling: SamplingScheme) -> None:
    accountant = Accountant("rdp", sampling=sampling)
    accountant.step(1.0, 64 / 10_000, 300)
    releases = accountant.releases
    result = TryResult(1.0, releases)
    best = private_search([Candidate("a", releases)], lambda _: result, Tries(10.0))
    one = epsilon_of(accountant.history, DELTA, "rdp", sampling)
    assert best.epsilon(DELTA) > one
    assert best.rdp == pytest.approx(
        Tries(10.0).rdp(composed_rdp(accountant.history, sampling)), rel=1e-12
    )


def test_a_score_on_private_data_keeps_its_own_sampling() -> None:
    cut = TruncatedPoisson(10_001, 64)
    releases: Releases = [(1.0, 64 / 10_000, 300, cut), (4.0, 1.0, 1, "poisson")]
    best = private_search([Candidate(0, releases)], lambda _: TryResult(1.0, releases), Law(2.0))
    apart = composed_rdp([releases[0][:3]], cut) + composed_rdp([releases[1][:3]], "poisson")
    assert best.rdp == pytest.approx(Law(2.0).rdp(apart), rel=1e-12)


def test_releases_that_do_not_say_how_they_were_drawn_are_refused() -> None:
    bare: Any = [(1.0, 0.05, 100)]
    with pytest.raises(DefenseError, match=r"defense\.accountant\.releases"):
        private_search([Candidate(0, bare)], lambda _: TryResult(1.0, RELEASES), Law(2.0))
    with pytest.raises(DefenseError, match="how they were drawn"):
        private_search([Candidate(0, RELEASES)], lambda _: TryResult(1.0, bare), Law(2.0))


def test_a_try_that_drew_otherwise_than_planned_is_refused() -> None:
    cut: Releases = [(1.0, 0.05, 100, TruncatedPoisson(1001, 50))]
    with pytest.raises(DefenseError, match="cost more"):
        private_search([Candidate(0, RELEASES)], lambda _: TryResult(1.0, cut), Law(2.0))
    fixed: Releases = [(1.0, 0.05, 100, "without_replacement")]
    for candidates in ([Candidate(0, fixed), Candidate(1, RELEASES)], [Candidate(1, RELEASES)]):
        with pytest.raises(DefenseError, match="no epsilon holds for both"):
            private_search(candidates, lambda _: TryResult(1.0, fixed), Law(2.0))
