"""BottomModel: the server's copy of the client's part."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers import models

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
