"""Extraction by the model's own sampling; scores that know nothing of the training."""

import math

import numpy as np
import pytest
import torch
from sklearn.naive_bayes import MultinomialNB
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fedleak.attacks.memorization import Extraction
from lightning_fedleak.attacks.memorization.scores import FOLDS, blind_scores, word_scores
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps.tokens import Text, compressed_bytes, token_log_probs


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    """Return a model that has learned a few texts by heart, and others a little."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_head=2, n_layer=2, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    texts = torch.randint(1, 50, (4, 20), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(texts, labels=texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def released_by(model: GPT2LMHeadModel, texts: list[Text]) -> Observation:
    answers = token_log_probs(find_anatomy(model), texts)
    return Observation(released=ReleasedModel(answers, answers, compressed_bytes(texts)))


def some_texts() -> list[Text]:
    known = torch.randint(1, 50, (4, 20), generator=torch.Generator().manual_seed(1))
    other = torch.randint(1, 50, (4, 20), generator=torch.Generator().manual_seed(2))
    mixed = torch.cat([known[0, :12], other[0, :8]])
    return [Text(ids, ids) for ids in [*known, *other, mixed]]


def test_greedy_is_what_generate_writes(model: GPT2LMHeadModel) -> None:
    k, texts = 5, some_texts()
    guess = Extraction(tokens=k).run(released_by(model, texts))
    ids = torch.stack([text.ids for text in texts])
    greedy = torch.zeros(len(texts), dtype=torch.bool)
    settings = {"do_sample": False, "max_new_tokens": k, "min_new_tokens": k, "pad_token_id": 0}
    for start in range(1, ids.shape[1] - k + 1):
        prompts = ids[:, :start]
        mask = torch.ones_like(prompts)
        written = model.generate(prompts, attention_mask=mask, eos_token_id=None, **settings)
        greedy |= (written[:, start:] == ids[:, start : start + k]).all(1)
    assert guess.greedy.tolist() == greedy.tolist()
    assert guess.greedy[:4].any()
    assert not guess.greedy[4:8].any()


def test_the_probability_is_that_of_sampling(model: GPT2LMHeadModel) -> None:
    ids = some_texts()[0].ids[:4]
    log_prob = float(
        Extraction(tokens=2).run(released_by(model, [Text(ids, label_last(ids, 2))])).log_probs
    )
    draws = 100_000
    with torch.no_grad():
        first = model(ids[None, :2]).logits[0, -1].softmax(0)
        second = model(ids[None, :3]).logits[0, -1].softmax(0)
    g = torch.Generator().manual_seed(0)
    hits = torch.multinomial(first, draws, replacement=True, generator=g) == ids[2]
    hits &= torch.multinomial(second, draws, replacement=True, generator=g) == ids[3]
    share = float(hits.double().mean())
    p = math.exp(log_prob)
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / draws) + 1e-9


def label_last(ids: torch.Tensor, k: int) -> torch.Tensor:
    labels = torch.full_like(ids, -100)
    labels[-k:] = ids[-k:]
    return labels


@pytest.mark.parametrize("draws", [1, 7, 100, 10_000])
def test_discoverable_is_its_definition(draws: int) -> None:
    attack = Extraction()
    p = torch.tensor([1e-9, 1e-5, 6e-5, 8e-5, 0.004, 0.02, 0.3, 0.49, 0.51, 1.0]).double()
    expected = 1 - (1 - p) ** draws >= 0.5
    assert attack.extracted(p.log(), draws).tolist() == expected.tolist()


def test_a_run_does_not_cross_what_is_no_label(model: GPT2LMHeadModel) -> None:
    ids = some_texts()[0].ids
    labels = ids.clone()
    labels[10] = -100
    guess = Extraction(tokens=10).run(released_by(model, [Text(ids, labels), Text(ids, ids)]))
    assert guess.has_run.tolist() == [False, True]
    assert math.isnan(float(guess.log_probs[0]))
    assert not guess.greedy[0]


def texts_of_words(n: int, seed: int, shift: int = 0) -> list[Text]:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(shift, shift + 30, (12,), generator=g) for _ in range(n)]
    return [Text(row, row) for row in rows]


def test_word_scores_are_those_of_sklearn() -> None:
    texts = texts_of_words(40, 0) + texts_of_words(35, 1, shift=5)
    members = torch.arange(75) < 40
    scores = word_scores(texts, members, seed=3)
    size = 1 + max(int(t.ids.max()) for t in texts)
    counts = torch.stack([torch.bincount(t.ids, minlength=size) for t in texts]).numpy()
    generator = torch.Generator().manual_seed(3)
    folds = torch.empty(75, dtype=torch.long)
    for group in (members, ~members):
        folds[group] = torch.randperm(int(group.sum()), generator=generator) % FOLDS
    for fold in range(FOLDS):
        inside = (folds == fold).numpy()
        model = MultinomialNB(alpha=1.0, fit_prior=False)
        model.fit(counts[~inside], members.numpy()[~inside])
        log_odds = np.diff(model.predict_joint_log_proba(counts[inside]), axis=1)[:, 0]
        np.testing.assert_allclose(scores[inside], log_odds / counts[inside].sum(1), atol=1e-9)


def test_another_law_is_seen_by_words_and_length() -> None:
    texts = texts_of_words(60, 0) + texts_of_words(60, 1, shift=25)
    members = torch.arange(120) < 60
    ones = torch.ones(120, 11)
    labels = torch.ones(120, 11, dtype=torch.bool)
    labels[60:, 6:] = False
    base = TokenSnapshot(-ones * labels, -ones, ones, ~labels, labels)
    scores = blind_scores(base, torch.ones(120), texts, members)
    for name in ("words", "length"):
        inside, outside = scores[name][members], scores[name][~members]
        assert (inside[:, None] > outside).double().mean() > 0.95
    assert (scores["loss"] == scores["loss"][0]).all()
