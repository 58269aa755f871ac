"""Beams against brute force over the whole vocabulary, on small random models."""

from __future__ import annotations

import pytest
import torch

from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.prefix.inversion import typical_states
from lightning_fedleak.attacks.texts.prefix.search import _BeamSearch
from lightning_fedleak.attacks.texts.prefix.table import StateTable
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers import models

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


class Ticks(Deadline):
    """Over after being looked at ``count`` times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    @property
    def passed(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_place_at_which_time_runs_out_has_the_nearest_seen(count) -> None:
    case = Case(models.tiny_gpt2, 0, 0.5)
    whole = case.read(1)
    assert case.finished
    late = case.read(1, Ticks(count))
    assert not case.finished
    assert 0 < late.position < LENGTH
    done = late.position - 1
    assert torch.equal(late.tokens[:done], whole.tokens[:done])
    nearest, of_fewer = (
        float(case.residuals(search.tokens[: late.position])[done]) for search in (whole, late)
    )
    assert of_fewer >= nearest * (1 - 1e-6)
