"""One-run audits against exact sums, the paper's printed values, and known mechanisms."""

import functools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, linprog
from scipy.stats import binom

from lightning_fedleak.evaluation import auditing
from lightning_fedleak.evaluation.auditing.lower_bounds import AuditedClaim
from lightning_fedleak.evaluation.auditing.one_run import exceeds, least_of_dp, least_of_gaussian
from lightning_fedleak.evaluation.metrics.clustered import spent_at
from tests.helpers.gaussian import gaussian_delta

RUNS, ALPHA = 200, 0.05
TOLERATED = RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


@pytest.fixture(autouse=True, scope="module")
def _a_count_is_asked_once() -> Iterator[None]:
    """Runs are many and counts few, and a bound follows from its counts alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_epsilon_of_counts", "one_run_p_value"):
            patch.setattr(auditing.one_run, name, functools.cache(getattr(auditing.one_run, name)))
        yield


@pytest.mark.parametrize(
    ("m", "r", "v", "delta", "printed"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_the_values_printed_in_the_paper(m, r, v, delta, printed) -> None:
    """ArXiv 2305.08846v1, Appendix D and Sect. 7; the second is cut, not rounded (2.67585).

    By the whole curve of (epsilon, delta)-DP, as in arXiv 2410.22235, more is shown.
    """
    epsilon = brentq(lambda e: auditing.one_run_p_value(m, r, v, e, delta) - 0.05, 0.0, 5.0)
    assert epsilon == pytest.approx(printed, abs=1e-3)
    bound = auditing.one_run._epsilon_of_counts((m, r, v), AuditedClaim(delta, 0.95))
    assert epsilon < bound < epsilon + 0.2


def largest_chance(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Of v right guesses of r: a linear program over all laws that the curve allows."""
    j = np.arange(r + 1)
    above, holds = [], []
    for c in range(1, r + 1):
        right, wrong = np.where(j >= c, j, 0) / m, np.where(j >= c - 1, r - j, 0) / m
        above += [right - math.exp(epsilon) * wrong, right - math.exp(-epsilon) * wrong]
        holds += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    found = linprog(-(j >= v).astype(float), above, holds, np.ones((1, r + 1)), [1.0])
    return float(-found.fun)


@pytest.mark.parametrize("delta", [0.0, 0.01])
@pytest.mark.parametrize("epsilon", [0.3, 1.5])
@pytest.mark.parametrize(("m", "r", "v"), [(20, 20, 17), (40, 12, 12), (30, 11, 8), (9, 9, 9)])
def test_a_count_is_refuted_just_where_no_law_of_the_curve_gives_it(m, r, v, epsilon, delta):
    chance = largest_chance(m, r, v, epsilon, delta)
    least = functools.partial(least_of_dp, epsilon, delta)
    for error in np.geomspace(chance / 100, 1, 40):
        assert not exceeds(m, r, v, least, 0.999 * min(error, chance))
    if 1e-9 < chance < 0.9:
        assert exceeds(m, r, v, least, 1.001 * chance)


def test_curves_are_inverted() -> None:
    """Each is the trade-off curve of its claim: 1 - f(x) is dp_tpr, gaussian_tpr."""
    for x in np.linspace(0.001, 0.6, 50):
        assert least_of_dp(1.2, 0.05, auditing.dp_tpr(x, 1.2, 0.05)) == pytest.approx(x)
        assert least_of_gaussian(2.0, auditing.gaussian_tpr(x, 0.5)) == pytest.approx(x)


def test_the_bound_of_a_gaussian_mechanism_is_tighter() -> None:
    rng = np.random.default_rng(0)
    members = draws(500, rng)
    given = torch.tensor(gaussian(members, rng)), torch.tensor(members)
    plain = auditing.audit_one_run(*given, delta=1e-5)
    tight = auditing.audit_one_run(*given, delta=1e-5, claim="gaussian")
    assert "as a Gaussian mechanism" in tight.method
    assert 1.5 * plain.epsilon < tight.epsilon < auditing.gaussian_epsilon(sigma=0.5, delta=1e-5)
    with pytest.raises(ValueError, match="delta must be a number above 0"):
        auditing.audit_one_run(*given, claim="gaussian")


@pytest.mark.parametrize(("m", "r", "v"), [(40, 20, 17), (40, 40, 40), (30, 5, 1), (12, 12, 6)])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000)])
def test_p_value_is_the_theorems_summed_in_rationals(m, r, v, delta) -> None:
    q = Fraction(3, 4)
    law = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max(sum(law[max(0, v - i) : v]) / i for i in range(1, m + 1))
    exact = min(Fraction(1), sum(law[v:]) + 2 * m * delta * worst)
    got = auditing.one_run_p_value(m, r, v, math.log(3), float(delta))
    assert got == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_p_value_grows_with_epsilon_so_that_the_bound_is_well_defined(delta) -> None:
    values = [auditing.one_run_p_value(300, 100, 80, e, delta) for e in np.linspace(0, 12, 300)]
    assert (np.diff(values) >= -1e-12).all()


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-2])
def test_p_value_covers_a_mechanism_that_may_tell_everything(epsilon, delta) -> None:
    """All bits are revealed with chance delta, else each by randomised response."""
    m, q = 50, 1 / (1 + math.exp(-epsilon))
    for v in range(1, m + 1):
        chance = delta + (1 - delta) * binom.sf(v - 1, m, q)
        assert auditing.one_run_p_value(m, m, v, epsilon, delta) >= chance - 1e-12


