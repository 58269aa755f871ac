"""Scores that know nothing of the training."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.naive_bayes import MultinomialNB

from lightning_fedleak.attacks.memorization.scores import FOLDS, blind_scores, word_scores
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps.tokens import Text


def some_texts(n: int, seed: int, shift: int = 0) -> list[Text]:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(shift, shift + 30, (12,), generator=g) for _ in range(n)]
    return [Text(row, row) for row in rows]


def test_word_scores_are_those_of_sklearn() -> None:
    texts = some_texts(40, 0) + some_texts(35, 1, shift=5)
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
    texts = some_texts(60, 0) + some_texts(60, 1, shift=25)
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
