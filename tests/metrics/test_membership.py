"""Rates of words and of membership: scikit-learn, brute force, simulation of the games."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kurtosis, norm, rankdata, t
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support, roc_auc_score

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.evaluation.metrics import (
    Counts,
    MembershipInference,
    WordRecovery,
    clustered,
    membership_rates,
    precision_recall_f1,
    proportion,
    word_counts,
)
from lightning_fedleak.evaluation.metrics.membership import RATES
from tests.helpers.processes import computed_together


def games(n: int, shift: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of independent games: N(shift, 1) for members, N(0, 1) for the others."""
    rng = np.random.default_rng(seed)
    members = rng.random(n) < 0.5
    return torch.tensor(rng.normal(size=n) + shift * members), torch.tensor(members)


def steps(n_steps: int, per_side: int, shift: float, together: float, seed: int):
    """Games of which those of one step share a part of their noise."""
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(n_steps), 2 * per_side)
    members = np.tile(np.repeat([True, False], per_side), n_steps)
    shared = rng.normal(size=(2, n_steps)) * math.sqrt(together)
    own = rng.normal(size=clusters.size) * math.sqrt(1 - together)
    scores = own + np.where(members, shift + shared[0, clusters], shared[1, clusters])
    return torch.tensor(scores), torch.tensor(members), torch.tensor(clusters)


def test_games_that_are_clusters_of_their_own_have_plain_clopper_pearson_intervals() -> None:
    scores, members = games(240)
    decisions = scores > 0.4
    rates = membership_rates(scores, members, decisions=decisions)
    right = int((decisions == members).sum())
    exact = binomtest(right, 240).proportion_ci(0.95, "exact")
    accuracy = rates["accuracy"]
    assert (accuracy.low, accuracy.high) == pytest.approx((exact.low, exact.high), rel=1e-9)
    union = int((decisions | members).sum())
    jaccard = proportion(int((decisions & members).sum()), union)
    assert rates["f1"].low == pytest.approx(2 * jaccard.low / (1 + jaccard.low), rel=1e-9)


def test_thresholds_come_from_other_games_than_those_scored() -> None:
    """Scores that say nothing: a threshold fitted on the scored games would look better."""
    accuracy, tpr = [], []
    for seed in range(150):
        scores, members = games(40, shift=0.0, seed=seed)
        accuracy.append(membership_rates(scores, members, resamples=100)["accuracy"].value)
    assert np.mean(accuracy) == pytest.approx(0.5, abs=4 * np.std(accuracy) / math.sqrt(150))
    for seed in range(40):
        scores, members = games(2200, shift=0.0, seed=seed)
        tpr.append(membership_rates(scores, members, resamples=100)["tpr_at_fpr_0.01"].value)
    assert np.mean(tpr) == pytest.approx(0.01, abs=0.0015)


def test_a_cluster_is_never_judged_by_its_own_threshold() -> None:
    """Each step has its own offset and decides perfectly by itself, which the rest do not know."""
    members = torch.tensor([True, False]).repeat(20)
    clusters = torch.arange(20).repeat_interleave(2)
    scores = members.double() + 10.0 * clusters * (-1) ** clusters
    rates = membership_rates(scores, members, clusters)
    assert rates["accuracy"].value < 0.6
    assert membership_rates(scores[:2], members[:2])["accuracy"].value != 1.0


@pytest.mark.parametrize("fpr", [0.01, 0.001])
def test_tpr_at_fpr_is_unknown_below_ten_expected_false_alarms(fpr: float) -> None:
    n = round(10 / fpr)
    name = f"tpr_at_fpr_{fpr:g}"
    for negatives, known in ((n - 1, False), (n, True)):
        members = torch.arange(negatives + 50) < 50
        scores = torch.randn(negatives + 50, generator=torch.Generator().manual_seed(0)) + members
        rate = membership_rates(scores, members, resamples=100)[name]
        assert math.isnan(rate.value) == math.isnan(rate.low) == math.isnan(rate.high) != known


def test_perfect_games_leave_room_below_one() -> None:
    members = torch.arange(1000) % 2 == 0
    rates = membership_rates(members.double(), members)
    for name in ("accuracy", "f1", "auc", "advantage"):
        assert rates[name].value == rates[name].high == 1.0
        assert 0.98 < rates[name].low < 1.0
    assert rates["auc"].low == pytest.approx(0.025 ** (1 / 500))
    reverse = membership_rates(-members.double(), members)["auc"]
    assert reverse.value == reverse.low == 0
    assert reverse.high == pytest.approx(1 - 0.025 ** (1 / 500))


