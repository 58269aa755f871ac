"""Texts from embeddings and hidden states: inversion by prefix, and by descent."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak import progress
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts import embedding_descent
from lightning_fedleak.attacks.texts import embedding_descent as state_readout
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, Sent, TextGuess
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import RowAdam, _Text, high_errors, sweep
from lightning_fedleak.attacks.texts.embedding_descent import (
    DescentSettings,
    EmbeddingDescent,
    StateReadout,
    _Descent,
    _TokenTable,
)
from lightning_fedleak.attacks.texts.prefix import inversion, verification
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion, typical_states
from lightning_fedleak.attacks.texts.prefix.search import _BeamSearch
from lightning_fedleak.attacks.texts.prefix.table import StateTable
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import ActivationSnapshot, Observation, Stage
from tests.helpers import models
from tests.helpers.inputs import padded_text as text
from tests.helpers.models import DIM, VOCAB, tiny_bert_mlm, tiny_gpt2, tiny_llama

# PrefixInversion on small random models, against the texts that were really sent.


STORIES = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "models" / "stories15M"
LEFT = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12, [0] * 8 + [1] * 4])


def texts(rows: int = 3, length: int = 12, seed: int = 0, vocab: int = models.VOCAB):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def prepared(model, layer: int, facts: RunFacts | None = None, **settings) -> PrefixInversion:
    anatomy = find_anatomy(model)
    public = PublicText(texts(40, 16, seed=7, vocab=anatomy.vocab_size))
    attack = PrefixInversion(layer, public, **settings)
    attack.meet(facts or RunFacts())
    attack.prepare(anatomy)
    return attack


def noisy(hidden: torch.Tensor, sigma: float, seed: int = 3) -> torch.Tensor:
    draw = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
    return hidden + sigma * hidden.std() * draw


GPT2, LLAMA = models.tiny_gpt2, models.tiny_llama


@pytest.mark.parametrize(
    ("make", "tied", "layer"),
    [
        (m, tied, layer)
        for layer in (0, 1, 3)
        for m, tied in ((GPT2, layer != 3), (LLAMA, layer == 3))
    ],
)
def test_without_noise_the_text_is_exact(make, tied, layer) -> None:
    model = make(tied=tied, layers=3)
    sent = texts()
    guess = prepared(model, layer).reconstruct(
        hidden_states(find_anatomy(model), layer, sent), None, None
    )
    assert torch.equal(guess.tokens, sent)
    assert guess.finished


@pytest.mark.parametrize(  # each pair of values is there
    ("make", "side", "positions", "batch"),
    [
        (GPT2, "left", False, 1),
        (GPT2, "left", True, 3),  # its positions are no distances
        (GPT2, "right", True, 3),
        (LLAMA, "left", True, 3),
        (LLAMA, "right", False, 3),
        (LLAMA, "right", True, 1),
    ],
)
def test_padded_batches_are_exact(make, side, positions, batch, monkeypatch) -> None:
    monkeypatch.setitem(inversion.TEXTS_AT_ONCE, "cpu", batch)
    model = make(layers=3)
    mask = LEFT if side == "left" else LEFT.flip(1)
    given = (mask.cumsum(1) - 1).clamp(min=0) if positions else None
    sent = texts()
    anatomy = find_anatomy(model)
    hidden = hidden_states(anatomy, 2, sent, mask, position_ids=given)
    guess = prepared(model, 2).reconstruct(hidden, mask, given)
    assert torch.equal(guess.tokens, sent.masked_fill(mask == 0, NOTHING))


CROWDED = set(range(40, 90))


def crowded_llama() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model in bf16 with 50 tokens that hardly differ, 40 to 89, and a text with five of them."""
    model = models.tiny_llama(layers=3)
    weight = model.get_input_embeddings().weight.data
    apart = torch.randn(50, weight.shape[1], generator=torch.Generator().manual_seed(2))
    weight[40:90] = weight[40] + 0.004 * weight[40].abs().mean() * apart
    text = [5, 44, 7, 61, 9, 80, 11, 12, 52, 13, 14, 15, 16, 17, 18, 19, 41, 20]
    return model.to(torch.bfloat16), torch.tensor([text])


