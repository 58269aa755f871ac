"""Parts of inversion: sweeps, the server's copy of the bottom, a readout of states."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_fedleak.attacks.texts import embedding_descent as state_readout
from lightning_fedleak.attacks.texts.base import Deadline, Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import _Text, high_errors, sweep
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent, StateReadout
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers import models
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_gpt2, tiny_llama


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def spoilt(ids: Tensor, places: list[int]) -> Tensor:
    other = ids.clone()
    other[:, places] = (ids[:, places] + 11) % (VOCAB - 3) + 3
    return other


def case(layer: int = 3, b: int = 2, length: int = 9, seed: int = 0):
    """A bottom of a BERT, texts, their mask, what was sent, and candidates with the truth."""
    model = tiny_bert_mlm(layers=3).double()
    ids = drawn(b, length, seed=seed)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    sent = hidden_states(find_anatomy(model), layer, ids, mask)
    candidates = torch.cat([drawn(b, length, 5, seed=seed + 1), ids[..., None]], -1)
    bottom = BottomModel(find_anatomy(model), layer)
    return bottom, ids, mask, Sent.from_states(sent, mask), candidates


def sums(bottom: BottomModel, sent: Sent, texts: Tensor) -> Tensor:
    hidden = bottom.hidden(texts, sent.attention_mask)
    return sent.relative_errors(hidden).square().sum(1)


@pytest.mark.parametrize("places", [[0], [2, 3], [1, 4, 5, 6]])
def test_wrong_tokens_are_put_right(places: list[int]) -> None:
    bottom, ids, mask, sent, candidates = case()
    swept = sweep(bottom, sent, spoilt(ids, places), candidates, deadline=Deadline())
    assert torch.equal(swept.tokens[mask == 1], ids[mask == 1])
    assert swept.exact.tolist() == [True, True]
    assert swept.finished
    assert float(swept.errors.max()) < 1e-8
    assert swept.candidates > 0


def test_it_finds_what_brute_force_over_all_texts_finds() -> None:
    """Three places, three candidates each, none of them right: the best of 64 texts."""
    bottom, ids, _, sent, candidates = case(b=1, seed=4)
    start, places = spoilt(ids, [1, 3, 5]), [1, 3, 5]
    offered = start[..., None].repeat(1, 1, 3)
    offered[:, places] = candidates[:, places, :3]
    texts = []
    for chosen in itertools.product(range(4), repeat=3):
        one = start[0].clone()
        for place, k in zip(places, chosen, strict=True):
            if k < 3:
                one[place] = offered[0, place, k]
        texts.append(one)
    same = sent[torch.zeros(64, dtype=torch.int64)]
    best = torch.stack(texts)[sums(bottom, same, torch.stack(texts)).argmin()]
    swept = sweep(bottom, sent, start, offered, deadline=Deadline())
    assert torch.equal(swept.tokens[0], best)
    assert not bool(swept.exact[0])
    torch.testing.assert_close(
        swept.errors.square().sum(1), sums(bottom, sent, best[None]), rtol=1e-9, atol=0
    )


def test_errors_and_gradient_are_the_models() -> None:
    bottom, ids, mask, sent, candidates = case(b=1)
    start = spoilt(ids, [2])
    text = _Text(bottom, sent, start[0], candidates[0])
    several = torch.cat([start, ids, start.flip(1)])
    with torch.no_grad():
        for row, errors in zip(several, text._errors(several), strict=True):
            hidden = bottom.hidden(row[None], mask)[0]
            for place in range(9):
                by_hand = (hidden[place] - sent.hidden[0, place]).norm() * mask[0, place]
                assert float(errors[place]) == pytest.approx(float(by_hand), abs=1e-9)

        # To first order: move a short way towards each candidate and see what becomes of the error.
        words, step, rises = bottom.word_embeddings(start), 1e-5, []
        for place, k in itertools.product(range(7), range(6)):
            moved = words.clone()
            target = bottom.word_embeddings(candidates[0, place, k])
            moved[0, place] += step * (target - moved[0, place])
            total = sent.relative_errors(bottom.hidden_from(moved, mask)).square().sum()
            rises.append(float(total - sums(bottom, sent, start)))
        expected = sorted(range(42), key=lambda i: rises[i])
        expected = [i for i in expected if rises[i] < 0][:24]
        assert text._recommended().tolist() == expected


def test_high_errors_are_those_that_noise_does_not_explain() -> None:
    errors = torch.tensor([[1.0, 1.1, 0.9, 1.0, 5.0, 9.0], [1.0, 1.2, 0.9, 1.1, 1.0, 0.0]])
    real = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]).bool()
    high = high_errors(errors, real)
    assert high.nonzero().tolist() == [[0, 4]]


IDS = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, *[1] * 7], [1] * 9])


def lora() -> torch.nn.Module:
    with models.own_rng(0):
        return get_peft_model(
            models.tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )


@pytest.mark.parametrize(
    "make",
    [models.tiny_gpt2, models.tiny_llama, models.tiny_bert_mlm, models.tiny_roberta_mlm, lora],
)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_states_are_the_clients_from_tokens_and_from_their_embeddings(make, layer) -> None:
    model = make().train()
    anatomy = find_anatomy(model)
    bottom = BottomModel(anatomy, layer)
    padding = model.get_input_embeddings().padding_idx
    ids = IDS.masked_fill(MASK == 0, padding or 0)
    theirs = hidden_states(anatomy, layer, ids, MASK)[MASK == 1]
    assert torch.equal(bottom.hidden(ids, MASK)[MASK == 1], theirs)
    words = bottom.word_embeddings(ids).requires_grad_()
    states = bottom.hidden_from(words, MASK)
    torch.testing.assert_close(states[MASK == 1], theirs, rtol=1e-5, atol=1e-6)
    states[MASK == 1].square().sum().backward()
    assert words.grad is not None
    assert bool(words.grad[MASK == 1].any(-1).all())
    assert all(p.grad is None for p in model.parameters())
    assert (bottom.width, bottom.vocab_size) == (models.DIM, models.VOCAB)
    assert all(m.training for m in model.modules())


def test_what_cannot_be_run_is_refused() -> None:
    anatomy = find_anatomy(models.tiny_gpt2())
    with pytest.raises(ValueError, match=r"layer must be .* 0 to 2, got 3: the model has 2 blocks"):
        BottomModel(anatomy, 3)
    bottom = BottomModel(anatomy, 1)
    with pytest.raises(ValueError, match="truncate texts to 64 tokens"):
        bottom.hidden(torch.ones(1, 65, dtype=torch.int64))
    torch.testing.assert_close(
        bottom.cut_at_layer(0).hidden(IDS), hidden_states(anatomy, 0, IDS), rtol=0, atol=0
    )


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