def test_the_bound_for_perfect_steps_is_exact_where_steps_fail_whole() -> None:
    """A step fails with probability e: its members then score below all non-members."""
    rng = np.random.default_rng(0)
    e, n_steps = 0.06, 20
    truth = (1 - e) ** 2 + e**2 / 2  # of a member and a non-member of different steps
    missed = 0
    for _ in range(400):
        fails = rng.random(n_steps) < e
        clusters = np.repeat(np.arange(n_steps), 4)
        members = np.tile([True, True, False, False], n_steps)
        good = np.where(members, 1.0, 0.0)
        scores = np.where(fails[clusters], 0.5 + 5 * (0.5 - good), good)
        scores += 1e-3 * rng.random(scores.size)
        rate = membership_rates(*map(torch.tensor, (scores, members, clusters)), resamples=100)[
            "auc"
        ]
        missed += not rate.low <= truth <= rate.high
    assert missed <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05)


@pytest.mark.parametrize(
    ("n_steps", "per_side", "shift", "together"),
    [(200, 0, 1.0, 0.0), (60, 0, 2.5, 0.0), (12, 8, 1.0, 0.5), (50, 8, 2.5, 0.5), (5, 8, 0.0, 0.3)],
)
def test_intervals_cover_the_truth(
    n_steps: int, per_side: int, shift: float, together: float
) -> None:
    truth = {
        "auc": norm.cdf(shift / math.sqrt(2)),
        "accuracy": norm.cdf(shift / 2),
        "advantage": 2 * norm.cdf(shift / 2) - 1,
    }
    reps = 300
    covered = dict.fromkeys(truth, 0)
    for seed in range(reps):
        if per_side:
            scores, members, clusters = steps(n_steps, per_side, shift, together, seed)
        else:
            scores, members, clusters = *games(n_steps, shift, seed), None
        rates = membership_rates(
            scores, members, clusters, scores > shift / 2, resamples=120, seed=seed
        )
        for name, value in truth.items():
            covered[name] += rates[name].low <= value <= rates[name].high
    assert min(covered.values()) >= reps * 0.95 - 3 * math.sqrt(reps * 0.05)


def test_tpr_intervals_cover_the_truth() -> None:
    reps, shift = 100, 2.0
    truth, covered = norm.sf(norm.isf(0.01) - shift), 0
    for seed in range(reps):
        scores, members = games(2200, shift, seed)
        rate = membership_rates(scores, members, resamples=100)["tpr_at_fpr_0.01"]
        covered += rate.low <= truth <= rate.high
    assert covered >= reps * 0.95 - 3 * math.sqrt(reps * 0.05)


def auc_of(members: np.ndarray, scores: np.ndarray) -> float:
    """Return the AUC by the ranks' sum, which takes a hundredth of scikit-learn's time."""
    n, ranks = int(members.sum()), rankdata(scores)
    return float(ranks[members].sum() - n * (n + 1) / 2) / (n * (len(members) - n))


@pytest.mark.parametrize("seed", range(10))
def test_the_auc_of_one_cluster_has_the_widest_interval(seed: int) -> None:
    """One cluster has no variance: neither end may be NaN (contributions sum to 0 but rounding)."""
    scores, members = (column.numpy() for column in games(30, seed=seed))
    one = np.zeros(30, dtype=np.int64)
    rate = clustered.auc(scores, members, one, 0.05, 100, np.random.default_rng(0))
    assert (rate.low, rate.high) == (0.0, 1.0)
    assert rate.value == pytest.approx(roc_auc_score(members, scores))


