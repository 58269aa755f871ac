from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from benchmarks.crafted_layers import craft
from benchmarks.insertion import Inserted
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.insertion import direction_of, upstream_of
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.anatomy.blocks import text_blocks
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.taps.activations import ActivationTap
from tests.helpers.models import (
    DIM,
    VOCAB,
    own_rng,
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


def batch(seed: int = 1, b: int = 4, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (b, length), generator=generator)
    ends = torch.randint(3, length + 1, (b, 1), generator=generator)
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def attack_and_target(
    anatomy: Anatomy,
    layer: int,
    granularity: str,
    inputs: dict[str, Tensor],
    ladder: tuple[float, ...] = LADDER,
) -> tuple[FCMembership, Tensor]:
    """Its widest rungs reach many tokens of the batch, and its target is one of them."""
    attack = FCMembership(
        layer, granularity, tau=1.0, dead_zone=1e-9, ladder=ladder, tokens=5, name="fc"
    )
    hidden = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
    target = hidden[2, 1] if granularity == "token" else hidden[2, :5].reshape(-1)
    if granularity == "full":
        real = inputs["attention_mask"][2, :5, None].to(hidden)
        target = (hidden[2, :5] * real).reshape(-1)
    return attack, target


class Seen:
    """What an inserted run shows: hidden states read, and the gradient where they are added to."""

    def __init__(self, handle: Inserted) -> None:
        self.hidden: list[Tensor] = []
        self.delta: list[Tensor] = []
        self.mask: list[Tensor | None] = []
        handle.inside.register_forward_hook(self._hook)

    def _hook(self, _: nn.Module, args: tuple[Any, ...], mixed: Tensor) -> None:
        self.hidden.append(args[0].detach())
        self.mask.append(args[1])
        mixed.register_hook(lambda g: self.delta.append(g.detach()))


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_closed_form_is_the_gradient_of_autograd(name: str, granularity: str) -> None:
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs = batch()
    for layer in (0, 2):
        attack, target = attack_and_target(anatomy, layer, granularity, inputs)
        with Inserted(anatomy, layer, craft(attack, target), scale=0.7) as handle:
            observed = Seen(handle)
            model(**inputs).loss.backward()
            assert torch.equal(observed.mask[0], inputs["attention_mask"])
            expected = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
            torch.testing.assert_close(observed.hidden[0], expected, rtol=1e-12, atol=1e-14)
            upstream = upstream_of(
                observed.delta[0],
                handle.inside.direction,
                handle.inside.scale,
                whole_sentence=granularity == "full",
                mask=inputs["attention_mask"],
            )
            closed = attack.gradient(
                target[None], observed.hidden[0], inputs["attention_mask"], upstream
            ).sum(0)[0]
            assert closed.abs().min() > 0
            assert len(closed.unique()) > 1
            torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_clean_run_gives_it_where_little_is_added(name: str, granularity: str) -> None:
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs = batch()
    layer, scale = 1, 1e-18
    attack, target = attack_and_target(anatomy, layer, granularity, inputs)
    tap = ActivationTap(anatomy, [1, 2])
    tap.arm()
    model(**inputs).loss.backward()
    hidden = tap.states(1)[0]
    (delta,) = tap.gradients(1)
    tap.close()
    upstream = upstream_of(
        delta,
        direction_of(DIM),
        scale,
        whole_sentence=granularity == "full",
        mask=inputs["attention_mask"],
    )
    closed = attack.gradient(target[None], hidden, inputs["attention_mask"], upstream).sum(0)[0]
    with Inserted(anatomy, layer, craft(attack, target), scale=scale) as handle:
        model(**inputs).loss.backward()
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Also for the part of the sum that goes through the layers above."""
    model = tiny_gpt2(layers=3, dropout=0.0).double()
    anatomy = find_anatomy(model)
    inputs = batch()
    ladder = (0.3, 0.6, 1.0)
    attack, target = attack_and_target(anatomy, 1, "token", inputs, ladder)
    with Inserted(anatomy, 1, craft(attack, target), scale=0.5) as handle:
        loss = model(**inputs).logits.square().mean()
        (gradient,) = torch.autograd.grad(loss, handle.bias)
        for k in range(len(ladder)):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    handle.bias[k] += step
                    values.append(float(model(**inputs).logits.square().mean()))
                    handle.bias[k] -= step
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(gradient[k]), rel=1e-5)


class One(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.read = hidden
        return torch.ones((*hidden.shape[:2], 1), dtype=hidden.dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_states_are_read_and_changed_after_the_block(name: str) -> None:
    model = MODELS[name]().double().eval()
    anatomy = find_anatomy(model)
    inputs = batch()
    entering: dict[int, Tensor] = {}
    for i, (_, block) in enumerate(text_blocks(anatomy)):
        block.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: entering.__setitem__(
                i, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(**inputs)
        clean = dict(entering)
        for layer in (0, 1):
            crafted = One()
            with Inserted(anatomy, layer, crafted, scale=0.25):
                model(**inputs)
            assert torch.equal(crafted.read, clean[layer])
            changed = {i: entering[i] - clean[i] for i in clean}
            if layer:
                step = 0.25 * direction_of(DIM).expand(4, 7, DIM)
                torch.testing.assert_close(changed[layer], step)
            assert all(float(changed[i].abs().max()) == 0 for i in range(layer))
            assert all(float(changed[i].abs().max()) > 0 for i in range(layer + 1, 3))


def test_hidden_states_are_read_without_what_is_inserted() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0)
    anatomy = find_anatomy(model)
    inputs = batch()
    given = (inputs["input_ids"], inputs["attention_mask"])
    clean = [hidden_states(anatomy, n, *given) for n in range(4)]
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, craft(attack, target), scale=1.0):
        for layer in range(4):
            assert torch.equal(hidden_states(anatomy, layer, *given), clean[layer])


def test_under_lora() -> None:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    with own_rng(2):
        model = peft.get_peft_model(tiny_gpt2(layers=3, dropout=0.0), config).double()
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, craft(attack, target)) as handle:
        observed = Seen(handle)
        model(**inputs).loss.backward()
        upstream = upstream_of(observed.delta[0], handle.inside.direction, handle.inside.scale)
        mask = observed.mask[0]
        closed = attack.gradient(target[None], observed.hidden[0], mask, upstream).sum(0)[0]
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)


def test_bf16_mixed() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0).train()
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, craft(attack, target), scale=0.5) as handle:
        observed = Seen(handle)
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs).loss.backward()
        assert handle.bias.grad.dtype == torch.float32
        upstream = upstream_of(observed.delta[0], handle.inside.direction, handle.inside.scale)
        mask = inputs["attention_mask"]
        closed = attack.gradient(target[None], observed.hidden[0], mask, upstream).sum(0)[0]
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-4, atol=0)


def test_the_direction_is_a_unit_vector_of_its_own_generator() -> None:
    state = torch.get_rng_state()
    first, second = direction_of(DIM), direction_of(DIM, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(first.norm()) == pytest.approx(1.0, abs=1e-15)
    assert abs(float(first @ second)) < 0.9
    assert torch.equal(direction_of(DIM), first)
