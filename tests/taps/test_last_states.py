"""Labels of losses that never call the output head, against truths written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fedleak.model.anatomy import backbone_of, find_anatomy
from lightning_fedleak.model.taps.graph import GraphTap, read_call
from lightning_fedleak.model.taps.last_states import (
    _HeadMap,
    capped,
    fit_temperature,
    logit_cap,
    read_states,
)
from lightning_fedleak.model.taps.step import ModelCall
from tests.taps.test_control import check_gradient
from tests.taps.test_graph import CAUSAL, HARD, IDS, TEXTS, calls_of, ids_of, llama, soft_loss


class Fused:
    """A model's forward that multiplies by the head's matrix, as fused losses do in chunks."""

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        self.anatomy, self.temperature = find_anatomy(model), temperature

    def __call__(
        self, input_ids: Tensor, labels: Tensor | None = None, logits_to_keep: int = 0, **call: Any
    ) -> SimpleNamespace:
        backbone, head = backbone_of(self.anatomy), self.anatomy.head
        assert backbone is not None
        states = backbone(input_ids=input_ids, **call).last_hidden_state
        cap = logit_cap(self.anatomy)
        logits = capped(functional.linear(states[:, -logits_to_keep:], head.weight), cap)
        logits, loss = logits / self.temperature, None
        if labels is not None:
            loss = functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
            )
        return SimpleNamespace(logits=logits, loss=loss)


def read_fused(model, loss, temperature=1.0) -> list[ModelCall]:
    """Return the calls of a step with a fused loss, whose gradients stay in the parameters."""
    fused = Fused(model.train(), temperature)
    return calls_of(model, lambda _: loss(fused), temperature)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_fused_loss_shows_the_same_labels(family: str) -> None:
    model = CAUSAL[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    for name, (loss, labels) in HARD.items():
        reads = read_fused(model, loss)
        batches = [read.batch for read in reads]
        truth = labels[:, 1:][labels[:, 1:] != -100]
        assert ids_of(batches) == sorted(truth.tolist()), name
        assert not any(b.preferences or b.soft_labels for b in batches), name
        if name != "entropy" and "bf16" not in family:
            check_gradient(model, reads, 1e-3)


@pytest.mark.parametrize("family", CAUSAL)
def test_rejected_texts_of_one_fused_call_have_the_other_sign(family: str) -> None:
    def loss(model: Any) -> Tensor:
        logits = model(input_ids=IDS).logits[:, :-1].float().log_softmax(-1)
        each = logits.gather(2, IDS[:, 1:, None])[..., 0].sum(1)
        return -functional.logsigmoid(0.1 * (each[:2] - each[2:])).mean()

    [read] = read_fused(CAUSAL[family](), loss)
    assert read.batch.preferences
    signs = read.placed.rows.sizes.view(TEXTS, -1).sign()
    assert bool((signs[:2, :-1] == 1).all())
    assert bool((signs[2:, :-1] == -1).all())
    assert ids_of([read.batch]) == sorted(IDS[:, 1:].flatten().tolist())


def test_soft_targets_of_a_fused_loss_are_unknown() -> None:
    [read] = read_fused(llama(), soft_loss)
    assert read.batch.soft_labels


def test_labels_that_are_not_the_next_ids_are_searched() -> None:
    """Neither the ids nor a batch shows them; every row is searched."""
    labels = IDS.flip(0)

    def loss(model: Any) -> Tensor:
        logits = model(input_ids=IDS).logits[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    [read] = read_fused(llama(), loss)
    assert torch.equal(read.batch.labels[:, 1:], labels[:, 1:])


def test_calls_without_a_graph_are_no_calls_of_the_step() -> None:
    """A reference model's, generation's: under ``no_grad``."""

    def loss(model: Any) -> Tensor:
        with torch.no_grad():
            model(input_ids=IDS.flip(0))
        return HARD["plain"][0](model)

    [read] = read_fused(llama(), loss)
    assert torch.equal(read.batch.input_ids, IDS)


def trained_gpt2() -> nn.Module:
    """Return a model whose predictions are far from uniform, so that a temperature matters."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=32, n_layer=1, n_head=2))
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(30)
    return model


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_temperature_is_given_or_fitted(temperature: float) -> None:
    ids = torch.randint(0, 200, (4, 16), generator=torch.Generator().manual_seed(2))
    model, found = trained_gpt2().eval(), []
    for expected in (temperature, 1.0):
        anatomy = find_anatomy(model)
        tap = GraphTap(anatomy, expected)
        model.zero_grad()
        tap.arm()
        Fused(model, temperature)(input_ids=ids, labels=ids).loss.backward()
        [call] = tap.take()
        tap.close()
        read = read_call(call, "causal")
        found.append(call.heads[0].temperature)
        assert ids_of([read.batch]) == sorted(ids[:, 1:].flatten().tolist())
    assert found == [temperature, pytest.approx(temperature, rel=2e-3)]