def rough_cache(monkeypatch: pytest.MonkeyPatch, seed: int = 4) -> None:
    """Runs with a cache differ from whole texts by half a percent."""
    run, generator = Prefixes._run, torch.Generator().manual_seed(seed)

    def rough(self: Prefixes, *args: torch.Tensor) -> torch.Tensor:
        states = run(self, *args)
        return states * (1 + 0.005 * torch.randn(states.shape, generator=generator)).to(states)

    monkeypatch.setattr(Prefixes, "_run", rough)


@pytest.mark.parametrize("seed", range(4))
def test_rounding_confuses_no_tokens_but_those_that_it_hides(monkeypatch, seed) -> None:
    model, sent = crowded_llama()
    order = torch.randperm(sent.shape[1], generator=torch.Generator().manual_seed(seed))
    sent = sent[:, order]
    hidden = hidden_states(find_anatomy(model), 3, sent)
    rough_cache(monkeypatch)
    guess = prepared(model, 3).reconstruct(hidden, None, None)
    wrong = guess.tokens != sent
    assert guess.finished
    assert set(sent[wrong].tolist()) <= CROWDED
    assert set(guess.tokens[wrong].tolist()) <= CROWDED


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_nearest_of_verified_tokens_is_kept(distances: list[int]) -> None:
    position = verification.OpenPosition()
    tokens = torch.arange(10, 10 + len(distances))
    states = torch.randn(len(distances), 3)
    nearest = position.add_nearest(tokens, states, torch.tensor(distances, dtype=torch.float32))
    assert distances[nearest] == min(distances) == position.distances[position.best]
    assert torch.equal(position.states[0], states[nearest])
    assert position.verified == set(tokens.tolist())


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("make", [GPT2, LLAMA])
def test_a_client_in_bf16_is_read_exactly(make, mixed) -> None:
    model = make(layers=3)
    model = model if mixed else model.to(torch.bfloat16)
    sent = texts(length=20)
    anatomy = find_anatomy(model)
    with torch.autocast("cpu", torch.bfloat16, mixed):
        hidden = hidden_states(anatomy, 2, sent)
    facts = RunFacts(autocast=torch.bfloat16 if mixed else None)
    guess = prepared(model, 2, facts).reconstruct(hidden, None, None)
    assert torch.equal(guess.tokens, sent)


def greedy(model, layer: int, hidden: torch.Tensor) -> tuple[list[int], float]:
    """At each place the nearest of all tokens, behind those found; and their total distance."""
    anatomy = find_anatomy(model)
    result: list[int] = []
    total = 0.0
    for target in hidden:
        tries = torch.tensor([[*result, t] for t in range(anatomy.vocab_size)])
        far = (hidden_states(anatomy, layer, tries)[:, -1] - target).square().sum(1)
        result.append(int(far.argmin()))
        total += float(far.min())
    return result, total


@pytest.mark.parametrize(("make", "sigma"), [(GPT2, 0.7), (LLAMA, 0.7), (LLAMA, 0.01)])
def test_the_nearest_of_all_tokens_is_found(make, sigma) -> None:
    model = make(layers=2)
    hidden = noisy(hidden_states(find_anatomy(model), 2, texts(1, 8)), sigma)
    guess = prepared(model, 2, noised=False).reconstruct(hidden, None, None)
    assert guess.tokens[0].tolist() == greedy(model, 2, hidden[0])[0]


