"""Gradient matching: its loss against autograd on the whole model, and texts that it recovers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.labs.gradient_matching import GradientMatching, Matching
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
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

pytestmark = pytest.mark.slow


def shared(anatomy: Anatomy, attack: GradientMatching) -> Observation:
    gradients = {n: anatomy.parameter(n).grad for n in attack.needs(anatomy).gradients}
    tensors = {n: g.clone() for n, g in gradients.items() if g is not None}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def guess_of(attack: GradientMatching, model: nn.Module, ids: Tensor) -> TextGuess:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids)
    return attack.run(shared(anatomy, attack))


def matching(attack: GradientMatching, model: nn.Module, ids: Tensor) -> Matching:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids)
    return Matching(attack, shared(anatomy, attack).gradients[0].tensors)


def gradient_by_hand(model: nn.Module, ids: Tensor, words: Tensor, labels: Tensor) -> list[Tensor]:
    """Return that of each parameter; an embedding's part is added row by row, by the tokens."""
    logits = model(inputs_embeds=words, use_cache=False).logits
    log = logits[:, :-1] - logits[:, :-1].logsumexp(-1, keepdim=True)
    loss = -(labels[:, 1:] * log).sum() / (len(ids) * (ids.shape[1] - 1))
    named = dict(model.named_parameters())
    table = model.get_input_embeddings().weight
    *gradients, slopes = torch.autograd.grad(
        loss, [*named.values(), words], create_graph=True, allow_unused=True
    )
    for i, parameter in enumerate(named.values()):
        if parameter is table:
            rows = torch.zeros_like(table).index_add(0, ids.flatten(), slopes.flatten(0, 1))
            gradients[i] = rows if gradients[i] is None else gradients[i] + rows
    return gradients


def distance_by_hand(system: str, gradients: list[Tensor], true: list[Tensor]) -> Tensor:
    pairs = list(zip(gradients, true, strict=True))
    if system == "lamp":
        return 1 - sum(F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs) / len(
            pairs
        )
    total = sum((a - b).pow(2).sum() for a, b in pairs)
    if system == "tag":
        total = total + sum(0.01 * (a - b).abs().sum() for a, b in pairs)
    return total / sum(b.pow(2).sum() for b in true)


@pytest.mark.parametrize(
    ("family", "system"), [(llama, "dlg"), (llama, "tag"), (llama, "lamp"), (gpt2, "lamp")]
)
def test_loss_and_slopes_are_those_of_the_whole_model(family: Any, system: Any) -> None:
    torch.manual_seed(0)
    model, ids = ready(family()).double(), texts(2, 5)
    model.set_attn_implementation("eager")
    run = matching(GradientMatching(2, 5, system), model, ids)
    true = [p.grad.clone() for p in model.parameters()]
    words = torch.randn(2, 5, 64, dtype=torch.float64).mul_(0.1).requires_grad_()
    logits = torch.randn(2, 5, 300, dtype=torch.float64).requires_grad_()
    table = model.get_input_embeddings().weight.detach()
    cosines = F.normalize(words, dim=-1) @ F.normalize(table, dim=-1).T
    near = cosines.argmax(-1)
    dummy, leaves = {"words": words, "labels": logits}, [words, logits]
    labels = logits.softmax(-1)
    if system == "lamp":
        dummy, leaves = {"words": words}, [words]
        labels = F.one_hot(near, 300).double().requires_grad_()
    by_hand = distance_by_hand(system, gradient_by_hand(model, near, words, labels), true)
    if system == "lamp":
        direct, in_labels = torch.autograd.grad(by_hand, [words, labels])
        soft = (cosines / 0.1).softmax(-1)
        expected = (direct + torch.autograd.grad(soft, words, in_labels)[0],)
    else:
        expected = torch.autograd.grad(by_hand, leaves)
    with run.copy.session():
        value = run.distance(dummy, differentiable=True)
        slopes = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(value, by_hand, rtol=1e-8, atol=1e-10)
    for slope, by_autograd in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, by_autograd, rtol=1e-6, atol=1e-10)


