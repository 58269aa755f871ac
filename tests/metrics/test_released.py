"""Exact statements about a released model, also within one look, by brute force."""

import itertools
import math
from dataclasses import replace
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, hypergeom, mannwhitneyu, nhypergeom

from lightning_fedleak.attacks.memorization import Extraction, ExtractionGuess
from lightning_fedleak.evaluation.metrics import released
from lightning_fedleak.evaluation.metrics.clustered import (
    MAX_PAIRS,
    naming_p_value,
    over_looks,
    pairs_p_value,
    rank_p_value,
    spent_at,
)
from lightning_fedleak.evaluation.metrics.rates import Rate
from lightning_fedleak.evaluation.metrics.released import (
    FPRS,
    distribution_shift,
    extraction_values,
    membership_values,
    min_non_members,
    permutation_test,
    rank_test,
    rate_name,
    shown_tpr,
    tiers_of,
    visible_excess,
    visible_tpr,
)
from lightning_fedleak.report.records import MEMORIZATION


def test_shares_of_all_looks_add_up_to_alpha() -> None:
    assert sum(spent_at(look, 0.05) for look in range(1, 10_001)) == pytest.approx(0.05, abs=1e-5)


def test_others_needed_by_their_definition() -> None:
    for look in range(1, 6):
        n = min_non_members(look)
        assert 0.99**n <= spent_at(look) / 2 < 0.99 ** (n - 1)
    assert 0.999**4380 <= spent_at(1) / 2 < 0.999**4379
    counts = [f"{min_non_members(1, fpr=fpr):,}" for fpr in FPRS]
    assert all(count in MEMORIZATION.terms["TPR at 1% and 0.1% FPR"] for count in counts)


@pytest.mark.parametrize("fpr", FPRS)
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_tpr_is_known_from_so_many_others_on(fpr: float, lacking: int) -> None:
    rng = np.random.default_rng(0)
    n = min_non_members(2, fpr=fpr) - lacking
    others, inside = rng.normal(0, 1, n), rng.normal(2, 1, 150)
    scores, members = torch.tensor(np.r_[inside, others]), torch.arange(150 + n) < 150
    values = membership_values(scores, members, look=2)
    name = rate_name(fpr)
    assert name == f"tpr_at_fpr_{fpr:g}"
    ends = [values[name + end] for end in ("_low", "", "_high")]
    if lacking:
        assert all(map(math.isnan, ends))
        return
    above = [sum(float(one) > score for one in others) for score in inside]
    assert ends[1] == pytest.approx(np.mean([count <= int(fpr * n) for count in above]))
    assert 0 <= ends[0] < ends[1] < ends[2] <= 1
    if fpr == 0.01:
        assert ends[0] == values["shown"]


def test_the_rank_test_is_that_of_all_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    from itertools import combinations

    scores = torch.arange(9.0)
    members = torch.tensor([0, 0, 1, 0, 0, 1, 0, 1, 1]).bool()
    monkeypatch.setattr(released, "FPR", 0.25)  # one of five others may lie above
    others = sorted(scores[~members].tolist(), reverse=True)
    hits = int((scores[members] > others[1]).sum())
    rare = 0
    subsets = list(combinations(range(9), 4))
    for chosen in subsets:
        mask = torch.zeros(9, dtype=torch.bool)
        mask[list(chosen)] = True
        bar = sorted(scores[~mask].tolist(), reverse=True)[1]
        rare += int((scores[mask] > bar).sum()) >= hits
    assert rank_test(scores, members) == pytest.approx(rare / len(subsets))


def test_too_few_others_show_nothing_and_never_zero() -> None:
    scores, members = torch.arange(836.0), torch.arange(836) >= 436
    shown = shown_tpr(scores, members)
    assert math.isnan(shown.low)
    assert math.isnan(shown.value)
    enough = shown_tpr(torch.arange(837.0), torch.arange(837) >= 437)
    assert enough.low > 0.98


