"""Exact tests within one look, against enumeration, scipy, and simulated looks of pure guessing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, hypergeom, mannwhitneyu

from lightning_fedleak.evaluation.metrics.clustered import (
    MAX_PAIRS,
    naming_p_value,
    over_looks,
    pairs_p_value,
    rank_p_value,
)


def auc(score, member) -> float:
    """By all pairs; ties count half."""
    pairs = [(x > y) + (x == y) / 2 for x in score[member] for y in score[~member]]
    return float(np.mean(pairs))


def by_enumeration(score, member) -> float:
    """The share of all choices of members whose AUC is at least this one."""
    n, least, reached, choices = member.size, auc(score, member), 0, 0
    for chosen in itertools.combinations(range(n), int(member.sum())):
        other = np.zeros(n, dtype=bool)
        other[list(chosen)] = True
        reached += auc(score, other) >= least - 1e-12
        choices += 1
    return reached / choices


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=9),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_the_rank_test_counts_all_choices_with_ties(values, members, random) -> None:
    score = np.array(values, dtype=float)
    member = np.arange(score.size) < min(members, score.size - 1)
    random.shuffle(values)
    assert rank_p_value(score, member) == pytest.approx(by_enumeration(score, member), abs=1e-12)


@pytest.mark.parametrize(("members", "others"), [(1, 5), (5, 1), (16, 16), (3, 40), (40, 30)])
def test_the_rank_test_is_scipys_where_nothing_is_tied(members, others) -> None:
    rng = np.random.default_rng(members)
    score = np.r_[rng.normal(0.4, 1, members), rng.normal(0, 1, others)]
    member = np.arange(score.size) < members
    expected = mannwhitneyu(
        score[member], score[~member], alternative="greater", method="exact"
    ).pvalue
    assert rank_p_value(score, member) == pytest.approx(expected, rel=1e-9)


def test_the_rank_test_of_decisions_is_fishers() -> None:
    for right, wrong, members, others in itertools.product((2, 5), (0, 3), (6, 9), (4, 8)):
        score = np.r_[np.arange(members) < right, np.arange(others) < wrong].astype(float)
        expected = hypergeom.sf(right - 1, members + others, members, right + wrong)
        value = rank_p_value(score, np.arange(score.size) < members)
        assert value == pytest.approx(expected, rel=1e-12)
        blind = naming_p_value(right, right + wrong, members, members + others)
        assert blind == pytest.approx(value, rel=1e-12)


def test_without_members_or_used_types_there_is_no_p_value() -> None:
    assert math.isnan(rank_p_value(np.array([1.0, 2.0]), np.array([True, True])))
    assert math.isnan(rank_p_value(np.array([1.0, np.nan]), np.array([True, False])))
    assert math.isnan(naming_p_value(0, 3, 0, 10))
    assert naming_p_value(0, 0, 3, 10) == 1.0


def test_many_games_get_a_bound_above_the_exact_value() -> None:
    n = math.isqrt(MAX_PAIRS) + 1
    rng = np.random.default_rng(0)
    score = np.r_[rng.normal(0.5, 1, n), rng.normal(0, 1, n)]
    member = np.arange(2 * n) < n
    exact = mannwhitneyu(
        score[member], score[~member], alternative="greater", method="exact"
    ).pvalue
    assert exact < rank_p_value(score, member) < 0.5


@pytest.mark.parametrize("at_most", [0.2, 0.5, 0.8])
def test_the_bound_of_trials_lies_above_the_binomial_and_is_it_where_all_are_right(at_most) -> None:
    for n, k in itertools.product((1, 7, 40), range(8)):
        k = min(n, k * n // 7)
        exact = binomtest(k, n, at_most, alternative="greater").pvalue
        assert pairs_p_value(k / n, n, at_most) >= exact * (1 - 1e-12)
    assert pairs_p_value(1.0, 16, at_most) == pytest.approx(at_most**16)


def test_the_correction_spends_one_error_on_all_looks() -> None:
    spent = [0.05 / (over_looks(1e-6, look) / 1e-6) for look in range(1, 100)]
    assert sum(spent) == pytest.approx(0.05 * (1 - 1 / 100))
    assert over_looks(0.7, 3) == 1.0
    assert math.isnan(over_looks(math.nan, 1))
