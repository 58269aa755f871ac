"""WordMembership by autograd through real layers, and against a client that replaces words."""

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from lightning_fedleak.attacks.base import Query, UnusableObservation
from lightning_fedleak.attacks.membership.attention_layers import PublicStates
from lightning_fedleak.attacks.membership.base import sentence_rows
from lightning_fedleak.attacks.membership.fc import (
    WORD_FLOOR,
    WORD_LADDERS,
    FCMembership,
    WordMembership,
)
from lightning_fedleak.attacks.row_space import fit_whitening
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.model.anatomy import find_anatomy
from tests.helpers import models

GRANULARITIES = ("full", "token")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def layers_of(attack, states, mask):
    """W_1 (P, d), b_1 (P,) and thresholds (K,) of one target (L, d), by the class's docstring."""
    whitening = attack._whitening
    mean, matrix = whitening.mean.double(), whitening.matrix.double()
    centre = matrix @ mean
    weight, bias = torch.zeros(attack.tokens, len(mean)).double(), torch.zeros(attack.tokens)
    evidence = 0.0
    for p, state in enumerate(states[mask != 0][: attack.tokens]):
        word = matrix @ (state - mean)
        word = word - (word @ centre) / (centre @ centre) * centre
        weight[p], bias[p] = matrix @ word, -WORD_FLOOR * float(word @ word)
        evidence += float(word @ word)
    levels, top = WORD_LADDERS[attack.granularity]
    thresholds = [top * evidence * level / levels for level in reversed(range(levels))]
    if attack.granularity == "token":
        thresholds = thresholds * attack.tokens
    return weight, bias.double(), torch.tensor(thresholds).double()


def by_autograd(attack, layers, hidden, mask, upstream):
    """(K,) the gradient of the rungs' biases for one sample (L, d), through real layers."""
    weight, bias, thresholds = layers
    rungs = nn.Parameter(-thresholds)
    if attack.granularity == "full":
        row = sentence_rows(hidden[None], mask[None], attack.tokens)[0].view(attack.tokens, -1)
        first = ((row * weight).sum(1) + bias).relu().sum()
        output = (first + rungs).relu() * upstream[0]
    else:
        first = (hidden[mask != 0] @ weight.T + bias).relu()
        levels = len(thresholds) // attack.tokens
        output = (first.repeat_interleave(levels, 1) + rungs).relu() * upstream[mask != 0][:, None]
    (gradient,) = torch.autograd.grad(output.sum(), [rungs])
    return gradient


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("tokens", [4, 9])
def test_closed_form_is_what_backward_gives(granularity, tokens):
    hidden = 2 * normal(5, 6, 8) + 1
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0, 0, 0, 1, 1, 1], [1] + [0] * 5, [1] * 6])
    upstream = normal(5, 1 if granularity == "full" else 6, seed=1)
    attack = WordMembership(1, [[1, 2]], granularity, tokens=tokens)
    attack._whitening = fit_whitening(normal(99, 8, seed=2) @ normal(8, 8, seed=3) + 1)
    asked = hidden[1:4] + 0.1 * normal(3, 6, 8, seed=4)
    targets = attack.embed(asked, Query(mask[1:4], mask[1:4]))
    gradient = attack.gradient(targets, hidden, mask, upstream)
    assert 0.02 < (gradient != 0).double().mean() < 0.98
    for g in range(3):
        layers = layers_of(attack, asked[g], mask[1 + g])
        exact = [
            by_autograd(attack, layers, *at) for at in zip(hidden, mask, upstream, strict=True)
        ]
        torch.testing.assert_close(gradient[:, g], torch.stack(exact), rtol=1e-6, atol=1e-12)


