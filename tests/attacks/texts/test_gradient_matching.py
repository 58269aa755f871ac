"""Gradient matching: its loss against autograd on the whole model, and texts that it recovers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.attacks.texts.gradient_matching import (
    Dummy,
    GradientMatching,
    Matching,
    MatchingSettings,
)
from lightning_fedleak.model.anatomy import Anatomy, AnatomyError, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
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
from tests.helpers.models import tiny_bert_classifier, tiny_roberta_classifier

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
    loss = -(labels[:, 1:] * log).sum() / (len(ids) * (ids.shape[1] - 1))
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
    pairs = list(zip(found, true, strict=True))
    if kind == "cosine":
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs]
        return 1 - sum(cosines) / len(cosines)
    total = sum((a - b).pow(2).sum() for a, b in pairs)
    if kind == "tag":
        for k, (a, b) in enumerate(pairs):
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
    attack = GradientMatching(
        2, 5, distance=kind, labels=labels, matching=MatchingSettings(layer_weights=layers)
    )
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
        by_hand = distance_by_hand(kind, gradient_by_hand(model, near, words, told), true, layers)
        direct, in_labels = torch.autograd.grad(by_hand, [words, told])
        soft = (cosines / 0.1).softmax(-1)
        expected = (direct + torch.autograd.grad(soft, words, in_labels)[0],)
    with run.copy.session():
        value = run.distance(dummy, differentiable=True)
        slopes = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(value, by_hand, rtol=1e-8, atol=1e-10)
    for got, want in zip(slopes, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-10)


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


def right(attack: GradientMatching, seed: int) -> Tensor:
    """(1, L) which tokens of one text are in place: 1 in 290 by chance."""
    torch.manual_seed(seed)
    model, ids = ready(llama()), texts(1, attack.length)
    guess = read(attack, model, ids)
    assert guess.finished
    assert guess.certified is None
    assert guess.tokens.shape == ids.shape
    return guess.tokens == ids


def test_lamp_recovers_a_text() -> None:
    attack = GradientMatching.lamp(1, 6, steps=200, starts=5, swaps=4)
    assert bool(right(attack, seed=1)[:, :-1].all())


@cache
def right_of_three(system: str, seed: int) -> Tensor:
    """(1, 3) which tokens of a text are in place."""
    return right(getattr(GradientMatching, system)(1, 3, steps=150), seed)


@pytest.mark.parametrize("system", ["dlg", "tag"])
def test_short_texts_are_recovered_with_labels_that_are_learned(system: str) -> None:
    assert any(bool(right_of_three(system, seed)[:, :-1].all()) for seed in (0, 1))


def test_the_last_token_is_read_off_its_label() -> None:
    assert bool(right_of_three("dlg", 0)[0, -1])


def test_rearranging_finds_the_order_of_right_words() -> None:
    """With learned labels, which move along."""
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(2, 6)
    for labels in ("text", "learned"):
        attack = GradientMatching(
            2, 6, labels=labels, matching=MatchingSettings(swaps=20, prior=0.0)
        )
        run = matching(attack, model, ids)
        order = torch.tensor([0, 4, 2, 3, 1, 5])
        mixed = ids.clone()
        mixed[1] = mixed[1, order]
        logits = 50 * F.one_hot(mixed, 300).float() if labels == "learned" else None
        dummy = Dummy(run.table.embeddings[mixed].clone(), logits)
        with run.copy.session(), torch.no_grad():
            before = float(run.distance(dummy))
            for _ in range(5):
                dummy = run._rearrange(dummy, Deadline())
                if torch.equal(run.tokens(dummy.words)[0], ids):
                    break
            assert float(run.distance(dummy)) < before
            assert torch.equal(run.tokens(dummy.words)[0], ids)


def test_the_prior_prefers_what_the_model_finds_likely() -> None:
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(1, 6)
    run = matching(GradientMatching(1, 6, matching=MatchingSettings(prior=0.5)), model, ids)
    other = texts(1, 6)
    with run.copy.session(), torch.no_grad():
        dummy = Dummy(run.table.embeddings[other], None)
        value, distance = run._score(dummy), float(run.distance(dummy))
        own = float(model(input_ids=other, labels=other).loss)
    assert value == pytest.approx(distance + 0.5 * own, abs=1e-5)


def test_every_kind_of_order_is_a_permutation() -> None:
    run = matching(
        GradientMatching(1, 7, matching=MatchingSettings(swaps=40)), ready(llama()), texts(1, 7)
    )
    orders = [order.tolist() for order in run._orders()]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) > 20


def test_a_classifier_is_matched_with_learned_labels() -> None:
    model = tiny_bert_classifier(seed=1).eval()
    ids, labels = texts(2, 5, kinds=80), torch.tensor([2, 0])
    attack = GradientMatching.dlg(2, 5, steps=5)
    run = matching(attack, model, ids, labels=labels)
    told = 50 * F.one_hot(labels, 3).float()
    with run.copy.session(), torch.no_grad():
        assert float(run.distance(Dummy(run.table.embeddings[ids], told))) < 1e-6
        assert float(run.distance(Dummy(run.table.embeddings[ids], told.flip(0)))) > 0.1
    assert read(attack, model, ids, labels=labels).tokens.shape == (2, 5)


def test_a_word_near_the_paddings_is_no_padding() -> None:
    """RoBERTa counts its positions by the padding's id."""
    model = tiny_roberta_classifier(seed=1).eval()
    padding = model.config.pad_token_id
    ids = torch.tensor([[7, padding, 9, 11]])
    run = matching(GradientMatching.dlg(1, 4), model, texts(1, 4, 80), labels=torch.tensor([1]))
    words = run.table.embeddings[ids]
    with run.copy.session(), torch.no_grad():
        seen = run.copy.logits(ids, words)
        expected = run.copy.logits(torch.full_like(ids, 7), words)
    torch.testing.assert_close(seen, expected)