@pytest.mark.parametrize("per_cluster", [1, 2])
def test_the_auc_of_equal_scores_has_an_interval(per_cluster: int) -> None:
    """Equal scores have no variance, which is no evidence that the AUC is exactly 0.5."""
    scores, members = np.ones(60), np.arange(60) % 4 < 2
    code = np.arange(60) // per_cluster
    rate = clustered.auc(scores, members, code, 0.05, 100, np.random.default_rng(0))
    other = binomtest(0, 30 // per_cluster).proportion_ci(0.95).high  # of a side's clusters
    assert (rate.value, rate.low, rate.high) == pytest.approx((0.5, 0.5 - other, 0.5 + other))


@pytest.mark.parametrize("mean", [0.2, 0.3])
def test_the_least_error_of_equal_scores_is_where_their_interval_ends(mean: float) -> None:
    scores, members = np.ones(60), np.arange(60) % 4 < 2
    alpha = clustered.least_error(scores, members, mean)
    rate = clustered.auc(scores, members, np.arange(60), alpha, 1, np.random.default_rng(0))
    assert rate.low == pytest.approx(mean)


@pytest.mark.parametrize("decimals", [15, 0])
def test_clusters_are_drawn_in_blocks_like_their_games(monkeypatch, decimals: int) -> None:
    """A bootstrap at once and in blocks of draws, and one by ranks of the games drawn."""
    scores, members, clusters = steps(12, 6, 1.0, 0.3, 0)
    scores = scores.round(decimals=decimals)
    whole = membership_rates(scores, members, clusters)["auc"]
    monkeypatch.setattr(clustered, "NUMBERS_AT_ONCE", 1000)
    blocks = membership_rates(scores, members, clusters)["auc"]
    assert blocks.low == pytest.approx(whole.low, rel=1e-9)
    assert blocks.high == pytest.approx(whole.high, rel=1e-9)

    shares = []  # of each cluster in the error: the AUC's derivative in the cluster's weight
    for cluster in range(12):
        weight = 1 + 1e-4 * (clusters.numpy() == cluster)
        shares.append(roc_auc_score(members, scores, sample_weight=weight) - blocks.value)
    rng, drawn = np.random.default_rng(5), []
    for _ in range(600):
        games = np.concatenate([np.flatnonzero(clusters == c) for c in rng.integers(12, size=12)])
        drawn.append(auc_of(members[games].numpy(), scores[games].numpy()))
    assert drawn[-1] == pytest.approx(roc_auc_score(members[games], scores[games]), rel=1e-12)
    freedom = min(11, 24 / (kurtosis(shares, fisher=False) - 1))
    step = t.ppf(0.975, freedom) * np.std(drawn) / (blocks.value * (1 - blocks.value))
    logit = math.log(blocks.value / (1 - blocks.value))
    for got, sign in ((blocks.low, -1), (blocks.high, 1)):
        assert got == pytest.approx(1 / (1 + math.exp(-logit - sign * step)), abs=0.01)


def test_what_cannot_be_known_is_unknown() -> None:
    scores, members = games(50)
    broken = scores.clone()
    broken[7] = math.nan
    for rates in (
        membership_rates(broken, members, decisions=scores > 0),
        membership_rates(scores[:0], members[:0]),
    ):
        assert list(rates) == list(RATES)
        assert all(math.isnan(x) for r in rates.values() for x in (r.value, r.low, r.high))
    inside = membership_rates(scores, torch.ones(50, dtype=torch.bool), decisions=scores > 0)
    known = {name for name, rate in inside.items() if not math.isnan(rate.value)}
    assert known == {"accuracy", "f1"}
    assert math.isnan(membership_rates(scores[:1], members[:1])["accuracy"].value)


def test_order_of_games_and_names_of_clusters_do_not_matter() -> None:
    scores, members, clusters = steps(15, 4, 1.0, 0.3, 0)
    rates = membership_rates(scores, members, clusters)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    again = membership_rates(scores[order], members[order], 7 * clusters[order] - 3)
    for name, rate in rates.items():
        for end in ("value", "low", "high"):
            expected = pytest.approx(getattr(rate, end), rel=1e-9, nan_ok=True)
            assert getattr(again[name], end) == expected


# ---- the Metric -----------------------------------------------------------------------------


def filled(data, decisions=True) -> MembershipInference:
    metric = MembershipInference(resamples=100)
    scores, members, clusters = data
    for step in clusters.unique():
        here = clusters == step
        own = scores[here] > 0.5 if decisions else None
        metric.update(scores[here], members[here], int(step), own)
    return metric


@pytest.mark.parametrize("decisions", [True, False])
def test_metric_is_the_function_over_all_updates(decisions: bool) -> None:
    data = steps(12, 5, 1.0, 0.2, 0)
    given = data[0] > 0.5 if decisions else None
    values = filled(data, decisions).compute()
    for name, rate in membership_rates(*data, given, resamples=100).items():
        for suffix, value in (("", rate.value), ("_low", rate.low), ("_high", rate.high)):
            assert float(values[name + suffix]) == pytest.approx(value, rel=1e-12, nan_ok=True)


@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_processes_pool_their_games_even_if_one_saw_none(tmp_path) -> None:
    expected = filled(steps(6, 5, 1.0, 0.2, 0)).compute()

    def make(rank: int) -> MembershipInference:
        return filled(steps(6 * rank, 5, 1.0, 0.2, 0))

    for values in computed_together(make, tmp_path):
        torch.testing.assert_close(values, expected, equal_nan=True)


@pytest.mark.parametrize("decimals", [15, 0])
def test_values_are_scikit_learns(decimals: int) -> None:
    scores, members = games(501)
    scores = scores.round(decimals=decimals)
    decisions = scores > 0.7
    rates = membership_rates(scores, members, decisions=decisions)
    assert rates["auc"].value == pytest.approx(roc_auc_score(members, scores), rel=1e-12)
    assert rates["accuracy"].value == pytest.approx(accuracy_score(members, decisions), rel=1e-12)
    assert rates["f1"].value == pytest.approx(f1_score(members, decisions), rel=1e-12)
    tpr = (decisions & members).sum() / members.sum()
    tnr = (~decisions & ~members).sum() / (~members).sum()
    assert rates["advantage"].value == pytest.approx(float(tpr + tnr - 1), rel=1e-6)


VOCAB = 30


def tail_at_least(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial, summed term by term in rationals of p."""
    q = Fraction(p)
    return float(sum(math.comb(n, i) * q**i * (1 - q) ** (n - i) for i in range(k, n + 1)))


def bisect(function, target: float) -> float:
    """Where an increasing function on [0, 1] crosses ``target``."""
    low, high = 0.0, 1.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


@given(
    guessed=st.lists(st.integers(0, VOCAB - 1), min_size=1),
    used=st.lists(st.integers(0, VOCAB - 1), min_size=1),
)
def test_rates_are_scikit_learns(guessed: list[int], used: list[int]) -> None:
    counts = word_counts(WordGuess(torch.tensor(guessed)), torch.tensor(used), VOCAB)
    rates = precision_recall_f1(counts)
    members = [[int(t in ids) for t in range(VOCAB)] for ids in (used, guessed)]
    expected = precision_recall_fscore_support(*members, average="binary", zero_division=np.nan)
    got = [rates[name].value for name in ("precision", "recall", "f1")]
    np.testing.assert_allclose(got, expected[:3], rtol=1e-12)
    assert counts.tp + counts.fp == len(set(guessed))
    assert counts.tp + counts.fn == len(set(used))


@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 5), (3, 7), (12, 12), (9, 40), (40, 41)])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_interval_inverts_the_binomial_tails(k: int, n: int, confidence: float) -> None:
    rate = proportion(k, n, confidence)
    alpha = (1 - confidence) / 2
    low = 0.0 if k == 0 else bisect(lambda p: tail_at_least(k, n, p), alpha)
    high = 1.0 if k == n else bisect(lambda p: tail_at_least(k + 1, n, p), 1 - alpha)
    assert rate.value == k / n
    assert rate.low == pytest.approx(low, abs=1e-9)
    assert rate.high == pytest.approx(high, abs=1e-9)


def test_f1_interval_covers_the_f1_of_independent_types() -> None:
    """Each type is a hit, a false alarm or a miss, drawn independently."""
    chances = np.array([0.6, 0.1, 0.3])
    truth = 2 * chances[0] / (2 * chances[0] + chances[1] + chances[2])
    draws = np.random.default_rng(1).multinomial(150, chances, size=2000)
    rates = [precision_recall_f1(Counts(*map(int, draw)))["f1"] for draw in draws]
    covered = np.mean([r.low <= truth <= r.high for r in rates])
    assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)
    assert np.mean([r.high - r.low for r in rates]) < 0.2


@pytest.mark.parametrize(
    ("counts", "unknown"),
    [
        (Counts(0, 0, 0), {"precision", "recall", "f1"}),
        (Counts(0, 0, 4), {"precision"}),
        (Counts(0, 4, 0), {"recall"}),
    ],
)
def test_a_rate_of_nothing_is_unknown(counts: Counts, unknown: set[str]) -> None:
    rates = precision_recall_f1(counts)
    assert {name for name, rate in rates.items() if math.isnan(rate.value)} == unknown
    for name, rate in rates.items():
        assert math.isnan(rate.low) == math.isnan(rate.high) == (name in unknown)


TYPES = 40
id_lists = st.lists(st.integers(0, TYPES - 1), max_size=15)
batches = st.lists(
    st.tuples(id_lists, id_lists, st.none() | st.floats(0, 50)), min_size=1, max_size=6
)


def guess(types: list[int], n_types: float | None = None) -> WordGuess:
    return WordGuess(torch.tensor(types, dtype=torch.int64), n_types=n_types)


def truth(types: list[int]) -> torch.Tensor:
    return torch.tensor(types, dtype=torch.int64)


@given(batches)
def test_compute_uses_pooled_counts(data: list[tuple[list[int], list[int], float | None]]) -> None:
    metric = WordRecovery(TYPES)
    pooled, errors = Counts(), []
    for guessed, used, estimate in data:
        metric.update(guess(guessed, estimate), truth(used))
        pooled += word_counts(guess(guessed), truth(used), TYPES)
        if estimate is not None and used:
            errors.append(abs(estimate - len(set(used))) / len(set(used)))
    got = metric.compute()
    for name, rate in precision_recall_f1(pooled).items():
        assert float(got[name]) == pytest.approx(rate.value, nan_ok=True)
        assert float(got[f"{name}_low"]) == pytest.approx(rate.low, nan_ok=True)
        assert float(got[f"{name}_high"]) == pytest.approx(rate.high, nan_ok=True)
    expected = sum(errors) / len(errors) if errors else math.nan
    assert float(got["type_count_error"]) == pytest.approx(expected, rel=1e-5, nan_ok=True)
