"""Scores of memorization, against loops over tokens."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.memorization import (
    Combined,
    CombinedReference,
    ErrorZone,
    Loss,
    LossRatio,
    MemorizationAttack,
    MinK,
    ShortAnswers,
    Windows,
    Zlib,
)
from lightning_fedleak.attacks.memorization.references import MIN_WEIGHT, fit_base, likelihood_ratio
from lightning_fedleak.attacks.memorization.scores import MAX_GAIN, WINDOWS, normal_scores
from lightning_fedleak.evaluation.metrics.released import check_unseen, membership_values
from lightning_fedleak.model.snapshots import Observation, References, ReleasedModel, TokenSnapshot


def random_release(seed: int, n: int = 7, width: int = 12) -> ReleasedModel:
    """Return answers about texts of different lengths, with labels that leave gaps."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.rand(n, width, generator=g) < 0.8
    labels[:, 0] = True
    lengths = torch.randint(1, width + 1, (n, 1), generator=g)
    labels &= torch.arange(width) < lengths

    def snapshot() -> TokenSnapshot:
        log_probs = -3 * torch.rand(n, width, generator=g) - 0.01
        deviations = torch.rand(n, width, generator=g) + 0.1
        greedy = torch.rand(n, width, generator=g) < 0.5
        return TokenSnapshot(
            log_probs * labels,
            -torch.rand(n, width, generator=g) * labels,
            deviations * labels,
            greedy & labels,
            labels,
        )

    return ReleasedModel(snapshot(), snapshot(), torch.randint(5, 90, (n,), generator=g))


def slow(name: str, r: ReleasedModel) -> list[float]:
    """Return the scores of an attack by loops, without those that rank within the pool."""
    scores = []
    for i in range(len(r.now.labels)):
        places = [j for j in range(r.now.labels.shape[1]) if r.now.labels[i, j]]
        lp = [float(r.now.log_probs[i, j]) for j in places]
        lp0 = [float(r.base.log_probs[i, j]) for j in places]
        loss, loss0 = -sum(lp) / len(lp), -sum(lp0) / len(lp)
        gains = [a - b for a, b in zip(lp, lp0, strict=True)]

        def lowest(t: TokenSnapshot, i: int = i, places: list[int] = places) -> float:
            z = sorted(
                float((t.log_probs[i, j] - t.means[i, j]) / t.deviations[i, j]) for j in places
            )
            k = max(1, int(0.2 * len(z)))
            return sum(z[:k]) / k

        def windows(gains: list[float] = gains) -> float:
            shares = []
            for size in WINDOWS:
                w = min(size, len(gains))
                sums = [sum(gains[a : a + w]) for a in range(len(gains) - w + 1)]
                shares.append(sum(s > 0 for s in sums) / len(sums))
            return sum(shares) / len(shares)

        wrong = [g for g, j in zip(gains, places, strict=True) if not r.now.greedy[i, j]]
        up, down = sum(g for g in wrong if g > 0), -sum(g for g in wrong if g < 0)
        learned = not wrong and not all(r.base.greedy[i, j] for j in places)
        zone = math.inf if learned else math.log((up + 1) / (down + 1))
        scores.append(
            {
                "loss": -loss,
                "loss_ratio": -loss / loss0,
                "capped": -(loss + sum(max(g - 0.5, 0) for g in gains) / len(lp)) / loss0,
                "zlib": sum(lp) / int(r.compressed[i]),
                "min_k": lowest(r.now),
                "windows": windows(),
                "error_zone": zone,
            }[name]
        )
    return scores


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("loss", Loss()),
        ("loss_ratio", LossRatio()),
        ("capped", LossRatio(most_gain=0.5)),
        ("zlib", Zlib()),
        ("min_k", MinK()),
        ("windows", Windows()),
    ],
)
@given(seed=st.integers(0, 10_000))
def test_a_score_is_that_of_a_loop(name: str, attack: MemorizationAttack, seed: int) -> None:
    released = random_release(seed)
    scores = attack.run(Observation(released=released)).scores
    np.testing.assert_allclose(scores, slow(name, released), atol=1e-5)


@given(seed=st.integers(0, 10_000))
def test_error_zone_is_that_of_a_loop_and_a_text_that_was_learned_is_first(seed: int) -> None:
    released = random_release(seed)
    scores, expected = ErrorZone().score(released), slow("error_zone", released)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(scores[finite], np.array(expected)[finite], atol=1e-5)
    if finite.any() and not finite.all():
        assert scores[~torch.tensor(finite)].min() > scores[torch.tensor(finite)].max()


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_normal_scores_share_ties(values: list[int]) -> None:
    expected = [NormalDist().inv_cdf((rank - 0.5) / len(values)) for rank in rankdata(values)]
    np.testing.assert_allclose(normal_scores(torch.tensor(values)), expected, atol=1e-9)


