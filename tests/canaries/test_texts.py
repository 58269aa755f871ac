from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fedleak.evaluation.canaries import new_token_canaries
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

    with pytest.raises(ValueError, match="masked model"):
        new_token_canaries(tiny_bert_mlm(), 2)
