"""FILM's beam: texts that a model has learned are put together from their words."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.labs.beam_from_words import BeamFromWords, FluentTexts
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.threats import ThreatModelError
from tests.attacks.row_space.models import backward, bert, llama, ready, t5, texts

pytestmark = pytest.mark.slow


def shared(anatomy: Anatomy, attack: BeamFromWords) -> Observation:
    tensors = {n: anatomy.parameter(n).grad.clone() for n in attack.needs(anatomy).gradients}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def guess_of(attack: BeamFromWords, model: nn.Module, ids: Tensor) -> TextGuess:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids)
    return attack.run(shared(anatomy, attack))


@cache
def trained() -> tuple[nn.Module, Tensor]:
    """Return a model that was trained on two texts for a while, and the texts."""
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(2, 10)
    for _ in range(100):
        backward(model, ids)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return model, ids


def search(attack: BeamFromWords) -> FluentTexts:
    model, ids = trained()
    attack.prepare(find_anatomy(model))
    return FluentTexts(attack, attack.model, ids[:, :-1].unique())


def test_learned_texts_are_recovered_one_after_the_other() -> None:
    model, ids = trained()
    guess = guess_of(BeamFromWords(10, 2, moves=5), model, ids)
    assert sorted(guess.tokens.tolist()) == sorted(ids.tolist()), "last tokens are likely too"
    assert guess.finished
    assert guess.certified is None


def test_a_text_that_was_not_learned_is_not_recovered_from_its_words() -> None:
    torch.manual_seed(1)
    model, ids = ready(llama()), texts(1, 10)
    guess = guess_of(BeamFromWords(10, moves=5), model, ids)
    assert not bool((guess.tokens == ids)[:, :-1].all())


def test_the_score_is_perplexity_and_the_gradients_norm() -> None:
    run, (model, ids) = search(BeamFromWords(10, beta=0.3)), trained()
    text = ids[0].flip(0)
    model.zero_grad()
    loss = model(input_ids=text[None], labels=text[None]).loss
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    with run.copy.session(), torch.no_grad():
        assert run.score(text) == pytest.approx((loss.exp() + 0.3 * norm).item(), rel=1e-4)


def test_reordering_lowers_the_score() -> None:
    run, text = search(BeamFromWords(10, moves=100)), trained()[1][0, :-1]
    mixed = torch.cat([text[6:], text[:6]])
    with run.copy.session(), torch.no_grad():
        reordered = run.reorder(mixed, Deadline())
        assert run.score(reordered) < run.score(mixed)
    assert torch.equal(reordered, text)


def test_a_wide_beam_finds_the_likeliest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of three tokens of the bag is scored one by one."""
    monkeypatch.setattr("lightning_fedleak.labs.beam_from_words.PENALTY", 0.0)
    run = search(BeamFromWords(4, beam=10_000))
    run.bag = run.bag[:8]
    every = torch.cartesian_prod(run.bag, run.bag, run.bag)
    with run.copy.session(), torch.no_grad():
        best = run.beam([], Deadline())
        scores = run.copy.logits(every)[:, :-1].log_softmax(-1)
        likely = scores.gather(2, every[:, 1:, None])[..., 0].sum(1)
    assert torch.equal(best, every[int(likely.argmax())])


def test_repeats_cost_their_penalty() -> None:
    run = search(BeamFromWords(10))
    run.bag = torch.tensor([5, 6, 7])
    beams = torch.tensor([[5, 6, 5], [7, 7, 6]])
    assert run._repeats(beams, set()).tolist() == [[0, 1, 0], [0, 0, 0]]
    assert run._repeats(beams, {(6, 7)}).tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("kind", ["_move_pieces", "_move_tokens"])
def test_moves_keep_to_length_and_bag(kind: str) -> None:
    run, text = search(BeamFromWords(10)), trained()[1][0, :-1]
    moved = [getattr(run, kind)(text) for _ in range(40)]
    assert all(len(one) == 9 and set(one.tolist()) <= set(run.bag.tolist()) for one in moved)
    assert len({tuple(one.tolist()) for one in moved}) > 10


@pytest.mark.parametrize("family", [bert, t5])
def test_models_without_next_tokens_are_refused(family: Any) -> None:
    with pytest.raises(ThreatModelError, match="next token"):
        BeamFromWords(6).needs(find_anatomy(family()))


def test_a_zero_gradient_is_unknown_and_a_late_guess_unfinished() -> None:
    model, ids = trained()
    attack = BeamFromWords(10, 2, budget_seconds=1e-9)
    guess = guess_of(attack, model, ids)
    assert not guess.finished
    assert guess.tokens.shape == (1, 10)
    zero = {"embedding.weight": torch.zeros(300, 64)}
    with pytest.raises(UnusableObservation, match="all zero"):
        attack.run(Observation((GradientSnapshot(0, Stage.SHARED, zero),)))
