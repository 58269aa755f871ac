"""Against autograd on the plain model, brute force over the vocabulary, and known texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts import base as sent_module
from lightning_fedleak.attacks.texts import embedding_descent
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, Sent
from lightning_fedleak.attacks.texts.descent import RowAdam
from lightning_fedleak.attacks.texts.embedding_descent import (
    DescentSettings,
    EmbeddingDescent,
    _Descent,
    _TokenTable,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import ActivationSnapshot, Observation, Stage
from tests.helpers.inputs import padded_text as text
from tests.helpers.models import DIM, VOCAB, tiny_bert_mlm, tiny_gpt2, tiny_llama

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tiny_gpt2(layers=3),
    "llama": lambda: tiny_llama(layers=3),
    "bert": lambda: tiny_bert_mlm(layers=3),
}


def sent_by(model: nn.Module, layer: int, *size: int, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a text, its mask, and the hidden states that a client sends of it."""
    ids, mask = text(*size, **more)
    return ids, mask, hidden_states(find_anatomy(model), layer, ids, mask)


RARE = [field.name for field in fields(DescentSettings)]


def prepared(
    model: nn.Module, layer: int = 2, facts: RunFacts | None = None, **settings: Any
) -> EmbeddingDescent:
    rare = {name: settings.pop(name) for name in RARE if name in settings}
    attack = EmbeddingDescent(layer, descent=DescentSettings(**rare), **settings)
    attack.meet(facts or RunFacts())
    attack.prepare(find_anatomy(model))
    return attack


def errors_of(attack: EmbeddingDescent, tokens: Tensor, sent: Tensor, *inputs: Any) -> Tensor:
    """Return the relative errors (B, L) of the hidden states of ``tokens``."""
    return Sent.from_states(sent, *inputs).relative_errors(attack.bottom.hidden(tokens, *inputs))


# ---- Eq. 3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weighting"), [*((name, "per_position") for name in MODELS), ("llama", "paper")]
)
def test_gradient_is_that_of_the_plain_model(name: str, weighting: Any) -> None:
    model = MODELS[name]().double().eval()
    ids, mask, sent = sent_by(model, 2)
    words = torch.randn(*ids.shape, DIM, generator=torch.Generator().manual_seed(0)).double() / 9

    leaf = words.clone().requires_grad_()
    out = model(inputs_embeds=leaf, attention_mask=mask, output_hidden_states=True)
    expected = torch.zeros(())
    for row, column in mask.nonzero().tolist():
        off = out.hidden_states[2][row, column] - sent[row, column]
        if weighting == "paper":
            expected = expected + off @ off
        else:
            expected = expected + off.norm() / sent[row, column].norm()
    expected.backward()

    attack = prepared(model, weighting=weighting)
    run = _Descent(attack, Sent.from_states(sent, mask), Deadline())
    gradient, stopped = run._gradient(words, run.sent)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-12)
    assert not bool(stopped.any())
    assert float(gradient[mask == 0].abs().max()) == 0


def test_adam_is_torchs_also_when_rows_leave() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 2, 4, generator=generator)
    gradients = torch.randn(6, 3, 2, 4, generator=generator)
    expected = [nn.Parameter(row.clone()) for row in start]
    theirs = [torch.optim.Adam([p], lr=0.3) for p in expected]
    mine = RowAdam(start, 0.3)
    alive = [0, 1, 2]
    for step, gradient in enumerate(gradients):
        mine.step(gradient[alive])
        for row in alive:
            expected[row].grad = gradient[row]
            theirs[row].step()
        torch.testing.assert_close(mine.values, torch.stack([expected[r].detach() for r in alive]))
        if step == 2:
            alive = [0, 2]
            mine.select(torch.tensor([0, 2]))


# ---- Eq. 4 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_likest_tokens_are_those_of_brute_force(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_fedleak.attacks.texts.embedding_descent.SIMILARITIES_AT_ONCE", chunk
    )
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 6, generator=generator).double() * torch.arange(1, 7) + 2.0
    points = torch.randn(3, 4, 6, generator=generator).double() * 3
    tokens = _TokenTable.from_embeddings(table)
    ids = tokens.nearest(points, 5, "cosine")
    for row in range(3):
        for column in range(4):
            point = points[row, column]
            by_hand = [float(point @ e / point.norm() / e.norm()) for e in table]
            order = sorted(range(40), key=lambda t: -by_hand[t])[:5]
            assert ids[row, column].tolist() == order