@pytest.mark.parametrize(
    ("look", "shift", "fpr"), [(1, 0.0, 0.01), (3, 1.0, 0.01), (1, 2.5, 0.01), (1, 2.5, 0.001)]
)
def test_bounds_hold_as_often_as_they_say(look: int, shift: float, fpr: float) -> None:
    """The true TPR of two normal laws, 600 pools: neither bound fails more than it may."""
    from scipy.stats import norm

    truth = float(norm.sf(norm.isf(fpr) - shift))
    rng = np.random.default_rng(look)
    n, alpha = (
        round(7 / fpr),
        0.6,
    )  # alpha: large, so that a bound that spends too much shows in few pools
    misses = np.zeros(2)
    pools = 600
    for _ in range(pools):
        scores = torch.tensor(np.r_[rng.normal(shift, 1, 300), rng.normal(0, 1, n)])
        tpr = shown_tpr(scores, torch.arange(300 + n) < 300, look=look, alpha=alpha, fpr=fpr)
        misses += [tpr.low > truth, tpr.high < truth]
    allowed = spent_at(look, alpha)
    noise = 3 * math.sqrt(allowed * (1 - allowed) / pools)
    assert (misses / pools <= allowed + noise).all()


@pytest.fixture
def tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each probability of the rank test's law once: simulations ask for few of them."""

    @cache
    def law(total: int, n_members: int, rank: int) -> SimpleNamespace:
        probabilities = nhypergeom(total, n_members, rank).pmf(np.arange(n_members + 1))
        return SimpleNamespace(pmf=probabilities.__getitem__)

    monkeypatch.setattr(released, "nhypergeom", law)


def test_power_is_true_in_simulation(request: pytest.FixtureRequest) -> None:
    """Members above the bar at the printed rate are seen in four of five pools."""
    n, n0, look = 300, 500, 2
    rate = visible_tpr(n, n0, look=look)
    request.getfixturevalue("tabulated")
    rng = np.random.default_rng(0)
    members = torch.arange(n + n0) < n
    seen, pools = 0, 800
    for _ in range(pools):
        others = rng.uniform(size=n0)
        bar = np.sort(others)[::-1][int(0.01 * n0)]
        inside = np.where(rng.uniform(size=n) < rate, 2.0, bar - 1)
        seen += rank_test(torch.tensor(np.r_[inside, others]), members) <= spent_at(look)
    assert seen / pools == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("others_hits", [0, 6])
def test_the_visible_excess_is_seen_in_four_of_five_pools(others_hits: int) -> None:
    """The interval of a difference, by hand, of members extracted at the printed share."""
    from scipy.stats import beta

    n, n0, alpha = 150, 120, 0.01

    def ends(hits: int, size: int) -> tuple[float, float]:
        low = beta.ppf(alpha / 2, hits, size - hits + 1) if hits else 0.0
        return low, beta.ppf(1 - alpha / 2, hits + 1, size - hits) if hits < size else 1.0

    rate = visible_excess(n, n0, others_hits, alpha=alpha)
    hits = np.random.default_rng(0).binomial(n, rate, size=2000)
    other, other_high = others_hits / n0, ends(others_hits, n0)[1]
    seen = [
        h / n - other > math.hypot(h / n - ends(h, n)[0], other_high - other) for h in hits.tolist()
    ]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.04)
    assert visible_excess(2, 3, 0, alpha=alpha) == visible_excess(0, 3, 0, alpha=alpha) == 1.0


def test_one_member_that_ranks_low_hides_no_other() -> None:
    scores = torch.cat([torch.linspace(1, 2, 200), torch.linspace(-2, -1, 200)])
    scores[0] = -9.0
    values = membership_values(scores, torch.arange(400) < 200, look=5)
    assert values["auc"] == pytest.approx(0.995)
    means = np.linspace(0.5, 0.995, 100_000)[:-1]
    apart = 0.995 * np.log(0.995 / means) + 0.005 * np.log(0.005 / (1 - means))
    rarer = np.exp(-200 * apart) < spent_at(5) / 2  # Hoeffding's bound, by its definition
    assert values["auc_low"] == pytest.approx(means[~rarer].min(), abs=1e-4)


