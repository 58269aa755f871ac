"""Lower bounds on epsilon: never above the truth too often, and close to it with many games."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from scipy.stats import binomtest

from lightning_fedleak.evaluation.auditing import audit_scores, gaussian_epsilon

RUNS, ALPHA = 200, 0.05
TOLERATED = RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


def gaussian(rng, members, sigma=1.0):
    return rng.normal(size=members.size) + members / sigma


def randomised_response(rng, members, epsilon=1.0):
    return np.where(rng.random(members.size) < 1 / (1 + math.exp(-epsilon)), members, ~members)


def worst(rng, members, epsilon=1.0, delta=0.05):
    """With chance delta tells the bit outright, else randomised response: the most DP allows."""
    told = rng.random(members.size) < delta
    return np.where(told, 3.0 * members - 1, randomised_response(rng, members, epsilon))


def play(mechanism, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    members = rng.random(n) < 0.5
    return torch.tensor(mechanism(rng, members).astype(float)), torch.tensor(members)


@pytest.mark.parametrize("how", ["union", 0.5])
@pytest.mark.parametrize(
    ("mechanism", "truth", "arguments"),
    [
        (randomised_response, 1.0, {}),
        (worst, 1.0, {"delta": 0.05}),
        (gaussian, gaussian_epsilon(sigma=1.0, delta=0.1), {"delta": 0.1}),
        (gaussian, gaussian_epsilon(sigma=1.0, delta=1e-5), {"delta": 1e-5, "claim": "gaussian"}),
    ],
)
def test_the_bound_is_too_large_with_probability_alpha_at_most(
    mechanism, truth, arguments, how
) -> None:
    bounds = [
        audit_scores(*play(mechanism, 500, seed), threshold=how, **arguments).epsilon
        for seed in range(RUNS)
    ]
    assert sum(b > truth for b in bounds) <= TOLERATED
    assert np.mean(bounds) > 0.1 * truth


@pytest.mark.parametrize(
    ("mechanism", "truth", "arguments", "share"),
    [
        (randomised_response, 1.0, {}, 0.86),
        (worst, 1.0, {"delta": 0.05}, 0.83),
        (gaussian, gaussian_epsilon(sigma=1.0, delta=0.1), {"delta": 0.1}, 0.9),
        (
            gaussian,
            gaussian_epsilon(sigma=1.0, delta=1e-5),
            {"delta": 1e-5, "claim": "gaussian"},
            0.93,
        ),
    ],
)
def test_the_bound_approaches_the_truth(mechanism, truth, arguments, share) -> None:
    bound = audit_scores(*play(mechanism, 100_000, 1), threshold="union", **arguments)
    assert share * truth < bound.epsilon <= truth < bound.limit


def quantile_scores(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores without chance: n quantiles of N(0, 1), and the same moved by 1."""
    quantiles = ndtri((np.arange(n) + 0.5) / n)
    return torch.tensor(np.r_[quantiles + 1, quantiles]), torch.arange(2 * n) < n


@pytest.mark.parametrize(
    ("n", "delta", "published"),
    [
        (100, 0.0, 0.362665),
        (100, 0.1, 0.176839),
        (1000, 0.0, 0.669221),
        (1000, 1e-3, 0.667708),
        (10_000, 0.1, 0.606086),
    ],
)
def test_a_fixed_threshold_gives_what_jax_privacy_gives(n, delta, published) -> None:
    """jax_privacy 2.0.0, ``epsilon_clopper_pearson(.05, delta, one_sided=False, Explicit(.5))``."""
    bound = audit_scores(*quantile_scores(n), delta=delta, threshold=0.5)
    assert bound.epsilon == pytest.approx(published, abs=1e-6)


def of_counts(tp: int, positives: int, fp: int, negatives: int, delta: float = 0.0) -> float:
    """Return the bound of so many right guesses and so many false alarms."""
    scores = torch.cat([torch.arange(positives) < tp, torch.arange(negatives) < fp]).double()
    members = torch.arange(positives + negatives) < positives
    return audit_scores(scores, members, delta=delta, threshold=0.5).epsilon


def test_counts_by_the_definition() -> None:
    """Both directions, with scipy's Clopper-Pearson, one-sided at alpha / 2 each."""
    for tp, fp in ((90, 3), (40, 0), (100, 60), (50, 50)):
        tpr, tnr = (
            binomtest(k, 100, alternative="greater").proportion_ci(0.975, "exact").low
            for k in (tp, 100 - fp)
        )
        ways = [(tpr - 0.01) / (1 - tnr), (tnr - 0.01) / (1 - tpr)]
        expected = max([0.0] + [math.log(w) for w in ways if w > 1])
        bound = of_counts(tp, 100, fp, 100, delta=0.01)
        assert bound == pytest.approx(expected, rel=1e-9)


# ---- relations ------------------------------------------------------------------------------


def test_a_bound_has_the_relation_of_its_game() -> None:
    scores, members = play(gaussian, 50, 0)
    bound = audit_scores(scores, members, relation="replace_one")
    assert bound.relation == "replace_one"
    assert bound.epsilon == audit_scores(scores, members).epsilon
    assert "replace-one" in str(bound)


# ---- what is unknown, and what is refused ---------------------------------------------------


def test_a_score_that_is_nan_makes_the_bound_unknown() -> None:
    scores, members = play(gaussian, 50, 0)
    scores[3] = math.nan
    for how in ("union", 0.0):
        bound = audit_scores(scores, members, threshold=how)
        assert math.isnan(bound.epsilon)
        assert "unknown" in str(bound)


def test_infinite_scores_and_few_games_are_fine() -> None:
    scores, members = torch.tensor([math.inf, -math.inf]), torch.tensor([True, False])
    for how in ("union", 0.0):
        assert audit_scores(scores, members, threshold=how).epsilon == 0.0
    scores, members = scores.repeat(100), members.repeat(100)
    for how in ("union", 0.0):
        bound = audit_scores(scores, members, threshold=how)
        assert 2 < bound.epsilon == bound.limit


def test_a_threshold_that_no_member_exceeds_spoils_no_other() -> None:
    scores, members = torch.cat([torch.zeros(500), torch.ones(500)]), torch.arange(1000) >= 500
    perfect = audit_scores(scores, members, threshold="union").epsilon
    scores[0] = 99.0
    assert 0.8 * perfect < audit_scores(scores, members, threshold="union").epsilon < perfect
