"""PrefixInversion on small random models, against the texts that were really sent."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess, WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.attacks.texts.prefix import inversion, verification
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion, typical_states
from lightning_fedleak.attacks.texts.prefix.search import _BeamSearch
from lightning_fedleak.attacks.texts.prefix.table import StateTable
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.attacks.texts.test_embedding_descent import limited
from tests.helpers import models

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


@pytest.mark.parametrize("seed", range(2))
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


def test_places_that_the_budget_does_not_reach_are_ranked() -> None:
    model = models.tiny_llama(layers=3)
    sent = texts(3, 40)
    hidden = noisy(hidden_states(find_anatomy(model), 2, sent), 0.3)
    attack = limited(prepared(model, 2, noised=True), 5_000)
    guess = attack.reconstruct(hidden, None, None)
    check_unfinished(guess)
    right = (guess.tokens == sent).float()
    assert float(right[:, :4].mean()) > 0.5  # which the budget reaches
    assert float(right[:, 20:].mean()) > 20 / models.VOCAB


@pytest.mark.parametrize("noised", [None, True, False])
def test_whatever_was_looked_at_in_time_is_answered(noised) -> None:
    model = models.tiny_llama(layers=3)
    hidden = noisy(hidden_states(find_anatomy(model), 2, texts(1, 30)), 0.5)
    attack = prepared(model, 2, noised=noised)
    cut = 0
    for work in (1, 200, 2_000, 8_000):
        guess = limited(attack, work).reconstruct(hidden, None, None)
        if not guess.finished:
            check_unfinished(guess)
            cut += guess.candidates > 0
    assert cut > 0


def test_a_look_through_the_vocabulary_that_the_limit_ends_is_unfinished(monkeypatch) -> None:
    """Also where time then suffices for what is done on the assumption that noise was added."""
    model = models.tiny_llama(layers=3)
    hidden = noisy(hidden_states(find_anatomy(model), 2, texts(2, 4)), 0.3)
    attack = prepared(model, 2)
    monkeypatch.setattr(verification, "ROUNDS", (8,))
    monkeypatch.setattr(verification, "SWEEP", 1)
    whole = attack.reconstruct(hidden, None, None)
    assert whole.finished
    assumed = []
    for work in (2_000, 4_000, 8_000, 16_000, 10**9):
        before = attack.bottom.work
        guess = limited(attack, work).reconstruct(hidden, None, None)
        swept = guess.candidates >= whole.candidates
        assert guess.finished == swept
        if not swept and attack.bottom.work - before < work:
            assert bool((guess.tokens != NOTHING).all())
            assumed.append(work)
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


VOCAB, LENGTH, LAYER = 40, 10, 2


class Case:
    """A text behind noise, and what beams need to read it."""

    def __init__(self, make, seed: int, sigma: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.anatomy = find_anatomy(make(vocab=VOCAB, layers=LAYER))
        self.bottom = BottomModel(self.anatomy, LAYER)
        public = torch.randint(VOCAB, (30, 12), generator=generator)
        states = self.states(public)
        typical = typical_states(self.bottom, public[0, :4], None)
        words = self.bottom.word_embeddings()
        self.table = StateTable(typical, words, states.flatten(0, 1), public.flatten())
        self.sent = torch.randint(VOCAB, (LENGTH,), generator=generator)
        clean = self.states(self.sent[None])[0]
        self.observed = clean + sigma * clean.std() * torch.randn(clean.shape, generator=generator)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        return hidden_states(self.anatomy, LAYER, ids)

    def read(self, width: int, limit: WorkLimit | None = None, top=None) -> _BeamSearch:
        search = _BeamSearch(
            Prefixes(self.bottom, Layout.from_masks((1, LENGTH), None, None)),
            self.table,
            self.observed,
            self.table.likeliest(self.observed, 16)[0],
            top,
            width,
            torch.ones(self.observed.shape[1]),
        )
        self.finished = search.run(limit or WorkLimit(), learn=False)
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
                    beams.repeat_interleave(VOCAB, 0),
                    torch.arange(VOCAB).repeat(len(beams))[:, None],
                ],
                1,
            )
            far = (self.states(tries) - self.observed[: place + 1]).square().sum((1, 2))
            beams = tries[far.topk(min(width, len(far)), largest=False).indices]
        return beams[0]


@pytest.mark.parametrize("make", [models.tiny_gpt2, models.tiny_llama])
def test_a_prefix_of_a_model_of_transformers_is_run_once(make) -> None:
    bottom = BottomModel(find_anatomy(make(vocab=VOCAB, layers=LAYER)), LAYER)
    assert Prefixes(bottom, Layout.from_masks((1, LENGTH), None, None)).cached


@pytest.mark.parametrize(("make", "sigma"), [(GPT2, 0.2), (LLAMA, 1.0), (LLAMA, 2.0)])
def test_one_prefix_is_greedy_search(make, sigma) -> None:
    case = Case(make, 1, sigma)
    assert torch.equal(case.read(1).tokens, case.by_brute_force(1))


@pytest.mark.parametrize(("make", "seed"), [(GPT2, 0), (LLAMA, 1)])
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


class Habit:
    """Stands for a top model: the token after t is (7 t + 3) % VOCAB, nine times of ten."""

    def log_probabilities(self, ids, mask, position_ids) -> torch.Tensor:
        likely = torch.full((len(ids), VOCAB), math.log(0.1 / (VOCAB - 1)))
        return likely.scatter(1, (7 * ids[:, -1:] + 3) % VOCAB, math.log(0.9))


def test_under_noise_beams_prefer_what_the_top_finds_likely_after_their_own_tokens() -> None:
    read, alone = 0, 0
    for seed in range(4):
        case = Case(models.tiny_llama, seed, 3.0)
        for i in range(1, LENGTH):
            case.sent[i] = (7 * case.sent[i - 1] + 3) % VOCAB
        noise = torch.randn(case.observed.shape, generator=torch.Generator().manual_seed(seed))
        clean = case.states(case.sent[None])[0]
        case.observed = clean + 3.0 * clean.std() * noise
        read += int((case.read(4, top=Habit()).tokens == case.sent).sum())
        alone += int((case.read(4).tokens == case.sent).sum())
    assert read > 2 * alone
    assert read > 0.6 * 4 * LENGTH


@pytest.mark.parametrize("pad", [0, 3])
def test_what_beams_expect_next_is_what_the_model_expects_after_their_tokens(pad) -> None:
    case = Case(models.tiny_llama, 1, 0.0)
    mask = torch.ones(1, LENGTH + pad)
    mask[:, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0).long()
    layout = Layout.from_masks(mask.shape, mask, positions)
    beams = Prefixes(case.bottom, layout).select(torch.zeros(2, dtype=torch.int64))
    tokens = torch.stack([case.sent[:4], case.sent[2:6]])
    beams.follow(tokens)
    beams.keep(torch.tensor([4, 4]))
    top = NextTokens(case.bottom, torch.randn(1, *case.observed.shape))
    with torch.no_grad():
        wanted = case.anatomy.model(input_ids=tokens).logits[:, -1].log_softmax(1)
    torch.testing.assert_close(beams.predicted(top), wanted, atol=1e-5, rtol=1e-4)


def test_a_far_position_lets_no_likely_token_win_at_the_next_one() -> None:
    """Of a stale copy one state may be far from the true one, and the others near."""
    beam: Any = SimpleNamespace(
        squares=torch.full((1, 16), 100.0), spread=torch.ones(16), position=1, start=0,
        prior=torch.tensor([[-10.0, 0.0]]),
    )  # fmt: skip
    near_and_far = 16 * torch.tensor([[0.01, 0.1]])
    scores = _BeamSearch._scores(beam, torch.tensor([[0, 1]]), near_and_far)
    assert scores.argmax() == 0
