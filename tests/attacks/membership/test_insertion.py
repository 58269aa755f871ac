"""The gradient of crafted layers in closed form is that of layers which are really in the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.defenses.crafted import craft
from benchmarks.defenses.planted import inserted
from lightning_fedleak.attacks.membership.base import direction_of, upstream_of
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.taps.activations import ActivationTap
from tests.helpers.models import (
    DIM,
    VOCAB,
    tiny_bert_mlm,
    tiny_distilbert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_roberta_mlm,
    tiny_t5,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tiny_gpt2(layers=3, dropout=0.0),
    "llama": lambda: tiny_llama(layers=3),
    "bert": lambda: tiny_bert_mlm(layers=3, dropout=0.0),
    "distilbert": lambda: tiny_distilbert_mlm(layers=3, dropout=0.0),
    "roberta": lambda: tiny_roberta_mlm(layers=3, dropout=0.0),
    "t5 encoder": lambda: tiny_t5(layers=3, dropout=0.0),
}
LADDER = (0.1, 1.0, 4.0, 10.0, 30.0, 60.0, 80.0, 90.0, 200.0)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, 7), generator=generator)
    ends = torch.randint(3, 8, (4, 1), generator=generator)
    ends[0] = 7
    mask = (torch.arange(7) < ends).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def attack_and_target(
    anatomy: Anatomy, layer: int, granularity: str, inputs: dict[str, Tensor]
) -> tuple[FCMembership, Tensor]:
    """Its widest rungs reach many tokens of the batch, and its target is one of them."""
    attack = FCMembership(
        layer, granularity, tau=1.0, dead_zone=1e-9, ladder=LADDER, tokens=5, name="fc"
    )
    hidden = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
    if granularity == "token":
        return attack, hidden[2, 1]
    real = inputs["attention_mask"][2, :5, None].to(hidden)
    return attack, (hidden[2, :5] * real).reshape(-1)


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_closed_form_is_the_gradient_of_autograd(name: str, layer: int, granularity: str):
    """Where little is added, from the hidden states and gradients of the model as it is."""
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs, scale = batch(), 1e-18
    mask = inputs["attention_mask"]
    attack, target = attack_and_target(anatomy, layer, granularity, inputs)
    tap = ActivationTap(anatomy, [layer])
    tap.arm()
    model(**inputs).loss.backward()
    hidden, (delta,) = tap.states(layer)[0], tap.gradients(layer)
    tap.close()
    whole = granularity == "full"
    upstream = upstream_of(delta, direction_of(DIM), scale, whole_sentence=whole, mask=mask)
    closed = attack.gradient(target[None], hidden, mask, upstream).sum(0)[0]
    crafted = craft(attack, target)
    with inserted(anatomy, layer, crafted, scale=scale, mask=mask):
        model(**inputs).loss.backward()
    assert closed.abs().min() > 0
    assert len(closed.unique()) > 1
    torch.testing.assert_close(crafted.bias.grad, closed, rtol=1e-10, atol=0)


def test_the_direction_is_a_unit_vector_of_its_own_generator() -> None:
    state = torch.get_rng_state()
    first, second = direction_of(DIM), direction_of(DIM, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(first.norm()) == pytest.approx(1.0, abs=1e-15)
    assert abs(float(first @ second)) < 0.9
    assert torch.equal(direction_of(DIM), first)
