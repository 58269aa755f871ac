"""Gradient matching: its loss against autograd on the whole model, and texts that it recovers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy, AnatomyError, find_anatomy
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts.base import TextGuess
from lightning_fedleak.attacks.texts.gradient_matching import Dummy, GradientMatching, Matching
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from lightning_fedleak.threats import ThreatModelError
from tests.attacks.row_space.models import (
    backward,
    bert,
    gemma,
    gpt2,
    llama,
    neox,
    opt,
    ready,
    t5,
    texts,
    with_lora,
)
from tests.helpers.models import tiny_bert_classifier

QV = ["q_proj", "v_proj"]


def shared(anatomy: Anatomy, attack: GradientMatching) -> Observation:
    roles = {n: anatomy.parameter(n).grad for n in attack.needs(anatomy).gradients}
    tensors = {n: g.clone() for n, g in roles.items() if g is not None}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def read(attack: GradientMatching, model: nn.Module, ids: Tensor, **more: Tensor) -> TextGuess:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids, **more)
    return attack.run(shared(anatomy, attack))


def matching(attack: GradientMatching, model: nn.Module, ids: Tensor, **more: Tensor) -> Matching:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids, **more)
    assert attack._copy is not None
    assert attack._table is not None
    target = attack._target(shared(anatomy, attack), attack._copy)
    return Matching(attack, attack._copy, attack._table, target)


# ---- the loss -------------------------------------------------------------------------------


def gradient_by_hand(model: nn.Module, ids: Tensor, words: Tensor, labels: Tensor) -> list[Tensor]:
    """Of each parameter; an embedding's own part is added row by row, by the tokens read."""
    logits = model(inputs_embeds=words, use_cache=False).logits
    log = logits[:, :-1] - logits[:, :-1].logsumexp(-1, keepdim=True)
    loss = -(labels[:, 1:] * log).sum() / labels[:, 1:].sum()
    named = dict(model.named_parameters())
    table = model.get_input_embeddings().weight
    *found, slopes = torch.autograd.grad(
        loss, [*named.values(), words], create_graph=True, allow_unused=True
    )
    for i, parameter in enumerate(named.values()):
        if parameter is table:
            rows = torch.zeros_like(table).index_add(0, ids.flatten(), slopes.flatten(0, 1))
            found[i] = rows if found[i] is None else found[i] + rows
    return found


def distance_by_hand(
    kind: str, found: list[Tensor], true: list[Tensor], layers: bool = False
) -> Tensor:
    if kind == "cosine":
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(found, true)]
        return 1 - sum(cosines) / len(cosines)
    total = sum((a - b).pow(2).sum() for a, b in zip(found, true))
    if kind == "tag":
        for k, (a, b) in enumerate(zip(found, true)):
            total = total + 0.01 * (1 - k / len(true) if layers else 1) * (a - b).abs().sum()
    return total / sum(b.pow(2).sum() for b in true)


@pytest.mark.parametrize("family", [llama, gpt2])
@pytest.mark.parametrize("kind", ["l2", "tag", "tag by layer", "cosine"])
@pytest.mark.parametrize("labels", ["learned", "text"])
def test_loss_and_slopes_are_those_of_the_whole_model(family: Any, kind: str, labels: str) -> None:
    torch.manual_seed(0)
    layers, kind = kind == "tag by layer", kind.split()[0]
    model, ids = ready(family()).double(), texts(2, 5)
    model.set_attn_implementation("eager")
    attack = GradientMatching(2, 5, distance=kind, layer_weights=layers, labels=labels)
    run = matching(attack, model, ids)
    true = [p.grad.clone() for p in model.parameters()]
    words = torch.randn(2, 5, 64, dtype=torch.float64).mul_(0.1).requires_grad_()
    logits = torch.randn(2, 5, 300, dtype=torch.float64).requires_grad_()
    table = model.get_input_embeddings().weight.detach()
    cosines = F.normalize(words, dim=-1) @ F.normalize(table, dim=-1).T
    near = cosines.argmax(-1)
    if labels == "learned":
        dummy, leaves = Dummy(words, logits), [words, logits]
        told = logits.softmax(-1)
        by_hand = distance_by_hand(kind, gradient_by_hand(model, near, words, told), true, layers)
        expected = torch.autograd.grad(by_hand, leaves)
    else:
        dummy, leaves = Dummy(words, None), [words]
        told = F.one_hot(near, 300).double().requires_grad_()
        # The share of labels sums to the number of places, which is no function of the words.
        by_hand = distance_by_hand(kind, gradient_of_text(model, near, words, told), true, layers)
        direct, in_labels = torch.autograd.grad(by_hand, [words, told])
        soft = (cosines / 0.1).softmax(-1)
        expected = (direct + torch.autograd.grad(soft, words, in_labels)[0],)
    with run.copy.session():
        value = run.distance(dummy, differentiable=True)
        slopes = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(value, by_hand, rtol=1e-8, atol=1e-10)
    for got, want in zip(slopes, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-10)


def gradient_of_text(model: nn.Module, ids: Tensor, words: Tensor, labels: Tensor) -> list[Tensor]:
    places = labels[:, 1:].shape[0] * labels[:, 1:].shape[1]
    scale = labels[:, 1:].sum() / places
    return [g * scale for g in gradient_by_hand(model, ids, words, labels)]


@pytest.mark.parametrize("family", [llama, gpt2, opt, gemma, neox])
@pytest.mark.parametrize("kind", ["l2", "tag", "cosine"])
def test_true_texts_have_no_loss(family: Any, kind: str) -> None:
    torch.manual_seed(0)
    model, ids = ready(family()), texts(2, 6)
    run = matching(GradientMatching(2, 6, distance=kind), model, ids)
    words = run.table.embeddings
    with run.copy.session(), torch.no_grad():
        true = float(run.distance(Dummy(words[ids], None)))
        other = float(run.distance(Dummy(words[texts(2, 6)], None)))
    assert true < 1e-4
    assert other > 0.1


def test_true_texts_have_no_loss_behind_a_lora() -> None:
    torch.manual_seed(0)
    model, ids = with_lora(ready(llama()), 4, QV), texts(2, 6)
    attack = GradientMatching(2, 6)
    run = matching(attack, model, ids)
    assert len(run.target) == 8
    with run.copy.session(), torch.no_grad():
        assert float(run.distance(Dummy(run.table.embeddings[ids], None))) < 1e-5


# ---- texts ----------------------------------------------------------------------------------


def recovered(attack: GradientMatching, seed: int, lora: bool = False) -> float:
    """Share of the tokens of one text that are in place, the last left out: 1 in 290 by chance."""
    torch.manual_seed(seed)
    model = ready(llama())
    model = with_lora(model, 16, QV) if lora else model
    ids = texts(1, attack.length)
    guess = read(attack, model, ids)
    assert guess.finished
    assert guess.certified is None
    assert guess.tokens.shape == ids.shape
    return float((guess.tokens == ids)[:, :-1].float().mean())


def test_lamp_recovers_a_text() -> None:
    attack = GradientMatching.lamp(1, 6, steps=200, starts=5, swaps=4)
    assert recovered(attack, seed=1) == 1