def replaced_games(n=60, words=2000, batch=20, length=12, keep=0.45, d=64):
    """Yield targets, bits, hidden states and masks of batches whose words were replaced.

    A state is the embedding of its word and position, and noise that stands for its context. As in
    models, a few directions vary far more than the others.
    """
    rng = generator(5)
    table = torch.randn(words, d, generator=rng) + 2
    sizes = torch.where(torch.arange(d) < 4, 50.0, 0.3)
    places = 0.5 * torch.randn(length, d, generator=rng)

    def states(ids):
        return table[ids] + places + sizes * torch.randn(*ids.shape, d, generator=rng)

    def draw(count):
        lengths = torch.randint(4, length + 1, (count, 1), generator=rng)
        return torch.randint(words, (count, length), generator=rng), (
            torch.arange(length) < lengths
        ).long()

    ids, mask = draw(300)
    yield PublicStates(states(ids), mask.bool())
    for game in range(n):
        ids, mask = draw(batch + 1)
        other = torch.randint(words, ids.shape, generator=rng)
        sent = torch.where(torch.rand(ids.shape, generator=rng) < keep, ids, other)
        member = game % 2
        target = 0 if member else batch
        yield states(ids[target])[None], mask[target][None], member, states(sent), mask, batch


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_words_that_are_left_show_a_member(granularity):
    """The distance from the target, FCMembership's score, is mostly of the words that are gone."""
    games = replaced_games()
    attack = WordMembership(1, [[1, 2]], granularity, tokens=12, batch=20)
    attack.calibrate(next(games))
    ladder = (1.0, *(float(step) for step in range(40, 2001, 20)))
    distance = FCMembership(1, granularity, tokens=12, ladder=ladder)
    bits, scores, distances, guesses = [], [], [], []
    for state, target_mask, member, hidden, mask, batch in games:
        query = Query(target_mask, target_mask)
        for reader, column in ((attack, scores), (distance, distances)):
            upstream = torch.randn(batch, 1 if granularity == "full" else 12, generator=generator())
            target = reader.embed(state, query)
            gradient = reader.gradient(target, hidden[:batch], mask[:batch], upstream).sum(0)
            guess = reader.guess(gradient)
            column.append(float(guess.scores))
            if reader is attack:
                guesses.append(bool(guess.members))
        bits.append(member)
    auc = roc_auc_score(bits, scores)
    assert auc > 0.93
    assert auc > roc_auc_score(bits, distances) + 0.05
    bits, guesses = torch.tensor(bits) != 0, torch.tensor(guesses)
    assert guesses[~bits].double().mean() <= 0.1
    assert guesses[bits].double().mean() > 0.4


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_padding_counts_as_nothing(granularity):
    attack = WordMembership(1, [[1, 2]], granularity, tokens=5)
    attack._whitening = fit_whitening(normal(99, 8, seed=2) + 3)
    states = normal(1, 5, 8) + 3
    target = attack.embed(states, Query(torch.ones(1, 5)))
    upstream = torch.ones(1, 1 if granularity == "full" else 5).double()
    assert not attack.gradient(target, torch.zeros(1, 5, 8).double(), None, upstream).any()
    copy = attack.guess(attack.gradient(target, states, None, upstream).sum(0))
    assert copy.scores.item() == pytest.approx(
        80 if granularity == "full" else 0.8 * 256, abs=5 if granularity == "token" else 1
    )


def test_what_cannot_be_read_is_unknown():
    attack = WordMembership(1, [[1, 2]], tokens=3)
    attack._whitening = fit_whitening(normal(99, 8))
    gradient = torch.ones(1, attack.rungs)
    with pytest.raises(UnusableObservation, match="noise"):
        attack.guess(gradient, noise_std=0.1)
    states = normal(2, 3, 8)
    target = attack.embed(states, Query(torch.ones(2, 3)))
    states[1, 1, 1] = torch.nan
    broken = attack.gradient(target, states, None, torch.ones(2, 1).double())
    assert broken[1].isnan().all()
    assert not broken[0].isnan().any()
    with pytest.raises(UnusableObservation, match="finite"):
        attack.guess(broken.sum(0))
    public = PublicStates(normal(40, 3, 8), torch.ones(40, 3).bool())
    with pytest.raises(ValueError, match=r"len\(public_text\), for batch="):
        attack.calibrate(public)
    with pytest.raises(RuntimeError, match="prepare"):
        WordMembership(1, [[1, 2]]).embed(states, Query(torch.ones(2, 3)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_games_on_a_model_whose_client_replaces_words(granularity):
    anatomy = find_anatomy(models.tiny_gpt2())
    vocabulary = anatomy.model.config.vocab_size
    rng = generator(3)
    rows = torch.randint(vocabulary, (260, 10), generator=rng)
    attack = WordMembership(1, rows[:200].tolist(), granularity, tokens=10, batch=6)

    def defend(ids, mask):
        other = torch.randint(vocabulary, ids.shape, generator=rng)
        return torch.where(torch.rand(ids.shape, generator=rng) < 0.5, ids, other)

    config = GameConfig(games=40, batch=6, targets_per_batch=4)
    pool = SentencePool(list(rows[200:]), tokens=10)
    (result,) = play(anatomy, [attack], pool, config, defend=defend)
    assert roc_auc_score(result.bits, result.scores) > 0.9
    assert not result.collides.any()
