"""Against autograd on the plain model, and texts that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, Sent
from lightning_fedleak.attacks.texts.descent import Descent, DescentSettings
from lightning_fedleak.attacks.texts.token_relaxation import TokenRelaxation
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.attacks.texts.test_embedding_descent import MODELS, RARE, slow_clock, text
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_gpt2


def prepared(model: Any, layer: int = 2, **settings: Any) -> TokenRelaxation:
    rare = {name: settings.pop(name) for name in RARE if name in settings}
    attack = TokenRelaxation(layer, descent=DescentSettings(**rare), **settings)
    attack.prepare(find_anatomy(model))
    return attack


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_the_plain_model(name: str) -> None:
    model = MODELS[name]().double().eval()
    ids, mask = text()
    sent = hidden_states(find_anatomy(model), 2, ids, mask)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(*ids.shape, VOCAB, generator=generator).double()

    leaf = weights.clone().requires_grad_()
    shares = (leaf / 0.5).exp() / (leaf / 0.5).exp().sum(-1, keepdim=True)
    words = shares @ model.get_input_embeddings().weight.detach()
    out = model(inputs_embeds=words, attention_mask=mask, output_hidden_states=True)
    off = (out.hidden_states[2] - sent).square().sum(-1)
    (off * mask).sum().backward()

    attack = prepared(model, weighting="paper", temperature=0.5)
    gradient, _ = Descent(attack, Sent.from_states(sent, mask), Deadline())._gradient(
        weights, Sent.from_states(sent, mask)
    )
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_found(name: str) -> None:
    model = MODELS[name]().train()
    ids, mask = text()
    sent = hidden_states(find_anatomy(model), 1, ids, mask)
    before = torch.get_rng_state()
    guess = prepared(model, 1, steps=400, lr=0.5).reconstruct(sent, mask, None)
    assert guess.finished
    assert float((guess.tokens == ids)[mask == 1].float().mean()) > 0.9
    assert bool((guess.tokens[mask == 0] == NOTHING).all())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_the_guess_is_the_token_of_largest_share() -> None:
    attack = prepared(tiny_gpt2(), temperature=2.0)
    weights = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens, ahead = attack.decode(weights)
    for row in range(2):
        for place in range(3):
            shares = (weights[row, place] / 2).exp()
            first, second = sorted((shares / shares.sum()).tolist())[:-3:-1]
            assert int(tokens[row, place]) == int(weights[row, place].argmax())
            assert float(ahead[row, place]) == pytest.approx(first - second, abs=1e-6)


def test_weights_in_one_run_are_bounded() -> None:
    model = tiny_bert_mlm()
    ids, mask = text(5, 8)
    sent = hidden_states(find_anatomy(model), 1, ids, mask)
    attack = prepared(model, 1, steps=2, most_weights=2 * 8 * VOCAB + 1)
    sizes: list[int] = []
    words = attack.words

    def noting(variables: torch.Tensor) -> torch.Tensor:
        sizes.append(variables.numel())
        return words(variables)

    attack.words = noting  # type: ignore[method-assign]
    attack.reconstruct(sent, mask, None)
    assert sizes == [2 * 8 * VOCAB] * 4 + [8 * VOCAB] * 2


def test_a_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch)
    model = tiny_gpt2(layers=2)
    ids, mask = text(3)
    sent = hidden_states(find_anatomy(model), 1, ids, mask)
    settings = {"steps": 10**6, "stop": "cosine", "cosine": 1.0}
    guess = prepared(model, 1, budget_seconds=0.2, **settings).reconstruct(sent, mask, None)
    assert not guess.finished
    assert 0 < int(guess.steps.min()) < 10**6
    assert bool((guess.tokens[mask == 1] != NOTHING).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a number above 0, got 0.0"),
        ({"most_weights": 0}, "most_weights must be an integer of at least 1, got 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenRelaxation(1, **settings)


def test_config_names_the_attack() -> None:
    config = TokenRelaxation(3, temperature=0.5).config()
    assert config["temperature"] == 0.5
    assert config["layer"] == 3