@pytest.mark.parametrize("few", [0.005, 0.02, 0.1])
def test_the_interval_of_an_auc_holds_where_few_texts_decide(few: float) -> None:
    """A member ranks below all others with a small probability, so that the AUC is 1 minus it."""
    wrong, members = 0, torch.arange(120) < 60
    low_members = np.random.default_rng(0).binomial(60, few, size=200)
    for n_low, pools in zip(*np.unique(low_members, return_counts=True), strict=True):
        scores = torch.ones(120, dtype=torch.float64)
        scores[:60] = 2.0 * (torch.arange(60) >= int(n_low)) + torch.linspace(0, 1e-6, 60)
        values = membership_values(scores, members)  # at look 1, with 2.5% in all
        wrong += int(pools) * (not values["auc_low"] <= 1 - few <= values["auc_high"])
    assert wrong <= 200 * 0.025 + 2 * (200 * 0.025) ** 0.5


# ---- one test, one error ------------------------------------------------------------------------


@pytest.mark.parametrize("look", [1, 4])
@pytest.mark.parametrize(("shift", "n"), [(0.5, 300), (0.7, 80), (1.05, 200), (4.0, 15), (9.0, 9)])
def test_the_p_value_is_the_error_with_which_the_interval_begins_at_guessing(
    look: int, shift: float, n: int
) -> None:
    rng = np.random.default_rng(3)
    scores = torch.tensor(np.r_[rng.normal(shift, 1, n), rng.normal(0, 1, n + 5)])
    members = torch.arange(2 * n + 5) < n
    p_value = membership_values(scores, members, look=look)["p_value"]
    assert 0 < p_value < 1
    for factor, above in ((1.001, True), (0.999, False)):
        if p_value * factor < 1:
            values = membership_values(scores, members, look=look, alpha=p_value * factor)
            assert (values["auc_low"] > 0.5) is above
    assert membership_values(scores, members, look=look, alpha=0.3)["p_value"] == pytest.approx(
        p_value
    )


def test_different_distributions_are_distinguished_from_too_few_texts() -> None:
    fine, few, other = Rate(0.5, 0.46, 0.54), Rate(0.53, 0.41, 0.65), Rate(0.6, 0.56, 0.64)
    low = Rate(0.4, 0.36, 0.44)
    assert distribution_shift({"loss": fine}) is None
    found = distribution_shift({"loss": fine, "zlib": few})
    assert found is not None
    assert found.startswith("too few to decide whether they are exchangeable: ")
    assert "'zlib' distinguishes them with an AUC of 0.53 (0.41 to 0.65)" in found
    wide = Rate(0.7, 0.49, 0.9)  # farther, and shows nothing
    for apart in (other, low):
        found = distribution_shift({"loss": wide, "zlib": few, "length": apart})
        assert found is not None
        assert found.startswith("from different distributions: without the trained model 'length'")


# ---- texts that repeat --------------------------------------------------------------------------


def test_tiers_of_few_texts_join_the_one_below() -> None:
    times = torch.tensor([1] * 30 + [2] * 6 + [4] * 6 + [5] * 9 + [17] * 3 + [90] * 2)
    members = torch.ones(len(times), dtype=torch.bool)
    tiers = {least: times[tier].tolist() for least, tier in tiers_of(times, members).items()}
    assert tiers == {5: [5] * 9 + [17] * 3 + [90] * 2, 2: [2] * 6 + [4] * 6, 1: [1] * 30}
    few = {least: int(tier.sum()) for least, tier in tiers_of(times, times > 4).items()}
    assert few == {5: 14}
    assert {n: int(t.sum()) for n, t in tiers_of(times, times > 16).items()} == {1: 5}
    assert [*tiers_of(times, ~members)] == [1]