def test_whitened_embeddings_have_the_identity_as_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    table = (
        torch.randn(300, 6, generator=generator).double()
        @ torch.randn(6, 6, generator=generator).double()
    )
    tokens = _TokenTable.from_embeddings(table + 5.0)
    white = (tokens.embeddings - tokens.mean) @ tokens.whitening
    torch.testing.assert_close(white.T @ white / 300, torch.eye(6).double(), rtol=1e-6, atol=1e-8)
    assert tokens.nearest(tokens.embeddings, 1)[:, 0].tolist() == list(range(300))
    assert tokens.scale == pytest.approx(float(table.var(0, correction=0).mean().sqrt()))


# ---- the attack -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side"), [("gpt2", "right"), ("gpt2", "left"), ("llama", "right"), ("bert", "left")]
)
def test_texts_are_found(name: str, side: str) -> None:
    model = MODELS[name]().train()
    ids, mask, sent = sent_by(model, 2, side=side)
    guess = prepared(model, steps=300).reconstruct(sent, mask, None)
    assert guess.finished
    assert torch.equal(guess.tokens, ids.masked_fill(mask == 0, NOTHING))


def test_the_papers_rule_stops_each_text_at_its_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt2(layers=3)
    ids, mask, sent = sent_by(model, 2)
    paper = {"weighting": "paper", "likeness": "cosine", "initial": 5, "steps": 200}
    steps, cosines = {}, {}
    for cosine in (0.5, 0.98):
        monkeypatch.setattr(embedding_descent, "PAPER_COSINE", cosine)
        attack = prepared(model, stop="cosine", **paper)
        run = _Descent(attack, Sent.from_states(sent, mask), Deadline())
        first = attack.table.embeddings[5].expand(*ids.shape, -1)
        assert torch.equal(run.variables, first)
        run.descend(200)
        hidden = attack.bottom.hidden_from(run.variables, mask)
        steps[cosine], cosines[cosine] = run.steps, run.sent.cosines(hidden)
    assert bool((cosines[0.98] >= 0.97).all())
    assert bool((steps[0.5] < steps[0.98]).all())
    assert int(steps[0.98].max()) < 200


def test_with_noise_it_settles() -> None:
    model = tiny_llama(layers=2)
    ids, mask, sent = sent_by(model, 1)
    noise = torch.randn(sent.shape, generator=torch.Generator().manual_seed(0))
    attack = prepared(model, 1, steps=1000, lr=0.3)
    run = _Descent(attack, Sent.from_states(sent + 0.1 * sent.std() * noise, mask), Deadline())
    with attack.bottom.session():
        attack.solve(run)
    assert run.finished
    assert int(run.steps.max()) < 1000
    assert torch.equal(run.tokens[mask == 1], ids[mask == 1])
    assert float(run.errors[mask == 1].min()) > 1e-2


def test_sweeps_find_what_descent_left() -> None:
    model = tiny_bert_mlm(layers=3)
    ids, mask, sent = sent_by(model, 3, 6, 10)
    few = {"steps": 6, "lr": 0.05, "initial": "mean"}
    plain = prepared(model, 3, **few).reconstruct(sent, mask, None)
    swept = prepared(model, 3, sweeps=2, **few).reconstruct(sent, mask, None)
    right = [float((g.tokens == ids)[mask == 1].float().mean()) for g in (plain, swept)]
    assert right[0] < 0.9
    assert right[1] == 1
    assert swept.candidates > plain.candidates


# ---- time -----------------------------------------------------------------------------------


