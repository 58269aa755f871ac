"""The softmax relaxation against autograd on the plain model, and texts that are known."""

from __future__ import annotations

import pytest
import torch

from lightning_fedleak.attacks import DescentSettings
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, Sent
from lightning_fedleak.attacks.texts.embedding_descent import _Descent
from lightning_fedleak.labs.token_relaxation import TokenRelaxation
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.attacks.texts.test_embedding_descent import MODELS
from tests.helpers.inputs import padded_text as text
from tests.helpers.models import VOCAB

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_the_plain_model(name: str) -> None:
    model = MODELS[name]().double().eval()
    ids, mask = text()
    sent = hidden_states(find_anatomy(model), 2, ids, mask)
    weights = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(0)).double()
    leaf = weights.clone().requires_grad_()
    shares = leaf.exp() / leaf.exp().sum(-1, keepdim=True)
    words = shares @ model.get_input_embeddings().weight.detach()
    out = model(inputs_embeds=words, attention_mask=mask, output_hidden_states=True)
    difference = (out.hidden_states[2] - sent).square().sum(-1)
    (difference * mask).sum().backward()
    attack = TokenRelaxation(2, initial="mean", descent=DescentSettings(weighting="paper"))
    attack.prepare(find_anatomy(model))
    observed = Sent.from_states(sent, mask)
    gradient, _ = _Descent(attack, observed, Deadline())._gradient(weights, observed)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-8, atol=1e-12)


def test_texts_are_recovered_and_the_model_is_left_as_it_was() -> None:
    model = MODELS["llama"]().train()
    ids, mask = text()
    sent = hidden_states(find_anatomy(model), 1, ids, mask)
    before = torch.get_rng_state()
    attack = TokenRelaxation(1, 400, 0.5, initial="mean")
    attack.prepare(find_anatomy(model))
    guess = attack.reconstruct(sent, mask, None)
    assert guess.finished
    assert float((guess.tokens == ids)[mask == 1].float().mean()) > 0.9
    assert bool((guess.tokens[mask == 0] == NOTHING).all())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert model.training