def with_adapters() -> Any:
    return with_lora(llama(), 4, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("family", "system"),
    [
        *((llama, system) for system in ("dlg", "tag", "lamp")),
        *((family, "lamp") for family in (gpt2, opt, gemma, neox, with_adapters)),
    ],
)
def test_true_texts_have_no_loss(family: Any, system: Any) -> None:
    torch.manual_seed(0)
    model, ids = ready(family()), texts(2, 6)
    run = matching(GradientMatching(2, 6, system), model, ids)
    words = run.table.embeddings
    with run.copy.session(), torch.no_grad():
        true, other = (float(run.distance({"words": words[i]})) for i in (ids, texts(2, 6)))
    assert true < 1e-4
    assert other > 0.1


@pytest.mark.parametrize(
    ("attack", "seeds"),
    [
        (GradientMatching(1, 6, "lamp", steps=200, starts=5, swaps=4), (1,)),
        (GradientMatching(1, 3, "dlg", steps=150), (0, 1)),
        (GradientMatching(1, 3, "tag", steps=150), (0, 1)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_short_texts_are_recovered(attack: GradientMatching, seeds: tuple[int, ...]) -> None:
    """A guess of one token is right in 1 of 290 cases by chance."""

    def correct(seed: int) -> bool:
        torch.manual_seed(seed)
        model, ids = ready(llama()), texts(1, attack.length)
        guess = guess_of(attack, model, ids)
        assert guess.finished
        assert guess.certified is None
        return bool((guess.tokens == ids)[:, :-1].all())

    assert any(correct(seed) for seed in seeds)


@pytest.mark.parametrize("learned", [False, True])
def test_rearranging_finds_the_order_of_right_words(learned: bool) -> None:
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(2, 6)
    run = matching(GradientMatching(2, 6, swaps=20), model, ids)
    run.choices = replace(run.choices, prior=0.0)
    mixed = ids.clone()
    mixed[1] = mixed[1, torch.tensor([0, 4, 2, 3, 1, 5])]
    dummy = {"words": run.table.embeddings[mixed].clone()}
    if learned:  # labels move along
        dummy["labels"] = 50 * F.one_hot(mixed, 300).float()
    with run.copy.session(), torch.no_grad():
        before = float(run.distance(dummy))
        for _ in range(5):
            dummy = run.rearrange(dummy, Deadline())
            if torch.equal(run.tokens(dummy["words"])[0], ids):
                break
        assert float(run.distance(dummy)) < before
        assert torch.equal(run.tokens(dummy["words"])[0], ids)


@pytest.mark.parametrize("family", [bert, t5])
def test_models_whose_loss_it_cannot_compute(family: Any) -> None:
    with pytest.raises(ThreatModelError, match="next token"):
        GradientMatching(1, 6).needs(find_anatomy(family()))


def test_a_sharded_model_is_refused() -> None:
    model = llama()
    model.unshard = lambda: None
    with pytest.raises(TypeError, match="sharded over processes"):
        GradientMatching(1, 6).prepare(find_anatomy(model))


def test_a_gradient_without_numbers_is_unknown_and_a_late_guess_unfinished() -> None:
    attack = GradientMatching(1, 6, budget_seconds=1e-9)
    model, ids = ready(llama()), texts(1, 6)
    assert not guess_of(attack, model, ids).finished
    [snapshot] = shared(find_anatomy(model), attack).gradients
    for change in (torch.zeros_like, lambda g: g * torch.nan):
        spoilt = {n: change(g) for n, g in snapshot.tensors.items()}
        with pytest.raises(UnusableObservation, match="zero"):
            attack.run(Observation((replace(snapshot, tensors=spoilt),)))


@pytest.mark.parametrize("system", ["dlg", "lamp"])
def test_the_model_is_left_as_it_was_and_a_copy_is_of_its_refresh(system: Any) -> None:
    model, ids = ready(llama()).train(), texts(2, 6)
    anatomy = find_anatomy(model)
    attack = GradientMatching(2, 6, system, steps=3)
    backward(model, ids)
    before = {n: (p.clone(), p.grad.clone()) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    attack.prepare(anatomy)
    attack.refresh(anatomy, 1)
    assert attack.age(4) == 3
    with torch.no_grad():
        one, same = (attack.run(shared(anatomy, attack)) for _ in range(2))
    assert torch.equal(one.confidence, same.confidence)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
