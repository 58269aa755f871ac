from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats
from torch import nn

from lightning_fedleak.evaluation.canaries import high_temperature_canaries, new_token_canaries
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_llama


def matrices(model: nn.Module) -> list[torch.Tensor]:
    found = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [*{id(m): m.detach() for m in found}.values()]


# A token of their own


@pytest.mark.parametrize("tied", [True, False])
def test_each_text_begins_and_ends_with_a_row_that_nothing_else_uses(tied: bool) -> None:
    model = tiny_llama(tied=tied)
    before = [m.clone() for m in matrices(model)]
    state = torch.get_rng_state()
    texts = new_token_canaries(model, 6, length=5, row_norm=0.02, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert [len(text) for text in texts] == [5] * 6
    own = [int(text[0]) for text in texts]
    assert own == [int(text[-1]) for text in texts] == [*range(VOCAB, VOCAB + 6)]
    assert all(2 < int(token) < VOCAB for text in texts for token in text[1:-1])  # special below
    assert model.config.vocab_size == VOCAB + 6
    assert len(matrices(model)) == 2 - tied
    for old, new in zip(before, matrices(model), strict=True):
        assert torch.equal(new[:VOCAB], old)
        usual = old[3:].norm(dim=1).mean()
        torch.testing.assert_close(new[VOCAB:].norm(dim=1), (0.02 * usual).expand(6))
        assert float(torch.corrcoef(new[VOCAB:]).fill_diagonal_(0).abs().max()) < 0.95
    logits = model(input_ids=torch.stack(texts)).logits
    assert logits.shape[-1] == VOCAB + 6


def test_what_cannot_get_rows_is_told_what_to_do() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="before get_peft_model"):
        new_token_canaries(peft.get_peft_model(tiny_llama(), config), 2)

    for make in (new_token_canaries, high_temperature_canaries):
        with pytest.raises(ValueError, match="masked model"):
            make(tiny_bert_mlm(), 2)


# High temperature


def sharp_llama() -> nn.Module:
    """Far from uniform, so that temperature and context make a difference."""
    model = tiny_llama(vocab=12)
    model.lm_head.weight.data.mul_(15)
    return model.train()


@torch.no_grad()
def law(model: nn.Module, prefix: torch.Tensor, temperature: float) -> torch.Tensor:
    """(12,) chances of the next token by hand; the first three ids are special."""
    logits = model.eval()(input_ids=prefix[None]).logits[0, -1].double()
    logits[:3] = -torch.inf
    return (logits / temperature).exp() / (logits / temperature).exp().sum()


@pytest.mark.parametrize("temperature", [0.8, 3.0])
def test_tokens_have_the_chances_that_the_temperature_gives_them(temperature: float) -> None:
    model = sharp_llama()
    first = int(model.config.bos_token_id)
    state = torch.get_rng_state()
    texts = high_temperature_canaries(model, 600, length=10, temperature=temperature, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert len({tuple(text.tolist()) for text in texts}) == 600
    assert {(int(text[0]), len(text)) for text in texts} == {(first, 11)}
    for place in (1, 2):  # the first token of a sample, and the next of those with a usual first
        usual = Counter(tuple(text[:place].tolist()) for text in texts).most_common(1)[0][0]
        here = [text for text in texts if tuple(text[:place].tolist()) == usual]
        seen = torch.bincount(torch.tensor([int(t[place]) for t in here]), minlength=12).double()
        chances = law(model, torch.tensor(usual), temperature)
        kept = chances * len(here) >= 5
        counts = torch.cat([seen[kept], seen[~kept].sum()[None]])
        expected = torch.cat([chances[kept], chances[~kept].sum()[None]]) * len(here)
        assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-4
