"""What a run costs that changes a defence's settings on the way, or is resumed with others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_fedleak.defenses import GradientNoise, TokenLDP
from lightning_fedleak.defenses.noise import gaussian_epsilon
from tests.helpers.inputs import context
from tests.helpers.models import tiny_gpt2

IDS = torch.randint(3, 97, (4, 10), generator=torch.Generator().manual_seed(0))


def after(defense: GradientNoise, releases: int) -> GradientNoise:
    parameter = nn.Parameter(torch.zeros(3))
    for _ in range(releases):
        defense.on_gradients([parameter], context(nn.Module()))
    return defense


def resumed(before: GradientNoise, now: GradientNoise) -> GradientNoise:
    now.load_state_dict(before.state_dict())
    return now


def test_gradient_noise_remembers_how_little_it_was() -> None:
    weak = after(GradientNoise(1.0, 0.5), 3)
    strong = after(resumed(weak, GradientNoise(1.0, 4.0)), 2)
    expected = gaussian_epsilon(sigma=0.5 / math.sqrt(3 / 0.5**2 + 2 / 4.0**2), delta=1e-5)
    assert strong.epsilon(1e-5) == pytest.approx(expected, rel=1e-12)
    assert strong.epsilon(1e-5) > weak.epsilon(1e-5)


@pytest.mark.parametrize(
    "void", [GradientNoise(None, 1.0), GradientNoise(1.0, 0.0), GradientNoise(1.0, 1.0, seed=1)]
)
def test_gradient_noise_does_not_forget_that_nothing_held(void: GradientNoise) -> None:
    assert resumed(after(void, 1), GradientNoise(1.0, 4.0)).epsilon(1e-5) == math.inf


def released(defense: TokenLDP) -> TokenLDP:
    model = tiny_gpt2()
    defense.before_setup(context(model))
    defense.on_batch({"input_ids": IDS, "labels": IDS}, context(model))
    defense.teardown()
    return defense


def test_token_ldp_counts_each_release_as_the_dearest() -> None:
    dear = released(TokenLDP("grr", 50.0, memoize=False))
    assert dear.epsilon_spent == 50.0
    cheap = TokenLDP("grr", 1.0, memoize=False)
    cheap.load_state_dict(dear.state_dict())
    assert cheap.epsilon_per_sequence == 1.0
    assert cheap.epsilon_spent == 50.0
    assert released(cheap).epsilon_spent == 100.0
    again = TokenLDP("grr", 1.0, memoize=False)
    again.load_state_dict(cheap.state_dict())
    assert again.epsilon_spent == 100.0
    dear.epsilon = 1.0
    assert released(dear).epsilon_spent == 100.0


@pytest.mark.filterwarnings("ignore:TokenLDP")
def test_token_ldp_does_not_forget_that_nothing_held() -> None:
    void = released(TokenLDP("grr", 5.0, domain="batch"))
    resumed = TokenLDP("grr", 5.0)
    resumed.load_state_dict(void.state_dict())
    assert resumed.epsilon_spent == math.inf
