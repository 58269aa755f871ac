"""Descents by autograd and brute force; sweeps, the server's copy, a readout of states."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak import progress
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts import embedding_descent
from lightning_fedleak.attacks.texts import embedding_descent as state_readout
from lightning_fedleak.attacks.texts.base import NOTHING, Sent, WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import RowAdam, _Text, high_errors, sweep
from lightning_fedleak.attacks.texts.embedding_descent import (
    DescentSettings,
    EmbeddingDescent,
    StateReadout,
    _Descent,
    _TokenTable,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import ActivationSnapshot, Observation, Stage
from tests.helpers import models
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


def prepared(model, layer=2, facts=None, **settings) -> EmbeddingDescent:
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
    run = _Descent(attack, Sent.from_states(sent, mask), WorkLimit())
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
def test_likest_tokens_are_those_of_brute_force(chunk, monkeypatch) -> None:
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
        run = _Descent(attack, Sent.from_states(sent, mask), WorkLimit())
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
    run = _Descent(attack, Sent.from_states(sent + 0.1 * sent.std() * noise, mask), WorkLimit())
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


def limited(attack: Any, work: int) -> Any:
    """Return an attack whose searches end after so much work, as if it had been planned."""
    attack.budget_seconds, attack._work = 1.0, work
    return attack


def test_a_budget_is_kept_and_dealt_out_to_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt2(layers=3)
    _, mask, sent = sent_by(model, 2, 6)
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 16)
    monkeypatch.setattr(embedding_descent, "PAPER_COSINE", 1.0)
    attack = limited(prepared(model, steps=10**6, stop="cosine"), 40_000)
    steps: list[int] = []
    solve = attack.solve

    def counted(run: _Descent) -> None:
        solve(run)
        steps.extend(run.steps.tolist())

    monkeypatch.setattr(attack, "solve", counted)
    before = attack.bottom.work
    guess = attack.reconstruct(sent, mask, None)
    assert 40_000 <= attack.bottom.work - before < 42_000
    assert not guess.finished
    assert min(steps) > 0
    assert min(steps) * 2 > max(steps)


def test_the_work_is_planned_once_and_the_clock_changes_nothing_after_that(monkeypatch) -> None:
    model = tiny_gpt2(layers=3)
    _, mask, sent = sent_by(model, 2, 6)
    monkeypatch.setattr(embedding_descent, "PAPER_COSINE", 1.0)
    attack = prepared(model, steps=10**6, stop="cosine", budget_seconds=0.1)
    first = attack.reconstruct(sent, mask, None)
    assert not first.finished
    planned = attack._work
    monkeypatch.setattr(progress.Stopwatch, "seconds", property(lambda _: 1e9))  # a busy machine
    assert torch.equal(attack.reconstruct(sent, mask, None).tokens, first.tokens)
    assert attack._work == planned
    assert math.log2(planned) % 1 == 0


def test_texts_that_the_budget_does_not_reach_are_left_open(monkeypatch) -> None:
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 8)
    model = tiny_gpt2(layers=2)
    _, mask, sent = sent_by(model, 1, 3)
    attack = limited(prepared(model, 1), 1)
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
    monkeypatch.setattr(WorkLimit, "reached", property(lambda _: over[0]))
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


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def spoilt(ids: Tensor, places: list[int]) -> Tensor:
    other = ids.clone()
    other[:, places] = (ids[:, places] + 11) % (VOCAB - 3) + 3
    return other


def case(layer: int = 3, b: int = 2, length: int = 9, seed: int = 0):
    """A bottom of a BERT, texts, their mask, what was sent, and candidates with the truth."""
    model = tiny_bert_mlm(layers=3).double()
    ids = drawn(b, length, seed=seed)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    sent = hidden_states(find_anatomy(model), layer, ids, mask)
    candidates = torch.cat([drawn(b, length, 5, seed=seed + 1), ids[..., None]], -1)
    bottom = BottomModel(find_anatomy(model), layer)
    return bottom, ids, mask, Sent.from_states(sent, mask), candidates


def sums(bottom: BottomModel, sent: Sent, texts: Tensor) -> Tensor:
    hidden = bottom.hidden(texts, sent.attention_mask)
    return sent.relative_errors(hidden).square().sum(1)


@pytest.mark.parametrize("places", [[0], [2, 3], [1, 4, 5, 6]])
def test_wrong_tokens_are_put_right(places: list[int]) -> None:
    bottom, ids, mask, sent, candidates = case()
    swept = sweep(bottom, sent, spoilt(ids, places), candidates, limit=WorkLimit())
    assert torch.equal(swept.tokens[mask == 1], ids[mask == 1])
    assert swept.exact.tolist() == [True, True]
    assert swept.finished
    assert float(swept.errors.max()) < 1e-8
    assert swept.candidates > 0


def test_it_finds_what_brute_force_over_all_texts_finds() -> None:
    """Three places, three candidates each, none of them right: the best of 64 texts."""
    bottom, ids, _, sent, candidates = case(b=1, seed=4)
    start, places = spoilt(ids, [1, 3, 5]), [1, 3, 5]
    offered = start[..., None].repeat(1, 1, 3)
    offered[:, places] = candidates[:, places, :3]
    texts = []
    for chosen in itertools.product(range(4), repeat=3):
        one = start[0].clone()
        for place, k in zip(places, chosen, strict=True):
            if k < 3:
                one[place] = offered[0, place, k]
        texts.append(one)
    same = sent[torch.zeros(64, dtype=torch.int64)]
    best = torch.stack(texts)[sums(bottom, same, torch.stack(texts)).argmin()]
    swept = sweep(bottom, sent, start, offered, limit=WorkLimit())
    assert torch.equal(swept.tokens[0], best)
    assert not bool(swept.exact[0])
    torch.testing.assert_close(
        swept.errors.square().sum(1), sums(bottom, sent, best[None]), rtol=1e-9, atol=0
    )


def test_errors_and_gradient_are_the_models() -> None:
    bottom, ids, mask, sent, candidates = case(b=1)
    start = spoilt(ids, [2])
    text = _Text(bottom, sent, start[0], candidates[0])
    several = torch.cat([start, ids, start.flip(1)])
    with torch.no_grad():
        for row, errors in zip(several, text._errors(several), strict=True):
            hidden = bottom.hidden(row[None], mask)[0]
            for place in range(9):
                by_hand = (hidden[place] - sent.hidden[0, place]).norm() * mask[0, place]
                assert float(errors[place]) == pytest.approx(float(by_hand), abs=1e-9)

        # To first order: move a short way towards each candidate and see what becomes of the error.
        words, step, rises = bottom.word_embeddings(start), 1e-5, []
        for place, k in itertools.product(range(7), range(6)):
            moved = words.clone()
            target = bottom.word_embeddings(candidates[0, place, k])
            moved[0, place] += step * (target - moved[0, place])
            total = sent.relative_errors(bottom.hidden_from(moved, mask)).square().sum()
            rises.append(float(total - sums(bottom, sent, start)))
        expected = sorted(range(42), key=lambda i: rises[i])
        expected = [i for i in expected if rises[i] < 0][:24]
        assert text._recommended().tolist() == expected


def test_high_errors_are_those_that_noise_does_not_explain() -> None:
    errors = torch.tensor([[1.0, 1.1, 0.9, 1.0, 5.0, 9.0], [1.0, 1.2, 0.9, 1.1, 1.0, 0.0]])
    real = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]).bool()
    high = high_errors(errors, real)
    assert high.nonzero().tolist() == [[0, 4]]


IDS = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, *[1] * 7], [1] * 9])


def lora() -> torch.nn.Module:
    with models.own_rng(0):
        return get_peft_model(
            models.tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )


@pytest.mark.parametrize(
    "make",
    [models.tiny_gpt2, models.tiny_llama, models.tiny_bert_mlm, models.tiny_roberta_mlm, lora],
)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_states_are_the_clients_from_tokens_and_from_their_embeddings(make, layer) -> None:
    model = make().train()
    anatomy = find_anatomy(model)
    bottom = BottomModel(anatomy, layer)
    padding = model.get_input_embeddings().padding_idx
    ids = IDS.masked_fill(MASK == 0, padding or 0)
    theirs = hidden_states(anatomy, layer, ids, MASK)[MASK == 1]
    assert torch.equal(bottom.hidden(ids, MASK)[MASK == 1], theirs)
    words = bottom.word_embeddings(ids).requires_grad_()
    states = bottom.hidden_from(words, MASK)
    torch.testing.assert_close(states[MASK == 1], theirs, rtol=1e-5, atol=1e-6)
    states[MASK == 1].square().sum().backward()
    assert words.grad is not None
    assert bool(words.grad[MASK == 1].any(-1).all())
    assert all(p.grad is None for p in model.parameters())
    assert (bottom.width, bottom.vocab_size) == (models.DIM, models.VOCAB)
    assert all(m.training for m in model.modules())


def test_what_cannot_be_run_is_refused() -> None:
    anatomy = find_anatomy(models.tiny_gpt2())
    with pytest.raises(ValueError, match=r"layer must be .* 0 to 2, got 3: the model has 2 blocks"):
        BottomModel(anatomy, 3)
    bottom = BottomModel(anatomy, 1)
    with pytest.raises(ValueError, match="truncate texts to 64 tokens"):
        bottom.hidden(torch.ones(1, 65, dtype=torch.int64))
    torch.testing.assert_close(
        bottom.cut_at_layer(0).hidden(IDS), hidden_states(anatomy, 0, IDS), rtol=0, atol=0
    )


def random_text(b: int = 6, length: int = 10) -> Tensor:
    return torch.randint(3, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_ridge_regression_of_words_on_states(causal, monkeypatch) -> None:
    model = (tiny_gpt2(layers=3) if causal else tiny_bert_mlm(layers=3)).double().eval()
    bottom = BottomModel(find_anatomy(model), 2)
    table = bottom.word_embeddings()
    monkeypatch.setattr(state_readout, "TEXTS", 5)
    monkeypatch.setattr(state_readout, "LENGTH", 12)
    readout = StateReadout.fit(bottom, table)
    ids = torch.randint(VOCAB, (5, 12), generator=torch.Generator().manual_seed(0))
    first = int(causal)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[2][:, first:]
    x, y = states.flatten(0, 1), table[ids[:, first:]].flatten(0, 1)
    mean = x.mean(0)
    # Ridge regression as least squares with d rows more.
    ridge = state_readout.RIDGE * (x - mean).square().sum(0).mean()
    more = ridge.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.lstsq(
        torch.cat([x - mean, more]), torch.cat([y - y.mean(0), torch.zeros_like(more)])
    ).solution
    torch.testing.assert_close(readout.weights, weights, rtol=1e-6, atol=1e-8)
    near = x[:4] * 0.1 + mean * 0.9
    expected = (near - mean) @ weights + y.mean(0)
    torch.testing.assert_close(readout.words(near), expected, rtol=1e-6, atol=1e-8)


def test_what_is_read_stays_among_the_words() -> None:
    bottom = BottomModel(find_anatomy(tiny_llama(layers=2)), 1)
    readout = StateReadout.fit(bottom, bottom.word_embeddings())
    far = readout.words(1e6 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(
        (far - readout.word).norm(dim=-1), torch.full((3,), readout.radius), rtol=1e-4, atol=0
    )
    assert torch.equal(readout.words(readout.state[None])[0], readout.word)


def test_padding_that_is_not_finite_does_no_harm() -> None:
    anatomy, ids = find_anatomy(tiny_bert_mlm(layers=2)), random_text()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    attack = EmbeddingDescent(1, steps=1)
    attack.prepare(anatomy)
    hidden = hidden_states(anatomy, 1, ids, mask)
    hidden[0, 6:] = torch.nan
    start = attack.start(Sent.from_states(hidden, mask))
    assert bool(torch.isfinite(start).all())
    assert torch.equal(start[0, 6:], attack.table.mean.expand(4, -1))