def test_combined_adds_both_ranks() -> None:
    released = random_release(3)
    parts = (LossRatio(most_gain=MAX_GAIN), ErrorZone())
    expected = sum(normal_scores(part.score(released)) for part in parts)
    torch.testing.assert_close(Combined().score(released), expected)


@pytest.mark.parametrize(
    "attack", [LossRatio(), LossRatio(MAX_GAIN), ErrorZone(), Windows(), Combined()]
)
def test_before_the_first_step_all_texts_tie(attack: MemorizationAttack) -> None:
    """The base model beside itself: every base-calibrated score has an AUC of exactly one half."""
    tokens = random_release(5).base
    tokens.greedy[0] = True  # a text that the base already predicts
    scores = attack.score(ReleasedModel(tokens, tokens, torch.ones(7)))
    assert len(scores.unique()) == 1


@pytest.mark.parametrize("attack", [Loss(), LossRatio(), Zlib(), MinK(), Windows(), ErrorZone()])
def test_what_is_no_label_changes_nothing(attack: MemorizationAttack) -> None:
    released = random_release(2)
    now = released.now
    noisy = TokenSnapshot(
        torch.where(now.labels, now.log_probs, torch.tensor(-50.0)),
        torch.where(now.labels, now.means, torch.tensor(-9.0)),
        torch.where(now.labels, now.deviations, torch.tensor(3.0)),
        now.greedy,
        now.labels,
    )
    other = ReleasedModel(noisy, released.base, released.compressed)
    torch.testing.assert_close(attack.score(other), attack.score(released))


def test_infinite_answers_are_refused() -> None:
    released = random_release(0)
    released.now.log_probs[0, 0] = -math.inf
    with pytest.raises(UnusableObservation, match="not finite"):
        Loss().run(Observation(released=released))


def test_short_answers_are_compared_with_their_answers_other_texts() -> None:
    released = replace(random_release(4), answers=torch.tensor([0, 0, 0, 1, 1, 1, 2]))
    mean = released.now.mean_log_probs()
    expected = []
    for row, answer in enumerate([0, 0, 0, 1, 1, 1, 2]):
        others = [n for n in range(7) if n != row and [0, 0, 0, 1, 1, 1, 2][n] == answer]
        total = sum(float(mean[n]) for n in others) + float(mean.mean())
        expected.append(float(mean[row]) - total / (len(others) + 1))
    assert ShortAnswers().score(released).tolist() == pytest.approx(expected)


def test_answers_of_their_own_have_the_loss_ratio() -> None:
    released = replace(random_release(4), answers=torch.arange(7))
    torch.testing.assert_close(ShortAnswers().score(released), LossRatio().score(released))
    with pytest.raises(UnusableObservation, match="share an answer"):
        ShortAnswers().score(random_release(4))


@pytest.mark.parametrize("likeness", [0.0, 1.0])
def test_a_reference_is_fitted_beside_the_base_if_it_explains_enough(likeness: float) -> None:
    release = random_release(3, 40)
    now, labels = release.now.log_probs, release.now.labels
    other = random_release(4, 40).now.log_probs
    release = replace(release, base=release.base._replace(labels=labels))
    mixed = (likeness * now + (1 - likeness) * other + 0.3 * other) * labels
    reference = release.base._replace(log_probs=mixed)
    beside = replace(release, references=References.unseen(reference))
    base, weight = fit_base(beside)
    parts = [part.log_probs[labels].double().numpy() for part in (release.base, reference)]
    features = np.stack([np.ones_like(parts[0]), *parts], 1)
    fit = np.linalg.lstsq(features, now[labels].double().numpy(), rcond=None)[0]
    assert weight == pytest.approx(fit[2])
    assert base.log_probs[labels].numpy() == pytest.approx(np.minimum(features @ fit, 0), abs=1e-5)
    assert not base.log_probs[~labels].any()
    assert (weight >= MIN_WEIGHT) is bool(likeness)
    expected = Combined().score(replace(release, base=base) if likeness else release)
    assert torch.equal(CombinedReference().score(beside), expected)