@pytest.mark.parametrize("noised", [None, True])
@pytest.mark.parametrize("seed", range(2))
def test_noised_states_are_explained_about_as_well_as_by_the_true_text(noised, seed) -> None:
    model = models.tiny_llama(layers=2)
    anatomy = find_anatomy(model)
    sent = texts(2, 16, seed=seed)
    clean = hidden_states(anatomy, 2, sent)
    hidden = noisy(clean, 0.5, seed)
    guess = prepared(model, 2, noised=noised).reconstruct(hidden, None, None)
    remaining = (hidden_states(anatomy, 2, guess.tokens) - hidden).square().sum((1, 2))
    assert bool((remaining <= 1.1 * (clean - hidden).square().sum((1, 2))).all())
    assert guess.finished


def check_unfinished(guess: TextGuess) -> None:
    """A text is answered whole, or not at all."""
    answered = guess.tokens != NOTHING
    assert not guess.finished
    assert torch.equal(answered.any(1), answered.all(1))
    assert bool(answered.any()) == (guess.candidates > 0)


def test_places_that_the_budget_does_not_reach_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.tiny_llama(layers=3)
    sent = texts(3, 40)
    hidden = noisy(hidden_states(find_anatomy(model), 2, sent), 0.3)
    attack = prepared(model, 2, noised=True, budget_seconds=0.05)
    clock = slow_clock(monkeypatch)
    guess = attack.reconstruct(hidden, None, None)
    assert next(clock) < 0.1
    check_unfinished(guess)
    right = (guess.tokens == sent).float()
    assert float(right[:, :4].mean()) > 0.5  # which the budget reaches
    assert float(right[:, 20:].mean()) > 20 / models.VOCAB


@pytest.mark.parametrize("noised", [None, True, False])
def test_whatever_was_looked_at_in_time_is_answered(monkeypatch, noised) -> None:
    model = models.tiny_llama(layers=3)
    hidden = noisy(hidden_states(find_anatomy(model), 2, texts(1, 30)), 0.5)
    attack = prepared(model, 2, noised=noised)
    slow_clock(monkeypatch)
    cut = 0
    for milliseconds in (2, 4, 7, 12):
        attack.budget_seconds = (milliseconds + 0.5) / 1000
        guess = attack.reconstruct(hidden, None, None)
        if not guess.finished:
            check_unfinished(guess)
            cut += guess.candidates > 0
    assert cut > 0


def test_a_look_through_the_vocabulary_that_the_clock_ends_is_unfinished(monkeypatch) -> None:
    """Also where time then suffices for what is done on the assumption that noise was added."""
    model = models.tiny_llama(layers=3)
    hidden = noisy(hidden_states(find_anatomy(model), 2, texts(2, 4)), 0.3)
    attack = prepared(model, 2)
    monkeypatch.setattr(verification, "ROUNDS", (8,))
    monkeypatch.setattr(verification, "SWEEP", 1)
    whole = attack.reconstruct(hidden, None, None)
    assert whole.finished
    assumed = []
    for milliseconds in (60, 90, 120, 150, 1000):
        clock = slow_clock(monkeypatch)
        attack.budget_seconds = milliseconds / 1000
        guess = attack.reconstruct(hidden, None, None)
        swept = guess.candidates >= whole.candidates
        assert guess.finished == swept
        if not swept and next(clock) < attack.budget_seconds:
            assert bool((guess.tokens != NOTHING).all())
            assumed.append(milliseconds)
    assert assumed
    assert guess.finished
    assert torch.equal(guess.tokens, whole.tokens)


def test_tokens_with_equal_embeddings_spoil_no_other() -> None:
    model = models.tiny_llama()
    weight = model.get_input_embeddings().weight
    weight.data[5] = weight.data[9]
    sent = torch.tensor([[3, 5, 8, 9, 4]])
    guess = prepared(model, 1).reconstruct(hidden_states(find_anatomy(model), 1, sent), None, None)
    assert guess.tokens[0, [0, 2, 4]].tolist() == [3, 8, 4]
    assert set(guess.tokens[0, [1, 3]].tolist()) <= {5, 9}


