"""Against block-by-block runs of the plain model, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_fedleak.cli.commands.invert import Noise, gaussian_noise, utility
from lightning_fedleak.model.anatomy import find_anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.models import VOCAB, tiny_gpt2


def ids(b: int = 3, length: int = 20) -> Tensor:
    return torch.randint(5, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def gpt2_logits(model: torch.nn.Module, tokens: Tensor, layer: int, noise: Tensor) -> Tensor:
    """GPT-2 by hand, the noise put in between two of its blocks."""
    core = model.transformer
    states = core.wte(tokens) + core.wpe(torch.arange(tokens.shape[1]))
    for number, block in enumerate(core.h):
        states = states + noise if number == layer else states
        output = block(states)
        states = output if isinstance(output, Tensor) else output[0]
    states = states + noise if layer == len(core.h) else states
    return model.lm_head(core.ln_f(states))


def test_gaussian_noise_has_the_relative_or_absolute_deviation() -> None:
    scales = torch.tensor([0.0, 1.0, 10.0])
    hidden = torch.randn(40, 500, 3, generator=torch.Generator().manual_seed(0)) * scales + 7
    relative = gaussian_noise(hidden, Noise(0.5, True)).flatten(0, 1)
    torch.testing.assert_close(relative.std(0), 0.5 * scales, rtol=0.03, atol=1e-6)
    absolute = gaussian_noise(hidden, Noise(0.5, False)).flatten(0, 1)
    torch.testing.assert_close(absolute.std(0), torch.full((3,), 0.5), rtol=0.03, atol=0)
    assert not bool(gaussian_noise(hidden, Noise(0.0, True)).any())
    again = gaussian_noise(hidden, Noise(1.0, False)).flatten(0, 1)
    torch.testing.assert_close(again, 2 * absolute)


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_noise_on_states_is_added_at_the_split(layer: int) -> None:
    model = tiny_gpt2(layers=3).double().eval()
    anatomy = find_anatomy(model)
    noise = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        clean = model(input_ids=ids()).logits
        with place_of(anatomy, layer).on_states(noise.add):
            noised = model(input_ids=ids()).logits
        expected = gpt2_logits(model, ids(), layer, noise)
        torch.testing.assert_close(noised, expected)
        assert float((noised - clean).abs().max()) > 0.1
        assert torch.equal(model(input_ids=ids()).logits, clean)


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_utility_equals_the_next_token_predictions_of_the_plain_model(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fedleak.cli.commands.invert.LOGITS_AT_ONCE", at_once)
    model = tiny_gpt2(layers=3).double()
    anatomy = find_anatomy(model)
    model.train()
    tokens, state = ids(), torch.random.get_rng_state()
    measured = utility(anatomy, 2, tokens, Noise(0.7, True, 3))
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    model.eval()
    noise = gaussian_noise(hidden_states(anatomy, 2, tokens), Noise(0.7, True, 3))
    correct, nats = [], []
    with torch.no_grad():
        logits = gpt2_logits(model, tokens, 2, noise)
    for row in range(len(tokens)):
        for position in range(tokens.shape[1] - 1):
            probabilities = logits[row, position].softmax(0)
            correct.append(float(probabilities.argmax() == tokens[row, position + 1]))
            nats.append(-math.log(float(probabilities[tokens[row, position + 1]])))
    assert measured.accuracy == pytest.approx(sum(correct) / len(correct))
    assert measured.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    clean = utility(anatomy, 2, tokens, Noise(0.0, True))
    assert clean.perplexity != measured.perplexity