# ---- what it refuses, and what it leaves alone ----------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "word"),
    [
        (bert, {}, "masked"),
        (t5, {}, "seq2seq"),
        (tiny_bert_classifier, {}, "labels='learned'"),
        (tiny_bert_classifier, {"labels": "learned"}, "prior=0"),
        (
            lambda: tiny_bert_classifier(classes=1),
            {"labels": "learned", "matching": MatchingSettings(prior=0.0)},
            "one output",
        ),
    ],
)
def test_models_whose_loss_it_cannot_compute(family: Any, settings: Any, word: str) -> None:
    with pytest.raises(ThreatModelError, match=word):
        GradientMatching(1, 6, **settings).needs(find_anatomy(family()))


def test_parameters_can_be_chosen() -> None:
    anatomy = find_anatomy(llama())
    name = "model.layers.0.self_attn.q_proj.weight"
    attack = GradientMatching(1, 6, parameters=["head.weight", name])
    assert attack.needs(anatomy).gradients == ("head.weight", name)
    run = matching(attack, anatomy.model, texts(1, 6))
    assert set(run.target) == {"head.weight", name}
    with pytest.raises(AnatomyError, match="nor one of"):
        GradientMatching(1, 6, parameters=["q_proj"]).needs(anatomy)
    with pytest.raises(ThreatModelError, match="this model has no"):
        GradientMatching(1, 6, parameters=["head.bias"]).needs(anatomy)


def test_a_sharded_model_is_refused() -> None:
    model = llama()
    model.unshard = lambda: None
    with pytest.raises(TypeError, match="sharded over processes"):
        GradientMatching(1, 6).prepare(find_anatomy(model))


def test_texts_longer_than_the_context() -> None:
    with pytest.raises(ValueError, match="context holds"):
        GradientMatching(1, 40).needs(find_anatomy(gpt2()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"texts": 0},
        {"length": 1},
        {"distance": "l1"},
        {"labels": "given"},
        {"steps": 0},
        {"lr": 0.0},
        {"parameters": "head.weight"},
        {"budget_seconds": 0},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GradientMatching(**({"texts": 1, "length": 6} | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1.0},
        {"regularise": -1.0},
        {"prior": float("nan")},
        {"swaps": -1},
        {"swap_every": 0},
        {"starts": 0},
    ],
)
def test_matching_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MatchingSettings(**wrong)


