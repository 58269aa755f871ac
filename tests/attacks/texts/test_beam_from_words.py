"""FILM's beam: texts that a model has learned are put together from their words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import Attack, RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.attacks.texts.beam_from_words import BeamFromWords, FluentTexts
from lightning_fedleak.attacks.words.direct import BagOfWords, BiasSign
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from lightning_fedleak.threats import ThreatModelError
from tests.attacks.row_space.models import (
    backward,
    bert,
    gpt2,
    llama,
    ready,
    t5,
    texts,
    with_lora,
)


def shared(anatomy: Anatomy, attack: BeamFromWords) -> Observation:
    tensors = {n: anatomy.parameter(n).grad.clone() for n in attack.needs(anatomy).gradients}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def read(attack: BeamFromWords, model: nn.Module, ids: Tensor) -> TextGuess:
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    backward(model, ids)
    return attack.run(shared(anatomy, attack))


def learned(rows: int, length: int, steps: int = 100) -> tuple[nn.Module, Tensor]:
    """A model that was trained on texts for a while."""
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(rows, length)
    for _ in range(steps):
        backward(model, ids)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return model, ids


MODEL, IDS = learned(2, 10)


def in_place(guess: TextGuess, ids: Tensor) -> list[float]:
    """Of each text the tokens that its best guess has in place, the last left out."""
    hits = (guess.tokens[:, None] == ids)[..., :-1].float().mean(-1)
    return hits.amax(0).tolist()


def test_learned_texts_are_recovered_one_after_the_other() -> None:
    guess = read(BeamFromWords(10, 2, moves=5), MODEL, IDS)
    assert in_place(guess, IDS) == [1, 1]
    assert sorted(guess.tokens.tolist()) == sorted(IDS.tolist()), "last tokens are likely too"
    assert guess.finished
    assert guess.certified is None
    assert guess.tokens.shape == (2, 10)


def test_what_was_not_learned_is_not_read_off_its_words() -> None:
    torch.manual_seed(1)
    model, ids = ready(llama()), texts(1, 10)
    assert in_place(read(BeamFromWords(10, moves=5), model, ids), ids)[0] < 1


def test_words_come_from_what_the_surface_allows() -> None:
    untied, tied = find_anatomy(llama()), find_anatomy(gpt2())
    lora = find_anatomy(with_lora(llama(), 4, ["q_proj", "v_proj"]))
    attack = BeamFromWords(6)
    assert isinstance(attack.words(untied), BagOfWords)
    assert isinstance(attack.words(tied), SubspaceWords)
    assert isinstance(attack.words(lora), SubspaceWords)
    given = SubspaceWords(capacity_seconds=0)
    assert BeamFromWords(6, words=given).words(untied) is given
    with pytest.raises(ThreatModelError, match="no bias"):
        BeamFromWords(6, words=BiasSign()).needs(untied)


def search(attack: BeamFromWords) -> FluentTexts:
    attack.prepare(find_anatomy(MODEL))
    assert attack._copy is not None
    return FluentTexts(attack, attack._copy, IDS[:, :-1].unique())


def test_the_score_is_perplexity_and_the_gradients_norm() -> None:
    run = search(BeamFromWords(10, beta=0.3))
    text = IDS[0].flip(0)
    MODEL.zero_grad()
    loss = MODEL(input_ids=text[None], labels=text[None]).loss
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in MODEL.parameters()]).norm()
    with run.copy.session(), torch.no_grad():
        assert run.score(text) == pytest.approx((loss.exp() + 0.3 * norm).item(), rel=1e-4)
        own = run.log_probabilities(text[None])
    assert float(own.sum()) == pytest.approx(-9 * loss.item(), rel=1e-4)


def test_reordering_lowers_the_score() -> None:
    run = search(BeamFromWords(10, moves=100))
    text = IDS[0, :-1]
    mixed = torch.cat([text[6:], text[:6]])
    with run.copy.session(), torch.no_grad():
        found = run.reorder(mixed, Deadline())
        assert run.score(found) < run.score(mixed)
    assert torch.equal(found, text)


def test_a_wide_beam_finds_the_likeliest_text() -> None:
    """Every text of three tokens of the bag, scored one by one."""
    run = search(BeamFromWords(4, beam=10_000, penalty=0.0))
    run.bag = run.bag[:8]
    every = torch.cartesian_prod(run.bag, run.bag, run.bag)
    with run.copy.session(), torch.no_grad():
        found = run.beam([], Deadline())
        likely = run.log_probabilities(every).sum(1)
    assert torch.equal(found, every[int(likely.argmax())])


def test_repeats_cost_their_penalty() -> None:
    run = search(BeamFromWords(10, ngram=2))
    run.bag = torch.tensor([5, 6, 7])
    beams = torch.tensor([[5, 6, 5], [7, 7, 6]])
    assert run._repeats(beams, set()).tolist() == [[0, 1, 0], [0, 0, 0]]
    assert run._repeats(beams, {(6, 7)}).tolist() == [[0, 1, 0], [0, 0, 1]]
    with run.copy.session(), torch.no_grad():
        first = run.beam([], Deadline())
        second = run.beam([first], Deadline())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["_move_pieces", "_move_tokens"])
def test_moves_keep_to_length_and_bag(kind: str) -> None:
    run = search(BeamFromWords(10))
    seen = [getattr(run, kind)(IDS[0, :-1]) for _ in range(40)]
    assert all(len(text) == 9 for text in seen)
    assert all(set(text.tolist()) <= set(run.bag.tolist()) for text in seen)
    assert len({tuple(text.tolist()) for text in seen}) > 10


@pytest.mark.parametrize("family", [bert, t5])
def test_models_without_next_tokens_are_refused(family: Any) -> None:
    with pytest.raises(ThreatModelError, match="next token"):
        BeamFromWords(6).needs(find_anatomy(family()))


def test_texts_longer_than_the_context() -> None:
    with pytest.raises(ValueError, match="context holds"):
        BeamFromWords(40).needs(find_anatomy(gpt2()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 2},
        {"texts": 0},
        {"beam": 0},
        {"ngram": 0},
        {"penalty": -1.0},
        {"moves": -1},
        {"beta": float("inf")},
        {"budget_seconds": 0},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BeamFromWords(**({"length": 6} | wrong))
    with pytest.raises(TypeError, match="words must be an attack"):
        BeamFromWords(6, words="bag")  # type: ignore[arg-type]


def test_what_it_cannot_read_is_unknown() -> None:
    attack = BeamFromWords(10)
    with pytest.raises(RuntimeError, match="call prepare"):
        attack.run(Observation(()))
    attack.prepare(find_anatomy(MODEL))
    zero = {"embedding.weight": torch.zeros(300, 64)}
    with pytest.raises(UnusableObservation, match="all zero"):
        attack.run(Observation((GradientSnapshot(0, Stage.SHARED, zero),)))


@pytest.mark.parametrize(
    ("optimizer", "words", "known"),
    [("SGD", None, True), ("AdamW", None, True), ("AdamW", FlatChat(n_types=20), False)],
)
def test_rounds_are_read_as_by_what_names_the_words(
    optimizer: str, words: Attack | None, known: bool
) -> None:
    attack = BeamFromWords(10, moves=2, words=words)
    attack.meet(RunFacts(optimizer=optimizer, optimizer_settings={"lr": 0.1}, local_steps=1))
    anatomy = find_anatomy(MODEL)
    attack.prepare(anatomy)
    backward(MODEL, IDS)
    tensors = shared(anatomy, attack).gradients[0].tensors
    view = Observation((UpdateSnapshot(0, Stage.SHARED, tensors, learning_rate=0.1),))
    if known:
        assert attack.run(view).finished
    else:
        with pytest.raises(UnusableObservation, match="no sum of gradients"):
            attack.run(view)


def test_time_ends_it_and_it_says_so() -> None:
    guess = read(BeamFromWords(10, 2, budget_seconds=1e-9), MODEL, IDS)
    assert not guess.finished
    assert guess.tokens.shape == (1, 10)


def test_the_model_is_left_as_it_was_and_a_seed_is_a_guess() -> None:
    MODEL.train()
    anatomy, attack = find_anatomy(MODEL), BeamFromWords(10, moves=20)
    backward(MODEL, IDS)
    before = {n: (p.clone(), p.grad.clone()) for n, p in MODEL.named_parameters()}
    state = torch.get_rng_state()
    attack.prepare(anatomy)
    attack.refresh(anatomy, 1)
    assert attack.age(4) == 3
    view = shared(anatomy, attack)
    one, same = attack.run(view), attack.run(view)
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in MODEL.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])
    assert MODEL.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in MODEL.modules())
