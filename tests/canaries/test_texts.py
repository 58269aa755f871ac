from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fedleak.evaluation.canaries import new_token_canaries, sampled_canaries
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
    for model in (peft.get_peft_model(tiny_llama(), config), tiny_bert_mlm()):
        with pytest.raises(ValueError, match="causal models, before get_peft_model"):
            new_token_canaries(model, 2)


# Written by the model


@pytest.mark.parametrize("unlikely_end", [0, 4])
def test_the_model_writes_texts_behind_the_prompts(unlikely_end: int) -> None:
    model = tiny_llama()
    state = torch.get_rng_state()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    settings = {"prompts": prompts, "length": 24, "unlikely_end": unlikely_end}
    texts = sampled_canaries(model, 40, seed=3, **settings)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training == tiny_llama().training
    assert {tuple(text.shape) for text in texts} == {(24,)}
    assert len({tuple(text.tolist()) for text in texts}) == 40
    for number, text in enumerate(texts):
        prompt = prompts[number % 2]
        assert torch.equal(text[: len(prompt)], prompt)
        assert int(text.min()) > 2  # special below
    again = sampled_canaries(model, 40, seed=3, **settings)
    assert all(torch.equal(a, b) for a, b in zip(texts, again, strict=True))


def test_the_end_is_unlikely_and_the_rest_is_not() -> None:
    model = tiny_llama().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # a model that is sure of what it writes
    texts = torch.stack(sampled_canaries(model, 60, length=20, unlikely_end=5))
    with torch.no_grad():
        log_probs = model(input_ids=texts).logits[:, :-1].log_softmax(-1)
    likely = log_probs.gather(-1, texts[:, 1:, None])[..., 0].mean(0)
    assert float(likely[:14].mean()) > float(likely[14:].mean()) + 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "temperature must be .*0.8"),
        ({"prompts": [torch.arange(9)], "length": 9}, "length must be"),
        ({"length": 8, "unlikely_end": 8}, "unlikely_end"),
        ({"prompts": [torch.tensor([5])], "length": 2}, "two texts are equal"),
    ],
)
def test_texts_that_cannot_be_written_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampled_canaries(tiny_llama(), 200, **settings)


def test_only_causal_models_write() -> None:
    with pytest.raises(ValueError, match="masked model"):
        sampled_canaries(tiny_bert_mlm(), 2)