def test_systems_are_those_of_the_papers() -> None:
    dlg, tag, lamp = (getattr(GradientMatching, n)(2, 8, steps=9) for n in ("dlg", "tag", "lamp"))
    assert (dlg.distance, dlg.labels, dlg.matching.swaps, dlg.matching.starts) == (
        "l2",
        "learned",
        0,
        1,
    )
    assert (tag.distance, tag.labels, tag.matching.swaps, tag.matching.starts) == (
        "tag",
        "learned",
        0,
        1,
    )
    assert (lamp.distance, lamp.labels) == ("cosine", "text")
    assert lamp.matching == MatchingSettings()
    assert [a.name for a in (dlg, tag, lamp)] == ["dlg", "tag", "lamp"]
    assert {a.steps for a in (dlg, tag, lamp)} == {9}
    assert GradientMatching.tag(1, 4, alpha=0.5, name="other").config()["alpha"] == 0.5


def test_what_it_cannot_read_is_unknown() -> None:
    model, attack = ready(llama()), GradientMatching(1, 6, steps=2)
    anatomy = find_anatomy(model)
    with pytest.raises(RuntimeError, match="call prepare"):
        attack.run(Observation(()))
    attack.prepare(anatomy)
    backward(model, texts(1, 6))
    [snapshot] = shared(anatomy, attack).gradients
    for change, word in ((torch.zeros_like, "zero"), (lambda g: g * torch.nan, "NaN")):
        spoilt = {n: change(g) for n, g in snapshot.tensors.items()}
        with pytest.raises(UnusableObservation, match=word):
            attack.run(Observation((replace(snapshot, tensors=spoilt),)))


@pytest.mark.parametrize(
    ("optimizer", "own", "steps", "known"),
    [
        ("SGD", {}, 1, True),
        ("SGD", {}, 4, False),
        ("SGD", {"momentum": 0.9}, 1, True),
        ("SGD", {"momentum": 0.9, "nesterov": True}, 1, False),
        ("AdamW", {}, 1, False),
    ],
)
def test_rounds_of_one_plain_step_are_read(
    optimizer: str, own: dict[str, float | bool], steps: int, known: bool
) -> None:
    model, attack = (
        ready(llama()),
        GradientMatching(1, 6, steps=2, matching=MatchingSettings(starts=1)),
    )
    settings = {"lr": 0.1, **own}
    attack.meet(RunFacts(optimizer=optimizer, optimizer_settings=settings, local_steps=steps))
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, texts(1, 6))
    tensors = shared(anatomy, attack).gradients[0].tensors
    view = Observation(
        (UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=steps, learning_rate=0.1),)
    )
    if known:
        assert attack.run(view).finished
    else:
        with pytest.raises(UnusableObservation, match="one plain step"):
            attack.run(view)


def test_time_ends_it_and_it_says_so() -> None:
    attack = GradientMatching(1, 6, budget_seconds=1e-9)
    guess = read(attack, ready(llama()), texts(1, 6))
    assert not guess.finished
    assert guess.tokens.shape == (1, 6)


def test_a_seed_is_a_guess() -> None:
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(1, 6)
    settings = {"steps": 20, "matching": MatchingSettings(starts=2, swaps=4, swap_every=4)}
    one, same, other = (
        read(GradientMatching(1, 6, seed=seed, **settings), model, ids) for seed in (0, 0, 1)
    )
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.confidence, same.confidence)
    assert not torch.equal(one.confidence, other.confidence)


@pytest.mark.parametrize("system", ["dlg", "lamp"])
def test_the_model_is_left_as_it_was(system: str) -> None:
    model = ready(llama()).train()
    anatomy = find_anatomy(model)
    attack = getattr(GradientMatching, system)(2, 6, steps=3)
    backward(model, texts(2, 6))
    before = {n: (p.clone(), p.grad.clone()) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    attack.prepare(anatomy)
    attack.refresh(anatomy, 1)
    assert attack.age(4) == 3
    with torch.no_grad():
        attack.run(shared(anatomy, attack))
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_are_those_of_the_last_refresh() -> None:
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(1, 6)
    attack = GradientMatching(1, 6)
    run = matching(attack, model, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    true = Dummy(run.table.embeddings[ids], None)
    with run.copy.session(), torch.no_grad():
        assert float(run.distance(true)) < 1e-5
    attack.refresh(find_anatomy(model), 1)
    with run.copy.session(), torch.no_grad():
        assert float(run.distance(true)) > 1e-3