def draws(m: int, rng) -> np.ndarray:
    return rng.random(m) < 0.5


def randomised_response(members, rng):
    return np.where(rng.random(members.size) < 1 / (1 + math.exp(-1.0)), members, ~members)


def worst(members, rng):
    revealed = rng.random(members.size) < 0.001
    return np.where(revealed, 3.0 * members - 1, randomised_response(members, rng))


def gaussian(members, rng):
    return rng.normal(size=members.size) + 2 * members


@pytest.mark.parametrize(
    ("mechanism", "truth", "delta", "guesses", "claim"),
    [
        (randomised_response, 1.0, 0.0, 300, "dp"),
        (randomised_response, 1.0, 0.0, None, "dp"),
        (worst, 1.0, 0.001, 300, "dp"),
        (gaussian, auditing.gaussian_epsilon(sigma=0.5, delta=1e-5), 1e-5, None, "dp"),
        (gaussian, auditing.gaussian_epsilon(sigma=0.5, delta=1e-5), 1e-5, 80, "gaussian"),
    ],
)
def test_the_bound_is_too_large_with_probability_alpha_at_most(
    mechanism, truth, delta, guesses, claim
) -> None:
    bounds = []
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        members = draws(300, rng)
        scores = torch.tensor(mechanism(members, rng).astype(float))
        bound = auditing.audit_one_run(
            scores, torch.tensor(members), delta=delta, guesses=guesses, claim=claim, seed=seed
        )
        bounds.append(bound.epsilon)
    assert sum(b > truth for b in bounds) <= TOLERATED
    assert np.mean(bounds) > 0.15 * truth


def test_the_bound_approaches_randomised_response() -> None:
    rng = np.random.default_rng(0)
    members = draws(100_000, rng)
    scores = torch.tensor(randomised_response(members, rng).astype(float))
    bound = auditing.audit_one_run(scores, torch.tensor(members), guesses=100_000)
    assert 0.97 < bound.epsilon <= 1.0 < bound.limit


def test_equal_scores_are_not_broken_in_favour_of_members() -> None:
    members = torch.arange(1000) < 500
    bounds = [
        auditing.audit_one_run(torch.zeros(1000), members, seed=s).epsilon for s in range(100)
    ]
    assert np.mean(np.array(bounds) > 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)


def test_unknown_scores_make_the_bound_unknown() -> None:
    scores, members = torch.randn(100), torch.arange(100) % 2 == 0
    scores[5] = math.nan
    assert math.isnan(auditing.audit_one_run(scores, members).epsilon)


def gaussian_curve(mu: float) -> list[tuple[float, float]]:
    return [(e, gaussian_delta(e, 1 / mu)) for e in np.linspace(0, 6 * mu, 40).tolist()]


def runs_refuted(generator: torch.Generator, mu: float, accounted: float, runs: int) -> int:
    """Of runs with five looks at one set of texts; what a look adds is known of each text."""
    curves = [gaussian_curve(accounted * look**0.5) for look in range(1, 6)]
    count = 0
    for _ in range(runs):
        members = torch.rand(200, generator=generator) < 0.5
        steps = torch.randn(5, 200, generator=generator) + mu * members
        scores = steps.cumsum(0)
        count += any(
            auditing.refutes(scores[look - 1], members, curve, confidence=1 - spent_at(look, ALPHA))
            for look, curve in enumerate(curves, 1)
        )
    return count


def test_over_looks_a_correct_account_is_refuted_in_few_runs_and_a_broken_one_in_most() -> None:
    generator = torch.Generator().manual_seed(0)
    assert runs_refuted(generator, 0.4, 0.4, RUNS) <= RUNS * ALPHA
    assert runs_refuted(generator, 1.6, 0.4, 20) >= 18


def test_where_a_bound_is_tight_a_correct_curve_is_refuted_in_alpha_of_runs_at_most() -> None:
    """Randomised response keeps each bit with chance sigmoid(epsilon), and reaches the bound."""
    generator = torch.Generator().manual_seed(1)
    keep, count = 1 / (1 + math.exp(-1.0)), 0
    for _ in range(1000):
        members = torch.rand(100, generator=generator) < 0.5
        scores = (members == (torch.rand(100, generator=generator) < keep)).double()
        count += auditing.refutes(scores, members, [(1.0, 0.0)], confidence=0.8)
    assert 20 <= count <= 200 + 3 * math.sqrt(160)
    scores = members.double()
    assert auditing.refutes(scores, members, [(1.0, 0.0)])
    assert not auditing.refutes(scores, members, [])  # nothing is claimed
    with pytest.raises(ValueError, match="needs a score"):
        auditing.refutes(scores.fill_(math.nan), members, [(1.0, 0.0)])