# ---- rows, drawn -------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, _HeadMap, Tensor, Tensor]:
    """Draw hidden states, their gradient, a head, labels and weights, in float64."""
    n, d, v = draw(st.integers(1, 8)), draw(st.integers(24, 40)), draw(st.integers(50, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    states = torch.randn(n, d, generator=generator).double().requires_grad_()
    weight = torch.randn(v, d, generator=generator) * draw(st.sampled_from([0.05, 0.2]))
    bias = torch.randn(v, generator=generator) if draw(st.booleans()) else None
    cap = draw(st.sampled_from([None, 2.0]))
    head = _HeadMap(weight, bias, cap, draw(st.sampled_from([1.0, 0.7])))
    labels = torch.randint(0, v, (n,), generator=generator)
    weights = torch.rand(n, generator=generator) + 0.05
    weights *= torch.where(torch.rand(n, generator=generator) < 0.4, -1, 1)
    logits = functional.linear(states, weight.double(), None if bias is None else bias.double())
    logits = capped(logits, head.cap) / head.temperature
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    each = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad((each * weights).sum(), states)
    return states.detach().float(), gradient.float(), head, labels, weights


@given(rows(), st.booleans())
@settings(max_examples=100)
def test_rows_of_any_loss(case, are_given) -> None:
    states, gradient, head, labels, weights = case
    read = read_states(states, gradient, head, [labels] if are_given else [])
    assert torch.equal(read.labels, labels)
    assert torch.equal(read.is_rejected, weights < 0)
    assert not bool(read.is_soft.any())
    # The gradient is made again from what was read, by autograd.
    leaf = states.clone().requires_grad_()
    logits = capped(functional.linear(leaf, head.weight, head.bias), head.cap)
    q = (logits.detach() / head.temperature).scatter(1, labels[:, None], -torch.inf).softmax(1)
    entries = q * read.other_sums[:, None] - read.shifts[:, None]
    logits.backward(entries.scatter(1, labels[:, None], -read.sizes[:, None]))
    torch.testing.assert_close(
        leaf.grad, gradient, rtol=2e-3, atol=2e-3 * float(gradient.abs().max())
    )


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_label_whose_row_of_the_head_is_zero(cap: float | None) -> None:
    """The token that pads has such a row where the head is tied, and a trainer may write it."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 24, generator=generator).requires_grad_()
    weight = (0.2 * torch.randn(50, 24, generator=generator)).index_fill(0, torch.tensor(0), 0.0)
    labels, weights = torch.tensor([0, 3, 0, 7]), torch.tensor([0.5, 0.5, -0.5, 0.5])
    logits = capped(functional.linear(states, weight), cap)
    each = functional.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad((each * weights).sum(), states)
    read = read_states(states.detach(), gradient, _HeadMap(weight, None, cap), [labels])
    assert torch.equal(read.labels, labels)
    assert torch.equal(read.is_rejected, weights < 0)
    expected = weights * (1 - (-each.detach()).exp())
    torch.testing.assert_close(read.sizes, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(read.other_sums, expected, rtol=1e-3, atol=1e-5)
    read = read_states(states.detach(), gradient, _HeadMap(weight, None, cap), [labels * 0])
    assert torch.equal(read.labels, labels)
    assert read_states(states.detach(), gradient, _HeadMap(weight, None, cap)).is_soft.sum() == 2


@given(rows(), st.integers(0, 2**20))
@settings(max_examples=100)
def test_a_false_label_is_not_believed(case, seed) -> None:
    states, gradient, head, labels, _ = case
    generator = torch.Generator().manual_seed(seed)
    false = torch.randint(0, len(head.weight), labels.shape, generator=generator)
    assert torch.equal(read_states(states, gradient, head, [false]).labels, labels)


def test_no_temperature_is_taken_that_explains_no_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    states, gradient = torch.randn(2, 8, 32, generator=generator)
    head = _HeadMap(torch.randn(100, 32, generator=generator))
    assert fit_temperature(states, gradient, head) is head
    assert bool(read_states(states, gradient, head).is_soft.all())
