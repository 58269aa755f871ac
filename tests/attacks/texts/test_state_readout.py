"""Against least squares, and as a start that descents get on from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.texts import embedding_descent as state_readout
from lightning_fedleak.attacks.texts.base import Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent, StateReadout
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_gpt2, tiny_llama


def text(b: int = 6, length: int = 10) -> Tensor:
    return torch.randint(3, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_ridge_regression_of_words_on_states(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (tiny_gpt2(layers=3) if causal else tiny_bert_mlm(layers=3)).double().eval()
    bottom = BottomModel(find_anatomy(model), 2)
    table = bottom.word_embeddings()
    monkeypatch.setattr(state_readout, "TEXTS", 5)
    monkeypatch.setattr(state_readout, "LENGTH", 12)
    readout = StateReadout.fit(bottom, table)
    ids = torch.randint(VOCAB, (5, 12), generator=torch.Generator().manual_seed(0))
    first = int(causal)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[2][:, first:]
    x, y = states.flatten(0, 1), table[ids[:, first:]].flatten(0, 1)
    mean = x.mean(0)
    # Ridge regression as least squares with d rows more.
    ridge = state_readout.RIDGE * (x - mean).square().sum(0).mean()
    more = ridge.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.lstsq(
        torch.cat([x - mean, more]), torch.cat([y - y.mean(0), torch.zeros_like(more)])
    ).solution
    torch.testing.assert_close(readout.weights, weights, rtol=1e-6, atol=1e-8)
    near = x[:4] * 0.1 + mean * 0.9
    expected = (near - mean) @ weights + y.mean(0)
    torch.testing.assert_close(readout.words(near), expected, rtol=1e-6, atol=1e-8)


def test_what_is_read_stays_among_the_words() -> None:
    bottom = BottomModel(find_anatomy(tiny_llama(layers=2)), 1)
    readout = StateReadout.fit(bottom, bottom.word_embeddings())
    far = readout.words(1e6 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(
        (far - readout.word).norm(dim=-1), torch.full((3,), readout.radius), rtol=1e-4, atol=0
    )
    assert torch.equal(readout.words(readout.state[None])[0], readout.word)


def test_padding_that_is_not_finite_does_no_harm() -> None:
    anatomy, ids = find_anatomy(tiny_bert_mlm(layers=2)), text()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    attack = EmbeddingDescent(1, steps=1)
    attack.prepare(anatomy)
    hidden = hidden_states(anatomy, 1, ids, mask)
    hidden[0, 6:] = torch.nan
    start = attack.start(Sent.from_states(hidden, mask))
    assert bool(torch.isfinite(start).all())
    assert torch.equal(start[0, 6:], attack.table.mean.expand(4, -1))