def test_what_is_extracted_is_that_of_the_tier_where_most_is() -> None:
    """Of 200 texts none is written that stands once, and 15 of 20 that stand eight times."""
    n, n0 = 220, 100
    members = torch.arange(n + n0) < n
    times = torch.ones(n + n0, dtype=torch.long)
    times[200:220] = 8
    greedy = torch.zeros(n + n0, dtype=torch.bool)
    greedy[200:215] = True
    greedy[n : n + 2] = True
    log_probs = torch.full((n + n0,), -1e4)
    guess = ExtractionGuess(log_probs, log_probs, greedy, torch.ones(n + n0, dtype=torch.bool))
    values = extraction_values(guess, Extraction(), members, times, look=2)
    assert values["greedy_x1"] == pytest.approx(-0.02)
    assert values["greedy_x5"] == pytest.approx(15 / 20 - 0.02)
    assert "greedy_x2" not in values
    assert [values[f"greedy{end}"] for end in ("", "_low", "_high")] == [
        values[f"greedy_x5{end}"] for end in ("", "_low", "_high")
    ]
    # Both tiers share the look's error, and their intervals are Newcombe's of that error.
    alpha = spent_at(2) / 2
    low, other_high = (
        scipy.stats.beta.ppf(alpha / 2, 15, 6),
        scipy.stats.beta.ppf(1 - alpha / 2, 3, 98),
    )
    expected = 0.73 - math.hypot(0.75 - low, other_high - 0.02)
    assert values["greedy_low"] == pytest.approx(expected)
    assert values["visible"] == visible_excess(20, n0, 2, alpha=alpha)
    assert values["visible"] > visible_excess(200, n0, 2, alpha=alpha)
    perfect = replace(guess, greedy=members, log_probs=torch.where(members, 0.0, -1e4))
    shown = extraction_values(perfect, Extraction(), members, times, look=2)
    for name in ("greedy", "extracted"):
        assert values[f"{name}_provable"] == shown[f"{name}_x5_low"] < shown[f"{name}_x1_low"]
        for tier in ("x1", "x5"):
            assert values[f"{name}_{tier}_provable"] == shown[f"{name}_{tier}_low"]


def test_permutations_are_exact_with_ties() -> None:
    """Against all choices of 3 members among 8 texts, and Mann and Whitney's on many."""
    scores = torch.tensor([3.0, 3, 2, 2, 2, 1, 1, 0])
    members = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0]).bool()
    ranks = scipy.stats.rankdata(scores)
    sums = [sum(ranks[list(chosen)]) for chosen in combinations(range(8), 3)]
    share = np.mean([one >= ranks[members.numpy()].sum() for one in sums])
    assert permutation_test(scores, members) == pytest.approx(share, abs=0.015)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, generator=generator)
    scores[:100] += 0.2
    members = torch.arange(200) < 100
    expected = scipy.stats.mannwhitneyu(scores[:100], scores[100:], alternative="greater").pvalue
    assert permutation_test(scores, members) == pytest.approx(expected, abs=0.015)


def test_the_exact_test_decides_of_the_low_end() -> None:
    generator = torch.Generator().manual_seed(1)
    alarms = 0
    for _ in range(40):
        scores = torch.randint(0, 3, (120,), generator=generator).double()
        members = torch.randperm(120, generator=generator) < 60
        values = membership_values(scores, members, exact=True)
        alarms += values["auc_low"] > 0.5
        assert (values["auc_low"] > 0.5) <= (values["p_value"] <= 0.05)
    assert alarms <= 4
    clear = membership_values(torch.arange(120.0), torch.arange(120) >= 60, exact=True)
    assert clear["auc_low"] > 0.8


@pytest.mark.parametrize(("look", "alpha", "shows"), [(15, 0.05, True), (16, 0.05, False)])
def test_a_look_that_no_permutation_can_show_proves_nothing(
    look: int, alpha: float, shows: bool
) -> None:
    scores, members = torch.arange(400.0), torch.arange(400) >= 200
    values = membership_values(scores, members, look=look, alpha=alpha, exact=True)
    assert (values["auc_low"] > 0.5) is (values["auc_provable"] > 0.5) is shows
    assert values["auc"] == values["auc_high"] == 1.0
    assert membership_values(scores, members, look=look, alpha=alpha)["auc_provable"] > 0.9


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