def test_a_fit_that_counts_from_zero_again_has_its_own_copy_and_table(monkeypatch) -> None:
    monkeypatch.setattr(inversion, "RENEW_TABLE_EVERY", 100)
    model = models.tiny_llama(layers=3)
    anatomy = find_anatomy(model)
    attack = prepared(model, 2)
    attack.refresh_every = 100
    attack.refresh(anatomy, 500)
    assert attack.bottom.age(500) == 0
    table = attack._table
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))
    attack.refresh(anatomy, 3)
    assert attack.bottom.age(3) == 0
    assert attack._table is not table
    sent = texts()
    guess = attack.reconstruct(hidden_states(anatomy, 2, sent), None, None)
    assert torch.equal(guess.tokens, sent)
    table = attack._table
    attack.refresh(anatomy, 102)
    assert attack.bottom.age(102) == 99
    assert attack._table is table


def test_public_text_is_written_by_the_copy_and_not_by_the_client(monkeypatch) -> None:
    model = models.tiny_llama(layers=3)
    monkeypatch.setattr(inversion, "RENEW_TABLE_EVERY", 1)
    monkeypatch.setattr("lightning_fedleak.attacks.public_text._LENGTH", 8)
    attack = PrefixInversion(2, "sampled")
    attack.refresh_every = 10**6
    attack.prepare(find_anatomy(model))
    weight, weights = model.model.layers[0].self_attn.q_proj.weight, []
    copied = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    given = PublicText.resolve

    def watched(*args):
        weights.append(model.model.layers[0].self_attn.q_proj.weight.detach().clone())
        return given(*args)

    monkeypatch.setattr(PublicText, "resolve", watched)
    attack.refresh(find_anatomy(model), 1)
    assert torch.equal(weights[0], copied)
    assert model.model.layers[0].self_attn.q_proj.weight is weight


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.exists(), reason="FEDLEAK_ASSETS has no stories15M")
def test_a_trained_model_is_read_exactly_and_under_noise_no_worse_than_by_descent() -> None:
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    text = "One day a little girl had a big red ball and went to play with her mom."
    sent = tokenizer(text, return_tensors="pt").input_ids[:, :8]
    commonest = 8500
    assert int(sent.max()) < commonest
    model.resize_token_embeddings(commonest)
    anatomy = find_anatomy(model)
    attack = PrefixInversion(2, None, types=256)
    attack.prepare(anatomy)
    hidden = hidden_states(anatomy, 2, sent)
    assert torch.equal(attack.reconstruct(hidden, None, None).tokens, sent)
    attack.noised = True
    noised = noisy(hidden, 1.0)
    descent = EmbeddingDescent(2, steps=30)
    descent.prepare(anatomy)
    ours, theirs = (a.reconstruct(noised, None, None).tokens for a in (attack, descent))
    assert int((ours == sent).sum()) >= int((theirs == sent).sum())


PREFIX_VOCAB, LENGTH, LAYER = 40, 10, 2


