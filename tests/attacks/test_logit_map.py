"""The gradient that is rehearsed is autograd's, whatever the model makes of its head's product."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.attacks import AlignedFlatChat, PublicText
from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens
from lightning_fedleak.attacks.words import head_gradients
from lightning_fedleak.attacks.words.aligned_rows import Directions, ExpectedRows
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.models import VOCAB, own_rng, tiny_bart, tiny_bert_mlm, tiny_gpt2, tiny_llama

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma2(cap: float | None = 3.0, tied: bool = True) -> nn.Module:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=cap, tie_word_embeddings=tied)
    )


def gemma3(cap: float | None = 3.0) -> nn.Module:
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, final_logit_softcapping=cap)
    )


def bart() -> nn.Module:
    model = tiny_bart(layers=1)
    model.final_logits_bias.copy_(torch.randn(1, VOCAB))
    return model


def biased_head() -> transformers.GPT2LMHeadModel:
    model = tiny_gpt2(tied=False)
    model.lm_head = nn.Linear(16, VOCAB)
    return model


MODELS = {
    "gemma 2": gemma2,
    "gemma 2 untied": lambda: gemma2(tied=False),
    "gemma 2 without": lambda: gemma2(None),
    "gemma 3": gemma3,
    "gemma 3 without": lambda: gemma3(None),
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZES, logit_scale=0.3)
    ),
    "cohere 2": lambda: transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(**SIZES, logit_scale=3.0)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, logits_scaling=0.25)
    ),
    "bart": bart,
    "bert": tiny_bert_mlm,
    "gpt2": tiny_gpt2,
    "gpt2 with a bias": biased_head,
    "llama": tiny_llama,
}


def made(name: str) -> nn.Module:
    with own_rng(3):
        model = MODELS[name]()
        weight = model.get_output_embeddings().weight
        weight.data.normal_(0, 0.7)  # logits large enough for a cap to matter
    return model


def anatomy_of(name: str) -> Anatomy:
    return find_anatomy(made(name))


def public() -> PublicText:
    g = torch.Generator().manual_seed(5)
    return PublicText(torch.randint(5, VOCAB, (12, 9), generator=g).tolist())


@pytest.mark.parametrize("name", MODELS)
def test_rehearsed_gradient_is_autograds(name: str) -> None:
    anatomy = anatomy_of(name)
    generator = torch.Generator().manual_seed(1)
    batch = public().batch(5, 8, generator, kind=anatomy.kind, mask_token_id=4)
    twin = copy.deepcopy(anatomy.model).eval()
    mask = batch.attention_mask
    twin(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels).loss.backward()
    wanted = twin.get_output_embeddings().weight.grad
    parts = head_gradients.gradient_parts(anatomy, batch)
    result = parts.gradient(*head_gradients.head_parameters(anatomy))
    assert wanted.abs().max() > 1e-3
    assert float((result - wanted).norm() / wanted.norm()) < 2e-5
    rows = torch.tensor([int(batch.labels.max()), 3, 90])
    some = parts.gradient(*head_gradients.head_parameters(anatomy), rows)
    torch.testing.assert_close(some, result[rows], atol=1e-6, rtol=1e-4)
    halves = head_gradients.GradientParts.concatenate(
        [parts.select(torch.tensor([0, 1])), parts.select(torch.tensor([2, 3, 4]))]
    )
    torch.testing.assert_close(
        halves.gradient(*head_gradients.head_parameters(anatomy)), result, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_closed_form_is_autograds(softcap: float | None, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 8, generator=g), torch.randn(20, 8, generator=g)
    b = torch.randn(20, generator=g) if bias else None
    shift = None if softcap else torch.randn(20, generator=g)
    labels = torch.randint(20, (30,), generator=g)
    leaf = weight.double().requires_grad_()
    logits = 0.7 * F.linear(hidden.double(), leaf, None if b is None else b.double())
    logits = logits if shift is None else logits + shift
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    F.cross_entropy(logits, labels, reduction="sum").backward()
    form = head_gradients.LogitMap(0.7, shift, softcap)
    result = head_gradients.head_gradient(hidden, labels, weight, b, logit_map=form)
    torch.testing.assert_close(result, leaf.grad.float(), atol=1e-5, rtol=1e-5)
    partition = head_gradients.log_partitions(hidden, weight, b, form)
    torch.testing.assert_close(partition, logits.logsumexp(1).float())
    rows = torch.tensor([3, 17, 0, 5])
    given = {"logit_map": form, "log_partition": partition}
    some = head_gradients.head_gradient(hidden, labels, weight, b, rows=rows, **given)
    torch.testing.assert_close(some, result[rows])


@pytest.mark.parametrize("name", ["gemma 2", "granite"])
def test_expected_rows_are_those_of_unused_types(name: str) -> None:
    anatomy = anatomy_of(name)
    batch = public().batch(8, 9, torch.Generator().manual_seed(1), kind="causal")
    parts = head_gradients.gradient_parts(anatomy, batch, inputs=False)
    weight, bias = head_gradients.head_parameters(anatomy)
    directions = Directions.fit(parts, torch.Generator().manual_seed(0))
    centres = directions.centres
    expected, with_partitions = ExpectedRows.compute(parts, weight, bias, directions, centres)
    unused = torch.ones(VOCAB, dtype=torch.bool)
    unused[parts.labels] = False
    along = (parts.gradient(weight, bias) @ directions.u)[unused]
    result = expected.mass.sum(1)[unused] * directions.scale * parts.logit_map.scale
    torch.testing.assert_close(result, along, atol=1e-6, rtol=1e-4)
    # Probabilities that were computed once give the rows of any of the sentences.
    known, rows = torch.tensor([7, 50, int(batch.labels[0, 1])]), torch.tensor([8, 51])
    some = with_partitions.with_known(known, weight, bias).select(torch.tensor([0, 3]))
    rows = torch.cat([known, rows])
    without = parts.select(torch.tensor([0, 3])).gradient(weight, bias, rows)
    assert bool(without.any(1).all())
    torch.testing.assert_close(some.gradient(weight, bias, rows), without, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma 2", "cohere", "granite", "llama"])
def test_next_tokens_have_the_models_own_logits(name: str) -> None:
    anatomy = anatomy_of(name)
    ids = torch.randint(5, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
    after = NextTokens(BottomModel(anatomy, 1), hidden_states(anatomy, 1, ids))
    with torch.no_grad():
        wanted = copy.deepcopy(anatomy.model).eval()(input_ids=ids).logits
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 6])
    torch.testing.assert_close(
        after.logits(rows, columns), wanted[rows, columns], atol=1e-5, rtol=1e-4
    )
    tokens = torch.tensor([[4, 9], [50, 3], [7, 8]])
    torch.testing.assert_close(
        after.token_logits(rows, columns, tokens),
        wanted[rows, columns].gather(1, tokens),
        atol=1e-5,
        rtol=1e-4,
    )


class Squared(nn.Module):
    """A model whose logits are none of what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.embedding(input_ids))
        return logits + 0.1 * logits.square()


def test_an_unknown_map_is_refused() -> None:
    with own_rng(0):
        model = Squared()
    anatomy = find_anatomy(model, kind="causal", embedding="embedding", head="head")
    attack = AlignedFlatChat(public_text=public())
    with pytest.raises(ValueError, match="scale, shift or softcap"):
        attack.prepare(anatomy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gemma 2", "granite", "gpt2"])
def test_rounded_models_have_the_same_map(name: str, dtype: torch.dtype) -> None:
    anatomy = find_anatomy(made(name).to(dtype))
    batch = public().batch(5, 8, torch.Generator().manual_seed(1), kind="causal")
    result = head_gradients.gradient_parts(anatomy, batch).logit_map
    assert result.softcap == (3.0 if name == "gemma 2" else None)
    assert result.scale == pytest.approx(4.0 if name == "granite" else 1.0, rel=2e-3)
    if name == "gpt2":
        assert result == head_gradients.PLAIN
