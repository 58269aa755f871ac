"""ActivationCompression: the projection, dropped positions, their gradients, state and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.activations import ActivationCompression, ActivationNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.defenses.activations.activation_runs import Passing, distance, rewriting, step
from tests.helpers.inputs import context
from tests.helpers.inputs import padded_batch as batch
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2, tiny_llama, tiny_t5
from tests.taps.test_activation_tap import checkpointed

K = 5


def compressed(model, defense: ActivationCompression) -> tuple[Passing, Passing]:
    local = Passing(model, defense.layer)
    defense.before_setup(context(CausalLMModule(model)))
    return local, Passing(model, defense.layer)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_t5])
@pytest.mark.parametrize("layer", [0, 2])
def test_k_numbers_of_each_state_leave(build, layer: int) -> None:
    model = build(layers=3).train()
    local, shared = compressed(model, ActivationCompression(layer, keep_dims=K))
    for seed in range(3):
        step(model, batch(seed), defense=None)
    before = torch.cat([s.flatten(0, 1) for s in local.seen]).double()
    after = torch.cat([s.flatten(0, 1) for s in shared.seen]).double()
    values = torch.linalg.svdvals(after)
    assert float(values[K - 1]) > 1e-3 * float(values[0]) > 1e3 * float(values[K])
    # An orthogonal projection: the closest point in the span of what leaves.
    span = torch.linalg.svd(after, full_matrices=False)[2][:K]
    torch.testing.assert_close(before @ span.T @ span, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_gradient_is_that_of_the_linear_map(layer, reentrant) -> None:
    model = tiny_gpt2(layers=2, dropout=0.0).train()
    if reentrant is not None:
        model = checkpointed(model, reentrant)
    defense = ActivationCompression(layer, keep_dims=K)
    local, shared = compressed(model, defense)
    got = step(model, batch(), defense=defense)
    # The projection, from what came and what left, by least squares.
    tokens = torch.cat([s.flatten(0, 1) for s in local.seen[:1]]).double()
    sent = torch.cat([s.flatten(0, 1) for s in shared.seen[:1]]).double()
    matrix = torch.linalg.lstsq(tokens, sent).solution
    reference = tiny_gpt2(layers=2, dropout=0.0).train()

    def linear(states: Tensor) -> Tensor:
        return states @ matrix.float()

    rewriting(reference, layer, linear)
    expected = step(reference, batch())
    assert distance(got, expected) < 1e-3
    assert distance(step(tiny_gpt2(layers=2, dropout=0.0).train(), batch()), got) > 0.02


def test_noise_belongs_in_front() -> None:
    noise, smaller = ActivationNoise(2, 1.0), ActivationCompression(2, K)
    with pytest.raises(DefenseError, match="after 'activation_compression' at layer 2"):
        DefendedStrategy("auto", [smaller, noise])
    DefendedStrategy("auto", [noise, smaller])
    DefendedStrategy("auto", [smaller, ActivationNoise(3, 1.0)])
