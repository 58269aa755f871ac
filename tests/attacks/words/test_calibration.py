"""Public text and its gradients: against plain autograd on a copy, and without a trace."""

import copy

import pytest
import torch
from torch.nn import functional as F

import lightning_fedleak.model.model_runs as model_runs
from lightning_fedleak.attacks.public_text import PublicText, gradient_of
from lightning_fedleak.attacks.words.head_gradients import gradient_parts
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from tests.attacks.words.language import generator
from tests.helpers import models

MODELS = {
    "gpt2": (models.tiny_gpt2, "causal"),
    "llama untied": (models.tiny_llama, "causal"),
    "bert": (models.tiny_bert_mlm, "masked"),
    "t5": (models.tiny_t5, "seq2seq"),
}


def public_text(n=12, seed=5):
    g = generator(seed)
    lengths = torch.randint(3, 14, (n,), generator=g).tolist()
    return PublicText([torch.randint(5, models.VOCAB, (k,), generator=g).tolist() for k in lengths])


def batch_of(kind, seed=1):
    return public_text().batch(5, 10, generator(seed), kind=kind, mask_token_id=4)


def autograd_gradients(model, batch, *names):
    """The same by the model's own loss, on a copy."""
    twin = copy.deepcopy(model).eval()
    out = twin(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
    out.loss.backward()
    return {
        "head.weight": twin.get_output_embeddings().weight.grad,
        "embedding.weight": twin.get_input_embeddings().weight.grad,
        **{name: twin.get_parameter(name).grad for name in names},
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_gradient_is_that_of_the_models_own_loss(name, at_once, monkeypatch):
    monkeypatch.setattr(model_runs, "LOGITS_AT_ONCE", at_once)
    make, kind = MODELS[name]
    model = make()
    batch = batch_of(kind)
    inner = [n for n, p in model.named_parameters() if ".0." in n and p.dim() == 2][-1]
    result = gradient_of(find_anatomy(model), batch, ["head.weight", "embedding.weight", inner])
    for role, wanted in autograd_gradients(model, batch, inner).items():
        torch.testing.assert_close(result[role], wanted, atol=1e-6, rtol=1e-4)
        assert wanted.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama untied", "bert", "t5"])
def test_hidden_states_feed_the_head_where_a_label_is_predicted(name):
    make, kind = MODELS[name]
    model = make()
    batch = batch_of(kind)
    anatomy = find_anatomy(model)
    hidden = gradient_parts(anatomy, batch, inputs=False).hidden
    labels = batch.target_ids()
    assert hidden.shape == (len(labels), anatomy.hidden_size)
    with torch.no_grad():
        loss = F.cross_entropy(anatomy.head(hidden), labels)
        wanted = copy.deepcopy(model).eval()(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        )["loss"]
    torch.testing.assert_close(loss, wanted)


def test_batches_are_cut_padded_and_reproducible():
    text = PublicText([[5, 6, 7, 8], [9, 10], [11, 12, 13]])
    batch = text.batch(3, 3, generator(3))
    again = text.batch(3, 3, generator(3))
    assert torch.equal(batch.input_ids, again.input_ids)
    rows = {
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    }
    assert rows == {(5, 6, 7), (9, 10), (11, 12, 13)}
    assert torch.equal(batch.labels == -100, batch.attention_mask == 0)
    assert len(text.batch(7, 3, generator()).input_ids) == 7


def test_a_masked_batch_asks_for_what_it_hides():
    batch = batch_of("masked")
    asked = batch.labels != -100
    assert asked.any(1).all()
    assert (batch.input_ids[asked] == 4).all()
    assert (batch.labels[asked] != 4).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PublicText([[3], []]), "at least 2 tokens"),
        (lambda: PublicText([[1, 2]], targets=[[1], [2]]), "one target for each text"),
        (lambda: public_text().batch(2, 1, generator()), "length must be an integer of at least 2"),
        (lambda: public_text().batch(2, 5, generator(), kind="masked"), "tokenizer="),
        (lambda: public_text().batch(2, 5, generator(), kind="classifier"), "classifier"),
        (
            lambda: PublicText.sampled_from(find_anatomy(models.tiny_bert_mlm()), 2, 5),
            "no text is sampled from",
        ),
    ],
)
def test_refusals_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_batch_without_labels_left_has_no_gradient():
    ids = torch.tensor([[5, 6, 7]])
    batch = TokenBatch(ids, torch.full_like(ids, -100), torch.ones_like(ids), "causal")
    with pytest.raises(ValueError, match="all labels of this batch are ignored"):
        gradient_of(find_anatomy(models.tiny_gpt2()), batch, ["head.weight"])
    with pytest.raises(ValueError, match=r"head\.bias"):
        gradient_of(find_anatomy(models.tiny_gpt2()), batch, ["head.bias"])
