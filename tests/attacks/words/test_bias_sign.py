"""The sign rule on the head's bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.attacks.words.direct import BiasSign, bias_sign
from lightning_fedleak.model.anatomy import find_anatomy
from tests.helpers.models import tiny_gpt2


def bias_gradient(seed: int, tokens: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 50, generator=generator, dtype=torch.float64) * spread
    labels = torch.randint(50, (tokens,), generator=generator)
    bias = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits + bias, labels)
    return torch.autograd.grad(loss, bias)[0], labels


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), spread=st.floats(0.01, 4))
def test_names_used_types_only_and_all_that_outweigh_their_probability(
    seed: int, tokens: int, spread: float
) -> None:
    gradient, labels = bias_gradient(seed, tokens, spread)
    guess = bias_sign(gradient)
    assert set(guess.types.tolist()) <= set(labels.tolist())
    assert set(guess.types.tolist()) == {t for t in range(50) if gradient[t] < 0}
    assert guess.n_types == len(guess.types)
    values = gradient[guess.types]
    assert bool((values[:-1] <= values[1:]).all())


def test_a_head_without_bias_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="this head has none"):
        BiasSign().needs(find_anatomy(tiny_gpt2()))
