"""What a defence does to layers that are not there, against a model in which they are."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import nn

from lightning_fedleak.defenses import CanaryGradient, Defense, Freeze, GradientNoise
from tests.defenses.test_gradient_noise import flat, parameters_with
from tests.helpers.inputs import context

B, G, K = 5, 3, 4


def canary(seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> CanaryGradient:
    generator = torch.Generator().manual_seed(seed)
    return CanaryGradient(scale * torch.randn(B, G, K, generator=generator, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("clip", [0.1, 30.0, 1e5])
def test_each_game_is_clipped_as_if_its_layers_were_in_the_update(scale, clip):
    given = canary(scale=scale)
    defense = GradientNoise(clip=clip, sigma=0.0)
    got = defense.on_canary(given, parameters_with(dtype=torch.float64), context())
    for game in range(G):
        update = parameters_with(dtype=torch.float64)
        crafted = nn.Parameter(torch.zeros(K, dtype=torch.float64))
        crafted.grad = given.samples[:, game].sum(0)
        GradientNoise(clip=clip, sigma=0.0).on_gradients([*update, crafted], context())
        torch.testing.assert_close(got.released[game], crafted.grad, rtol=1e-12, atol=0)
    assert got.noise_std == 0


def test_the_noise_has_the_law_of_the_updates_and_is_no_noise_of_the_update():
    defense = GradientNoise(clip=2.0, sigma=0.5, seed=3)
    zero = CanaryGradient(torch.zeros(1, 200, 100))
    got = defense.on_canary(zero, parameters_with(scale=1e-3), context())
    assert got.noise_std == 1.0
    noise = got.released.flatten().numpy()
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-3
    again = defense.on_canary(zero, parameters_with(scale=1e-3), context())
    assert abs(torch.corrcoef(torch.stack([got.released, again.released]).flatten(1))[0, 1]) < 0.05
    parameters = [nn.Parameter(torch.zeros(200, 100))]
    defense.on_gradients(parameters, context())
    update = parameters[0].grad
    assert abs(torch.corrcoef(torch.stack([got.released, update]).flatten(1))[0, 1]) < 0.05


def test_the_update_and_its_noise_stay_what_they_would_have_been():
    plain, watched = GradientNoise(1.0, 0.3, seed=1), GradientNoise(1.0, 0.3, seed=1)
    for seed in range(3):
        expected, got = parameters_with(seed), parameters_with(seed)
        before = flat(got)
        watched.on_canary(canary(seed), got, context())
        assert torch.equal(flat(got), before)
        plain.on_gradients(expected, context())
        watched.on_gradients(got, context())
        assert torch.equal(flat(got), flat(expected))
    assert plain.state_dict() == watched.state_dict()


def test_two_defences_in_a_row_scale_and_add_their_noise():
    first, second = GradientNoise(None, 2.0, seed=0), GradientNoise(0.5, 3.0, seed=1)
    zero = CanaryGradient(torch.zeros(1, 5000, 4, dtype=torch.float64))
    between = first.on_canary(zero, parameters_with(), context())
    after = second.on_canary(between, parameters_with(), context())
    norm = float(flat(parameters_with()).norm())
    joint = between.released.norm(dim=1).square().add(norm**2).sqrt()
    clipped = between.released * (0.5 / joint).clamp(max=1)[:, None]
    torch.testing.assert_close(after.released - after.noise, torch.zeros(5000, 4).double())
    assert after.noise_std == pytest.approx(float((after.released).std()), rel=0.02)
    assert float((after.released - clipped).std()) == pytest.approx(1.5, rel=0.02)
    assert math.hypot(2 * float((0.5 / joint).square().mean().sqrt()), 1.5) == pytest.approx(
        after.noise_std, rel=1e-6
    )


class Halves(Defense):
    name, guarantee = "halves", "none"

    def on_gradients(self, parameters, context):
        for p in parameters:
            p.grad.mul_(0.5)


def test_a_defence_that_does_not_say_what_it_does_to_a_canary_is_known_as_such():
    class Says(Halves):
        def on_canary(self, canary, parameters, context):
            return canary.scaled(torch.full((canary.samples.shape[1],), 0.5))

    class Other(Says):
        def on_gradients(self, parameters, context):
            for p in parameters:
                p.grad.sign_()

    class OtherNoise(GradientNoise):
        def on_gradients(self, parameters, context):
            pass

    assert [d.acts_on_canaries for d in (Halves(), Says(), Other(), OtherNoise(1.0, 1.0))] == [
        False, True, False, False,
    ]  # fmt: skip
    assert GradientNoise(1.0, 1.0).acts_on_canaries
    assert Freeze("head").acts_on_canaries
    assert Freeze("head").on_canary(given := canary(), [], context()) is given
