"""Which parameters a loss has a term of, beside the batch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.model.taps.gradients import loss_terms
from tests.attacks.row_space.models import FAMILIES, llama, ready, t5, texts


def named(model: nn.Module, loss: Tensor) -> set[str]:
    ids = loss_terms(loss)
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def loss_on(model: nn.Module) -> Tensor:
    ids = texts(2, 6)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


TERMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "squares": lambda weights: 1e-4 * sum(w.square().sum() for w in weights),
    "a norm": lambda weights: torch.stack([w.norm() for w in weights]).sum(),
    "orthogonality": lambda weights: sum((w @ w.T - torch.eye(len(w))).norm() for w in weights),
    "distance from what was sent": lambda weights: sum(
        (w - w.detach().clone()).square().mean() for w in weights
    ),
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_term_names_its_parameters_and_no_others(term: str, scale: float) -> None:
    model = llama()
    chosen = {n: p for n, p in model.named_parameters() if "q_proj" in n}
    loss = scale * (loss_on(model) / 2 + TERMS[term](list(chosen.values())))
    assert named(model, loss) == set(chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_of_models_have_none(family: str) -> None:
    model = FAMILIES[family]()
    assert not named(model, loss_on(model))
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is head)
    assert not named(model, loss_on(model))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
        IA3Config(task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_nor_have_those_of_adapters(config: object) -> None:
    model = get_peft_model(ready(llama()), config)
    assert not named(model, loss_on(model))


def test_nor_has_an_encoder_decoders() -> None:
    model = t5()
    assert not named(model, loss_on(model))


def test_adaloras_own_term_is_seen() -> None:
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    model = get_peft_model(ready(llama()), config)
    factors = {n for n, _ in model.named_parameters() if "lora_A" in n or "lora_B" in n}
    assert named(model, loss_on(model)) == factors


def test_a_classifier_of_numbers_and_a_loss_of_ones_own_have_none() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 1))
    model[0].requires_grad_(False)
    out = model(torch.randint(9, (5, 3)))
    for loss in (nn.functional.mse_loss(out, torch.rand(5, 1)), torch.relu(1 - out).mean()):
        assert not named(model, loss)
        assert named(model, loss + model[2].weight.square().sum()) == {"2.weight"}


def test_the_gradient_of_a_term_is_what_is_left_without_a_batch() -> None:
    """Against gradients: a parameter is named where it has a slope that no batch changes."""
    model = llama()
    chosen = model.model.layers[0].mlp.up_proj.weight
    slopes = []
    for _ in range(2):
        loss = 0 * loss_on(model) + chosen.square().sum()
        slopes.append(torch.autograd.grad(loss, chosen, retain_graph=True)[0])
    assert torch.equal(slopes[0], slopes[1])
    assert named(model, loss) == {n for n, p in model.named_parameters() if p is chosen}


def test_a_term_times_zero_is_none() -> None:
    """As for parameters that a step does not use, under DDP."""
    model = llama()
    every = list(model.parameters())
    for unused in (0.0 * sum(p.sum() for p in every), sum((p * 0).sum() for p in every)):
        assert not named(model, loss_on(model) + unused)
        assert not named(model, unused)


class Add(torch.autograd.Function):
    """A sum of one's own, which hides its contents."""

    @staticmethod
    def forward(ctx: object, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


SUMS_OF_OTHER_KINDS: dict[str, Callable[[Tensor, nn.Linear, Tensor], Tensor]] = {
    "addmm": lambda loss, probe, x: loss - 0.01 * probe(x).mean(),
    "addmv": lambda loss, probe, x: loss + torch.addmv(probe.bias, probe.weight, x[0])[0],
    "baddbmm": lambda loss, probe, x: (
        loss + torch.baddbmm(probe.bias, x[None], probe.weight.t()[None]).mean()
    ),
    "select_scatter": lambda loss, probe, x: (
        loss + torch.select_scatter(probe(x), probe(x)[0], 0, 1).mean()
    ),
    "a function named Add": lambda loss, probe, x: Add.apply(loss, probe(x).mean()),
}


@pytest.mark.parametrize("kind", SUMS_OF_OTHER_KINDS)
def test_a_product_whose_name_begins_as_a_sum_is_no_sum(kind: str) -> None:
    """A probe on detached hidden states reads the batch: none of its parameters has a term."""
    torch.manual_seed(0)
    head, probe, states = nn.Linear(8, 5), nn.Linear(8, 1), torch.randn(4, 8)
    loss = nn.functional.cross_entropy(head(states), torch.arange(4))
    assert not loss_terms(SUMS_OF_OTHER_KINDS[kind](loss, probe, states.detach()))
    penalised = SUMS_OF_OTHER_KINDS[kind](loss, probe, states.detach()) + head.bias.square().sum()
    assert loss_terms(penalised) == {id(head.bias)}