def slow_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Budgets run by a clock that goes on by a millisecond each time it is read."""
    clock = (i / 1000 for i in itertools.count())
    monkeypatch.setattr(sent_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return clock


def test_a_budget_is_kept_and_dealt_out_to_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = slow_clock(monkeypatch)
    model = tiny_gpt2(layers=3)
    _, mask, sent = sent_by(model, 2, 6)
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 16)
    monkeypatch.setattr(embedding_descent, "PAPER_COSINE", 1.0)
    attack = prepared(model, budget_seconds=0.2, steps=10**6, stop="cosine")
    steps: list[int] = []
    solve = attack.solve

    def counted(run: _Descent) -> None:
        solve(run)
        steps.extend(run.steps.tolist())

    monkeypatch.setattr(attack, "solve", counted)
    guess = attack.reconstruct(sent, mask, None)
    assert next(clock) < 0.3
    assert not guess.finished
    assert min(steps) > 0
    assert min(steps) * 10 > max(steps)


def test_texts_that_the_budget_does_not_reach_are_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 8)
    model = tiny_gpt2(layers=2)
    _, mask, sent = sent_by(model, 1, 3)
    attack = prepared(model, 1, budget_seconds=1e-9)
    guess = attack.reconstruct(sent, mask, None)
    assert not guess.finished
    assert bool((guess.tokens[1:] == NOTHING).all())
    assert bool((guess.tokens[0][mask[0] == 1] != NOTHING).all())


def test_what_a_sweep_found_is_not_lost_when_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_bert_mlm(layers=3)
    _, mask, sent = sent_by(model, 3, 6, 10)
    noise = torch.randn(sent.shape, generator=torch.Generator().manual_seed(5))
    few = {"lr": 0.05, "initial": "mean"}
    monkeypatch.setattr(embedding_descent, "SIMILAR", 2)
    over = [False]
    monkeypatch.setattr(Deadline, "passed", property(lambda _: over[0]))
    sweep = EmbeddingDescent._sweep

    def last_one(*args: Any, **kwargs: Any) -> None:
        sweep(*args, **kwargs)
        over[0] = True

    once = prepared(model, 3, steps=6, sweeps=1, **few).reconstruct(sent + 0.2 * noise, mask, None)
    monkeypatch.setattr(EmbeddingDescent, "_sweep", last_one)
    cut = prepared(model, 3, steps=60, sweeps=10, **few).reconstruct(sent + 0.2 * noise, mask, None)
    assert once.finished
    assert not cut.finished
    assert torch.equal(cut.tokens, once.tokens)


# ---- the copy -------------------------------------------------------------------------------


def test_the_copy_is_stale_until_it_is_refreshed() -> None:
    model = tiny_llama(layers=3)
    anatomy = find_anatomy(model)
    attack = prepared(model, steps=150)
    ids, mask = text()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.roll(1, 0))
    sent = hidden_states(anatomy, 2, ids, mask)
    stale = attack.reconstruct(sent, mask, None)
    assert attack.bottom.age(7) == 7
    table = attack.table
    attack.refresh(anatomy, 7)
    assert attack.table is not table
    table = attack.table
    fresh = attack.reconstruct(sent, mask, None)
    assert attack.bottom.age(7) == 0
    assert float((stale.tokens == ids)[mask == 1].float().mean()) < 0.5
    assert torch.equal(fresh.tokens[mask == 1], ids[mask == 1])
    attack.refresh_every = 5
    attack.refresh(anatomy, 11)
    assert attack.bottom.age(11) == 4
    attack.refresh(anatomy, 12)
    assert attack.bottom.age(12) == 0
    assert attack.table is table
    attack.refresh(anatomy, 3)
    assert attack.bottom.age(3) == 0


def test_under_the_clients_autocast() -> None:
    model = tiny_gpt2(layers=2)
    ids, mask = text()
    anatomy = find_anatomy(model)
    with torch.autocast("cpu", torch.bfloat16):
        sent = hidden_states(anatomy, 1, ids, mask)
    attack = prepared(model, 1, RunFacts(autocast=torch.bfloat16), steps=100)
    guess = attack.reconstruct(sent, mask, None)
    assert torch.equal(guess.tokens[mask == 1], ids[mask == 1])
    assert float(errors_of(attack, ids, sent, mask).max()) < 1e-9
    other = prepared(model, 1)
    assert float(errors_of(other, ids, sent, mask).max()) > 1e-4


def test_positions_are_the_models_own_or_those_sent() -> None:
    model = tiny_gpt2(layers=2)
    ids, mask = text(side="left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    anatomy = find_anatomy(model)
    sent = hidden_states(anatomy, 1, ids, mask, position_ids=positions)
    attack = prepared(model, 1, steps=200)
    guess = attack.reconstruct(sent, mask, positions)
    assert torch.equal(guess.tokens[mask == 1], ids[mask == 1])
    assert float(errors_of(attack, ids, sent, mask, positions).max()) < 1e-4
    assert float(errors_of(attack, ids, sent, mask).max()) > 1e-3


# ---- what it is given -----------------------------------------------------------------------


def test_it_reads_the_newest_activations_of_its_layer() -> None:
    model = tiny_gpt2(layers=2)
    anatomy = find_anatomy(model)
    attack = prepared(model, 1, steps=200)
    (name,) = attack.needs(anatomy).layers
    ids, mask = text()
    sent = hidden_states(anatomy, 1, ids, mask)
    snapshot = ActivationSnapshot(
        0, Stage.SHARED, {name: sent, "other": sent + 1}, attention_mask=mask
    )
    guess = attack.run(Observation(activations=(snapshot,)))
    assert torch.equal(guess.tokens[mask == 1], ids[mask == 1])
    other = {anatomy.block_names[1]: sent}
    with pytest.raises(KeyError, match=name):
        attack.run(Observation(activations=(ActivationSnapshot(0, Stage.SHARED, other),)))
    broken = ActivationSnapshot(0, Stage.SHARED, {name: sent * torch.nan})
    with pytest.raises(UnusableObservation, match="not finite"):
        attack.run(Observation(activations=(broken,)))


def test_bad_settings_for_this_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer must be .*got 9"):
        prepared(tiny_gpt2(), 9)
    with pytest.raises(ValueError, match="holds the unknown id 97"):
        prepared(tiny_gpt2(), 1, initial=VOCAB)
