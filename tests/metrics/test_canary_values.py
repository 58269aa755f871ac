"""Exposure and extraction of canaries against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binomtest

from lightning_fedleak.attacks.memorization import Canaries, ExtractionGuess
from lightning_fedleak.evaluation.metrics import released
from lightning_fedleak.evaluation.metrics.released import canary_values
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot


def guess_of(scores: torch.Tensor, log_probs: torch.Tensor | None = None) -> ExtractionGuess:
    now = scores if log_probs is None else log_probs
    return ExtractionGuess(
        now, now - scores, torch.zeros(len(scores), dtype=torch.bool), torch.ones(len(scores)) > 0
    )


def split(n: int, n_others: int, between: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(n + between + n_others)
    return place < n, place >= n + between


@pytest.mark.parametrize(("n", "n_others"), [(11, 40), (33, 200)])
def test_exposure_is_the_rank_of_the_median_canary(n: int, n_others: int) -> None:
    scores = torch.randn(n + n_others, generator=torch.Generator().manual_seed(n)).double()
    members, others = split(n, n_others)
    scores[:n] += 1.5
    values = canary_values(guess_of(scores), Canaries(), members, others)
    ranks = sorted(1 + sum(float(o) >= float(s) for o in scores[n:]) for s in scores[:n])
    assert values["exposure"] == pytest.approx(math.log2(n_others + 1) - math.log2(ranks[n // 2]))
    ends = binomtest(ranks[n // 2] - 1, n_others).proportion_ci(1 - 0.05 / 2, method="exact")
    assert values["exposure_low"] == pytest.approx(-math.log2(ends.high))
    assert values["exposure_high"] == pytest.approx(-math.log2(ends.low))
    assert values["exposure_capped"] == pytest.approx(sum(r == 1 for r in ranks) / n)


def test_above_all_others_it_is_capped_and_has_no_upper_end() -> None:
    members, others = split(10, 31)
    scores = members.double()
    values = canary_values(guess_of(scores), Canaries(), members, others)
    assert values["exposure"] == values["exposure_cap"] == 5
    assert values["exposure_low"] < 5
    assert math.isinf(values["exposure_high"])
    assert values["exposure_capped"] == 1
    tied = canary_values(guess_of(scores * 0), Canaries(), members, others)
    assert (tied["exposure"], tied["exposure_capped"], tied["auc"]) == (0, 0, 0.5)


def test_the_interval_of_exposure_holds_the_true_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of all possible non-members above the median canary, under a known law."""
    for name in ("membership_values", "extraction_values"):  # which are not asked for
        monkeypatch.setattr(released, name, lambda *_, **__: {})
    generator, wrong = torch.Generator().manual_seed(0), 0
    members, others = split(15, 60)
    for _ in range(400):
        scores = torch.randn(75, generator=generator).double() + members * 1.2
        values = canary_values(guess_of(scores), Canaries(), members, others, alpha=0.2)
        true = -math.log2(float(torch.special.ndtr(-scores[:15].median())))
        wrong += not values["exposure_low"] <= true <= values["exposure_high"]
    assert wrong <= 60  # at most alpha / 2 = 40 of 400, and three deviations


def test_canaries_of_other_tiers_are_on_neither_side() -> None:
    members, others = split(10, 20, between=5)
    scores = torch.arange(35).double()
    apart = canary_values(guess_of(scores), Canaries(), members, others)
    rows = members | others
    alone = canary_values(guess_of(scores[rows]), Canaries(), members[rows], others[rows])
    assert apart == pytest.approx(alone, nan_ok=True)


def snapshot(generator: torch.Generator, labels: torch.Tensor) -> TokenSnapshot:
    values = -torch.rand(labels.shape, generator=generator)
    greedy = torch.rand(labels.shape, generator=generator) < 0.7
    return TokenSnapshot(values, values, values, greedy, labels)


@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_only_the_last_label_tokens_count(tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.rand(12, 9, generator=generator) < 0.8
    labels[:, 2:5] = True
    now, base = (snapshot(generator, labels) for _ in range(2))
    model = ReleasedModel(now, base, torch.ones(12))
    attack = Canaries(tokens)
    guess = attack.run(Observation(released=model))
    for row in range(12):
        places = labels[row].nonzero()[:, 0].tolist()[-(tokens or 99) :]
        assert float(guess.log_probs[row]) == pytest.approx(
            sum(float(now.log_probs[row, p]) for p in places)
        )
        assert bool(guess.greedy[row]) == all(bool(now.greedy[row, p]) for p in places)
        gain = sum(float(now.log_probs[row, p] - base.log_probs[row, p]) for p in places)
        assert float(attack.score(model)[row]) == pytest.approx(gain, abs=1e-6)
