"""Texts that are spoilt on purpose, and what brute force over all candidates finds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import Deadline, Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import _Text, high_errors, sweep
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.models import VOCAB, tiny_bert_mlm


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