class Case:
    """A text behind noise, and what beams need to read it."""

    def __init__(self, make, seed: int, sigma: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.anatomy = find_anatomy(make(vocab=PREFIX_VOCAB, layers=LAYER))
        self.bottom = BottomModel(self.anatomy, LAYER)
        public = torch.randint(PREFIX_VOCAB, (30, 12), generator=generator)
        states = self.states(public)
        typical = typical_states(self.bottom, public[0, :4], None)
        words = self.bottom.word_embeddings()
        self.table = StateTable(typical, words, states.flatten(0, 1), public.flatten())
        self.sent = torch.randint(PREFIX_VOCAB, (LENGTH,), generator=generator)
        clean = self.states(self.sent[None])[0]
        self.observed = clean + sigma * clean.std() * torch.randn(clean.shape, generator=generator)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        return hidden_states(self.anatomy, LAYER, ids)

    def read(self, width: int, deadline: Deadline | None = None) -> _BeamSearch:
        search = _BeamSearch(
            Prefixes(self.bottom, Layout.from_masks((1, LENGTH), None, None)),
            self.table,
            self.observed,
            self.table.likeliest(self.observed, 16)[0],
            lambda place: None,
            width,
            torch.ones(self.observed.shape[1]),
        )
        self.finished = search.run(deadline or Deadline(), learn=False)
        return search

    def residuals(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.states(tokens[None])[0] - self.observed[: len(tokens)]).norm(dim=1)

    def total(self, tokens: torch.Tensor) -> float:
        return float(self.residuals(tokens).square().sum())

    def by_brute_force(self, width: int) -> torch.Tensor:
        """Beam search that verifies every token behind every prefix, without a cache."""
        beams = torch.zeros(1, 0, dtype=torch.int64)
        for place in range(LENGTH):
            tries = torch.cat(
                [
                    beams.repeat_interleave(PREFIX_VOCAB, 0),
                    torch.arange(PREFIX_VOCAB).repeat(len(beams))[:, None],
                ],
                1,
            )
            far = (self.states(tries) - self.observed[: place + 1]).square().sum((1, 2))
            beams = tries[far.topk(min(width, len(far)), largest=False).indices]
        return beams[0]


@pytest.mark.parametrize("make", [models.tiny_gpt2, models.tiny_llama])
def test_a_prefix_of_a_model_of_transformers_is_run_once(make) -> None:
    bottom = BottomModel(find_anatomy(make(vocab=PREFIX_VOCAB, layers=LAYER)), LAYER)
    assert Prefixes(bottom, Layout.from_masks((1, LENGTH), None, None)).cached


@pytest.mark.parametrize("make", [models.tiny_gpt2, models.tiny_llama])
@pytest.mark.parametrize("sigma", [0.2, 1.0, 2.0])
def test_one_prefix_is_greedy_search(make, sigma) -> None:
    case = Case(make, 1, sigma)
    assert torch.equal(case.read(1).tokens, case.by_brute_force(1))


@pytest.mark.parametrize("make", [models.tiny_gpt2, models.tiny_llama])
@pytest.mark.parametrize("seed", range(3))
def test_beams_leave_no_more_than_greedy_search_over_all_tokens(make, seed) -> None:
    case = Case(make, seed, 1.0)
    search = case.read(6)
    assert case.total(search.tokens) <= case.total(case.by_brute_force(1)) * (1 + 1e-5)
    assert search.position == LENGTH


def test_beams_find_what_greedy_search_misses() -> None:
    better = 0
    for seed in range(2, 6):
        case = Case(models.tiny_llama, seed, 1.5)
        one, many = case.total(case.read(1).tokens), case.total(case.read(6).tokens)
        assert many <= one * (1 + 1e-5)
        better += many < one * (1 - 1e-5)
    assert better > 0


# Descents by autograd and brute force; sweeps, the server's copy, a readout of states.


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


def descent_prepared(model, layer=2, facts=None, **settings) -> EmbeddingDescent:
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

    attack = descent_prepared(model, weighting=weighting)
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
    guess = descent_prepared(model, steps=300).reconstruct(sent, mask, None)
    assert guess.finished
    assert torch.equal(guess.tokens, ids.masked_fill(mask == 0, NOTHING))


def test_the_papers_rule_stops_each_text_at_its_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt2(layers=3)
    ids, mask, sent = sent_by(model, 2)
    paper = {"weighting": "paper", "likeness": "cosine", "initial": 5, "steps": 200}
    steps, cosines = {}, {}
    for cosine in (0.5, 0.98):
        monkeypatch.setattr(embedding_descent, "PAPER_COSINE", cosine)
        attack = descent_prepared(model, stop="cosine", **paper)
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
    attack = descent_prepared(model, 1, steps=1000, lr=0.3)
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
    plain = descent_prepared(model, 3, **few).reconstruct(sent, mask, None)
    swept = descent_prepared(model, 3, sweeps=2, **few).reconstruct(sent, mask, None)
    right = [float((g.tokens == ids)[mask == 1].float().mean()) for g in (plain, swept)]
    assert right[0] < 0.9
    assert right[1] == 1
    assert swept.candidates > plain.candidates


# ---- time -----------------------------------------------------------------------------------


def slow_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Budgets run by a clock that goes on by a millisecond each time it is read."""
    clock = (i / 1000 for i in itertools.count())
    processor = itertools.count(step=1000)  # so that threads never work less than time passes
    times = {"perf_counter": lambda: next(clock), "process_time": lambda: next(processor)}
    monkeypatch.setattr(progress, "time", SimpleNamespace(**times))
    return clock


def test_a_budget_is_kept_and_dealt_out_to_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = slow_clock(monkeypatch)
    model = tiny_gpt2(layers=3)
    _, mask, sent = sent_by(model, 2, 6)
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 16)
    monkeypatch.setattr(embedding_descent, "PAPER_COSINE", 1.0)
    attack = descent_prepared(model, budget_seconds=0.2, steps=10**6, stop="cosine")
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


def test_texts_that_the_budget_does_not_reach_are_left_open(monkeypatch) -> None:
    monkeypatch.setattr(embedding_descent, "TOKENS_AT_ONCE", 8)
    model = tiny_gpt2(layers=2)
    _, mask, sent = sent_by(model, 1, 3)
    attack = descent_prepared(model, 1, budget_seconds=1e-9)
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

    once = descent_prepared(model, 3, steps=6, sweeps=1, **few).reconstruct(
        sent + 0.2 * noise, mask, None
    )
    monkeypatch.setattr(EmbeddingDescent, "_sweep", last_one)
    cut = descent_prepared(model, 3, steps=60, sweeps=10, **few).reconstruct(
        sent + 0.2 * noise, mask, None
    )
    assert once.finished
    assert not cut.finished
    assert torch.equal(cut.tokens, once.tokens)


# ---- the copy -------------------------------------------------------------------------------


def test_the_copy_is_stale_until_it_is_refreshed() -> None:
    model = tiny_llama(layers=3)
    anatomy = find_anatomy(model)
    attack = descent_prepared(model, steps=150)
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
    attack = descent_prepared(model, 1, RunFacts(autocast=torch.bfloat16), steps=100)
    guess = attack.reconstruct(sent, mask, None)
    assert torch.equal(guess.tokens[mask == 1], ids[mask == 1])
    assert float(errors_of(attack, ids, sent, mask).max()) < 1e-9
    other = descent_prepared(model, 1)
    assert float(errors_of(other, ids, sent, mask).max()) > 1e-4


def test_positions_are_the_models_own_or_those_sent() -> None:
    model = tiny_gpt2(layers=2)
    ids, mask = text(side="left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    anatomy = find_anatomy(model)
    sent = hidden_states(anatomy, 1, ids, mask, position_ids=positions)
    attack = descent_prepared(model, 1, steps=200)
    guess = attack.reconstruct(sent, mask, positions)
    assert torch.equal(guess.tokens[mask == 1], ids[mask == 1])
    assert float(errors_of(attack, ids, sent, mask, positions).max()) < 1e-4
    assert float(errors_of(attack, ids, sent, mask).max()) > 1e-3


# ---- what it is given -----------------------------------------------------------------------


def test_it_reads_the_newest_activations_of_its_layer() -> None:
    model = tiny_gpt2(layers=2)
    anatomy = find_anatomy(model)
    attack = descent_prepared(model, 1, steps=200)
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
        descent_prepared(tiny_gpt2(), 9)
    with pytest.raises(ValueError, match="holds the unknown id 97"):
        descent_prepared(tiny_gpt2(), 1, initial=VOCAB)


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
    swept = sweep(bottom, sent, spoilt(ids, places), candidates, deadline=Deadline())
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
    swept = sweep(bottom, sent, start, offered, deadline=Deadline())
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