def test_the_likelihood_ratio_is_that_of_two_normal_distributions() -> None:
    """By loops over texts: own means where there are some, else shifted ones, and two variances."""
    g = torch.Generator().manual_seed(0)
    inside = torch.rand(4, 60, generator=g) < 0.5
    inside[:, 0], inside[:, 1] = True, False
    others = torch.randn(4, 60, generator=g, dtype=torch.float64) + 2 * inside
    scores = torch.randn(60, generator=g, dtype=torch.float64)
    ratios = likelihood_ratio(scores, others, inside)
    values: dict[bool, dict[int, np.ndarray]] = {True: {}, False: {}}
    for side, texts in values.items():
        for text in range(60):
            if len(found := others[inside[:, text] == side, text].numpy()):
                texts[text] = found
    deviations = {
        side: math.sqrt(
            sum(((found - found.mean()) ** 2).sum() for found in texts.values())
            / sum(len(found) - 1 for found in texts.values())
        )
        for side, texts in values.items()
    }
    both = values[True].keys() & values[False].keys()
    shift = np.mean([values[True][n].mean() - values[False][n].mean() for n in both])
    for text in range(60):
        means = {side: texts[text].mean() for side, texts in values.items() if text in texts}
        means.setdefault(True, means.get(False, 0) + shift)
        means.setdefault(False, means[True] - shift)
        score = float(scores[text])
        with_it, without = (NormalDist(means[s], deviations[s]).pdf(score) for s in (True, False))
        assert ratios is not None
        assert float(ratios[text]) == pytest.approx(math.log(with_it / without))
    assert likelihood_ratio(scores, others[:1], inside[:1]) is None
    halves = torch.stack([inside[2], ~inside[2]])
    assert likelihood_ratio(scores, others[:2], halves) is None  # one score on either side


def test_the_mean_of_references_is_of_those_without_the_text() -> None:
    answers = [
        random_release(seed, 40).base._replace(labels=torch.ones(40, 12) > 0) for seed in range(3)
    ]
    stacked = np.stack([answer.log_probs.numpy() for answer in answers])
    inside = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    inside[:, 5] = True
    mean = References(answers, inside).log_probs.numpy()
    gains = []
    for text, seen in enumerate(inside.T.numpy()):
        if not seen.all():
            assert mean[text] == pytest.approx(stacked[~seen, text].mean(0), abs=1e-5)
        if seen.any() and not seen.all():
            gains.append(stacked[seen, text].mean(0) - stacked[~seen, text].mean(0))
    assert mean[5] == pytest.approx(stacked[:, 5].mean(0) - np.mean(gains), abs=1e-5)


def test_beside_references_with_and_without_each_text_ratios_are_added() -> None:
    """Each text has a level of its own that only references show."""
    g = torch.Generator().manual_seed(0)
    flat = torch.ones(200, 12, dtype=torch.bool)
    level = torch.randn(200, 1, generator=g)

    def snapshot(trained: torch.Tensor) -> TokenSnapshot:
        log_probs = -5 + level + 0.3 * torch.randn(200, 12, generator=g) + 0.3 * trained[:, None]
        return TokenSnapshot(log_probs, -6.0 * flat, 1.0 * flat, ~flat, flat)

    drawn = torch.rand(5, 200, generator=g) < 0.5
    base = snapshot(~flat[:, 0])._replace(log_probs=-5 + 0.3 * torch.randn(200, 12, generator=g))
    answers = [snapshot(members) for members in drawn[1:]]
    release = ReleasedModel(snapshot(drawn[0]), base, torch.ones(200))
    aucs = []
    for references in (
        References(answers, drawn[1:]),
        References(answers, torch.zeros_like(drawn[1:])),
        References.unseen(answers[0]),
    ):
        score = CombinedReference().score(replace(release, references=references))
        aucs.append(membership_values(score, drawn[0])["auc"])
    assert aucs[0] > aucs[1] > aucs[2]

    def scored(answers: list[TokenSnapshot], inside: torch.Tensor) -> torch.Tensor:
        references = References(answers, inside)
        return CombinedReference().score(replace(release, references=references))

    # The rows of another reference, or of none, are no better than no reference; a copy adds none.
    alone = Combined().score(release)
    for inside in (drawn[1:].roll(1, 0), ~drawn[1:]):
        torch.testing.assert_close(scored(answers, inside), alone)
    twice = scored(answers[:1] * 2, drawn[[1, 1]])
    torch.testing.assert_close(twice, scored(answers[:1], drawn[[1]]))
    everything = torch.ones(1, 200, dtype=torch.bool)
    references = References(answers[:1], everything)
    check_unseen(references, base, torch.ones(200), drawn[0])  # nothing is left to compare
    torch.testing.assert_close(references.log_probs, answers[0].log_probs)
