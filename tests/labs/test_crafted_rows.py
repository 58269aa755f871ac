"""Crafted values against what the model itself does with them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.labs.crafted_rows import CraftedValues, RowSettings, chance_in_round, craft
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.threats import ThreatModelError
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts

pytestmark = pytest.mark.slow

VOCABULARY, TOKENS = 120, 64


@pytest.fixture(scope="module")
def public() -> PublicText:
    return PublicText(zipf_texts(200, 16, VOCABULARY))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return adapted_llama(VOCABULARY, behind_blocks=True)


@pytest.fixture(scope="module")
def crafted(model, public) -> CraftedValues:
    return craft(find_anatomy(model), EMBEDDING_ADAPTER, public, TOKENS)


def fired(model: nn.Module, values: CraftedValues, ids: Tensor) -> Tensor:
    """Positions (n, L) and rows (r,) behind the ReLU of a copy that holds the values."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(values.tensors, strict=False)
    observed = []
    up = twin.get_submodule(values.adapter).up
    up.register_forward_pre_hook(lambda _, args: observed.append(args[0] > 0))
    twin(input_ids=ids)
    return observed[0]


def test_rows_fire_for_the_types_that_they_say(model, crafted) -> None:
    ids = torch.arange(VOCABULARY).view(-1, 8)
    brute = fired(model, crafted, ids).view(VOCABULARY, -1)
    assert crafted.rows.exact
    assert torch.equal(brute, crafted.rows.fires())


def test_rows_fire_for_kappa_types_of_a_round_and_no_frequent_one(crafted) -> None:
    rows = crafted.rows
    frequent = rows.presence.topk(8).indices  # at most half of the width, 16
    assert not rows.fires()[frequent].any()
    expected = (rows.presence[:, None] * rows.fires()).sum(0)
    assert bool((expected <= 3.0 + 1.0).all())  # kappa, or one type that is worth more
    assert bool((rows.fires().sum(0) >= 1).all())


def test_the_chance_of_a_type_is_that_of_independent_tokens() -> None:
    text = PublicText(torch.tensor([[0, 0, 0, 1]]))
    counts = [3.02, 1.02, 0.02]
    expected = [1 - (1 - c / sum(counts)) ** 7 for c in counts]
    torch.testing.assert_close(chance_in_round(text, 7, 3), torch.tensor(expected))


def test_the_adapter_keeps_its_norms_or_takes_those_that_are_asked_for(model, public) -> None:
    anatomy, name = find_anatomy(model), EMBEDDING_ADAPTER
    before = model.get_submodule(name).down.weight.norm(dim=1).median()
    first = craft(anatomy, name, public, TOKENS).tensors[f"{name}.down.weight"]
    torch.testing.assert_close(first.norm(dim=1), before.expand(len(first)).detach())
    strong = craft(anatomy, name, public, TOKENS, settings=RowSettings(row_norm=30.0))
    torch.testing.assert_close(strong.tensors[f"{name}.down.weight"], first * 30.0 / before.item())


def test_behind_a_block_rows_are_made_for_mean_inputs(model, public) -> None:
    values = craft(find_anatomy(model), "model.layers.0.mlp.adapter", public, TOKENS)
    rows, ids = values.rows, torch.stack(public.sentences)
    assert not rows.exact
    observed = []
    handle = model.get_submodule(values.adapter).down.register_forward_pre_hook(
        lambda _, args: observed.append(args[0].detach())
    )
    model(input_ids=ids)
    handle.remove()
    states = observed[0]
    token = int(ids[3, 5])
    torch.testing.assert_close(rows.inputs[token], states[ids == token].mean(0))
    assert rows.readable.nonzero()[:, 0].tolist() == ids.unique().tolist()


def lora_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["gate_proj", "up_proj"])
    return get_peft_model(LlamaForCausalLM(config), lora).eval()


MLP = "base_model.model.model.layers.0.mlp"


class Smooth(nn.Sequential):
    def __init__(self, activation: nn.Module, bias: bool = True) -> None:
        super().__init__(nn.Linear(16, 4, bias=bias), activation, nn.Linear(4, 16))


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (Smooth(nn.GELU()), "no ReLU"),
        (Smooth(nn.ReLU(), bias=False), "no bias"),
        (nn.Linear(16, 16), "no bottleneck"),
        (Smooth(nn.ReLU()).requires_grad_(False), "not trained"),
    ],
)
def test_other_adapters_are_refused_with_the_reason(public, adapter, why) -> None:
    model = adapted_llama(VOCABULARY)
    model.model.embed_tokens.adapter = adapter
    with pytest.raises(ThreatModelError, match=why):
        craft(find_anatomy(model), EMBEDDING_ADAPTER, public, TOKENS)


def test_lora_is_refused_with_the_reason(public) -> None:
    with pytest.raises(ThreatModelError, match="no bottleneck"):
        craft(find_anatomy(lora_llama()), MLP, public, TOKENS)


def test_too_little_public_text_is_refused(model) -> None:
    with pytest.raises(ThreatModelError, match="more public text"):
        craft(find_anatomy(model), "model.layers.0.mlp.adapter", PublicText([[1, 2, 3]]), 4)
