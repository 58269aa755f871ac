"""Scores that ignore the training refute a draw that did not take place, and no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_fedleak.evaluation.canaries.repeats import group_texts
from lightning_fedleak.evaluation.metrics.draws import _similarities, refute_draw
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text

N, LENGTH = 120, 24
MEMBERS = torch.arange(N) < N // 2


def texts_of(generator: torch.Generator, shift: torch.Tensor) -> list[Text]:
    """Return texts of a vocabulary of 400; members take a share of words of their own."""
    rows = torch.randint(0, 300, (N, LENGTH), generator=generator)
    own = torch.randint(300, 400, (N, LENGTH), generator=generator)
    picked = torch.rand(N, LENGTH, generator=generator) < shift[:, None]
    return [Text(row, row) for row in torch.where(picked, own, rows)]


def snapshot(generator: torch.Generator, gain: torch.Tensor) -> TokenSnapshot:
    log_probs = -3 + torch.randn(N, LENGTH - 1, generator=generator) + gain[:, None]
    ones = torch.ones_like(log_probs)
    return TokenSnapshot(log_probs, -6 * ones, 2 * ones, ones > 0, ones > 0)


def refuted(seed: int, words: float = 0, gain: float = 0) -> str | None:
    generator = torch.Generator().manual_seed(seed)
    texts = texts_of(generator, words * MEMBERS)
    base = snapshot(generator, gain * MEMBERS)
    return refute_draw(base, torch.full((N,), 50.0), texts, MEMBERS)


def test_a_draw_that_took_place_is_believed() -> None:
    assert [refuted(seed) for seed in range(20)] == [None] * 20


def test_other_words_and_a_base_that_knows_the_members_refute_it() -> None:
    assert "'words', which ignores the training" in str(refuted(0, words=0.3))
    assert "the base knows one side" in str(refuted(0, gain=0.8))


def test_texts_that_share_passages_are_permuted_together() -> None:
    """Twenty documents in words of their own, cut in six, overlap: a draw of documents is one."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(0, 15, (20, 96), generator=generator)
    documents += 15 * torch.arange(20)[:, None]
    sides = torch.arange(N) // 6 % 2 == 0
    base = snapshot(generator, torch.zeros(N))
    found = []
    for step in (7, 16):  # passages of 16 tokens share 9, or none
        parts = [d[n : n + 16].clone() for d in documents for n in range(0, 6 * step, step)]
        texts = [Text(part, part) for part in parts]
        groups = group_texts(texts, sides.numpy())
        found.append((groups.max() + 1, refute_draw(base, torch.full((N,), 50.0), texts, sides)))
        assert group_texts(texts, (torch.arange(N) % 2 == 0).numpy()).max() == N - 1
    assert found[0] == (20, None)
    assert found[1][0] > 100
    assert found[1][1] is not None


def test_texts_of_a_row_are_permuted_together() -> None:
    """Twenty rows hold six texts in words of their own each: a draw of rows is one."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(N) // 6
    ids = torch.randint(0, 15, (N, 16), generator=generator) + 15 * owners[:, None]
    texts, sides = [Text(row, row) for row in ids], owners % 2 == 0
    settings = snapshot(generator, torch.zeros(N)), torch.full((N,), 50.0), texts
    assert refute_draw(*settings, sides) is not None
    assert refute_draw(*settings, sides, owners) is None
    assert group_texts(texts, (torch.arange(N) % 2 == 0).numpy(), owners.numpy()).max() == 19


def test_similarities_are_cosines_of_weighted_counts() -> None:
    texts = texts_of(torch.Generator().manual_seed(3), torch.zeros(N))[:6]
    counts = np.stack([np.bincount(text.ids.numpy(), minlength=400) for text in texts])
    weights = np.log(6 / np.maximum((counts > 0).sum(0), 1))
    rows = np.log1p(counts) * weights
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert _similarities(texts) == pytest.approx(rows @ rows.T)
