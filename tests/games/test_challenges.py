"""The texts of a game, and how targets and batches are dealt from them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from lightning_fedleak.evaluation.games import GameConfig, SentencePool
from lightning_fedleak.evaluation.games.pool import (
    Challenge,
    authors_challenges,
    game_challenges,
    pad,
)


def pool_of(n: int) -> SentencePool:
    return SentencePool([[i, *range(1, 2 + i % 5)] for i in range(n)])


def deal(pool, batch, games, seed=1, spare=0, **settings) -> list[Challenge]:
    config = GameConfig(games=games, batch=batch, seed=seed, **settings)
    return list(game_challenges(pool, config, spare))


def keys(rows) -> list[tuple[int, ...]]:
    return [tuple(r.tolist()) for r in rows]


@pytest.mark.parametrize("targets_per_batch", [1, 4])
def test_deals_are_those_of_figure_2(targets_per_batch: int) -> None:
    pool = pool_of(30)
    n, challenges = 0, deal(pool, 7, 50, 3, targets_per_batch=targets_per_batch)
    for challenge in challenges:
        data = keys(challenge.data)
        assert len(set(data)) == 7
        for g, target in enumerate(keys(challenge.targets)):
            place = int(challenge.places[g])
            assert bool(challenge.bits[g]) == (target in data) == (place >= 0)
            if place >= 0:
                assert data[place] == target
            assert 0 <= challenge.positions[g] < len(target)
            n += 1
    assert n == 50
    assert len(challenges) == -(-50 // targets_per_batch)


def test_where_targets_are_added_or_removed_nothing_is_in_their_place() -> None:
    pool = pool_of(30)

    def challenges(relation):
        return deal(pool, 7, 50, 3, relation=relation)

    bits = []
    for challenge, replaced in zip(
        challenges("add_remove"), challenges("replace_one"), strict=True
    ):
        (target,), data, whole = keys(challenge.targets), keys(challenge.data), keys(replaced.data)
        assert target in whole
        bits.append(bool(challenge.bits))
        if bits[-1]:
            assert data == whole
            assert data[int(challenge.places)] == target
        else:
            assert data == [row for row in whole if row != target]
            assert len(data) == 6
            assert int(challenge.places) == -1
    assert 0 < sum(bits) < 50


def test_bits_are_fair_and_targets_uniform_given_the_bit() -> None:
    """Chi-squared against the distributions of Fig. 2, at a level that this seed passes by far."""
    pool, batch, games = pool_of(12), 4, 6000
    order = {key: i for i, key in enumerate(keys(pool.rows))}
    challenges = deal(pool, batch, games, 0)
    bits = torch.cat([d.bits for d in challenges])
    assert stats.binomtest(int(bits.sum()), games).pvalue > 0.01
    # Lag one: a bit says nothing on the next one.
    agree = int((bits[1:] == bits[:-1]).sum())
    assert stats.binomtest(agree, games - 1).pvalue > 0.01
    for bit in (True, False):
        seen = torch.zeros(len(pool))
        for challenge in challenges:
            if bool(challenge.bits[0]) is bit:
                seen[order[keys(challenge.targets)[0]]] += 1
        assert stats.chisquare(seen.numpy()).pvalue > 0.01
    places = torch.cat([d.places for d in challenges])
    inside = torch.bincount(places[places >= 0], minlength=batch)
    assert stats.chisquare(inside.numpy()).pvalue > 0.01


def test_a_last_token_that_enters_no_loss_is_not_asked_for() -> None:
    pool = SentencePool([[i, i, i] for i in range(1, 9)])
    seen = {int(d.positions) for d in deal(pool, 2, 40, spare=1)}
    assert seen == {0, 1}


def test_the_authors_challenges() -> None:
    pool, planted = pool_of(12), torch.tensor([50, 51, 52])
    challenges = list(authors_challenges(pool.rows, planted, 4, 6, 1))
    assert [bool(d.bits) for d in challenges] == [True, False] * 3
    for run in range(3):
        world1, world0 = challenges[2 * run : 2 * run + 2]
        assert keys(world0.data) == keys(pool.rows[4 * run : 4 * run + 4])
        assert keys(world1.data) == [(50, 51, 52), *keys(world0.data)[1:]]
        assert (int(world1.places), int(world0.places)) == (0, -1)
        assert keys(world1.targets) == keys(world0.targets) == [(50, 51, 52)]
        assert int(world1.positions) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: deal(p, 12, 1), "gives .* distinct sentences"),
        (
            lambda p: list(authors_challenges(p.rows, torch.arange(3), 4, 3, 1)),
            "games must be even",
        ),
        (lambda p: list(authors_challenges(p.rows, torch.arange(3), 4, 8, 1)), "16 sentences"),
        (lambda p: list(authors_challenges(p.rows, torch.arange(3), 4, 2, 3)), "tokens, none at 3"),
        (lambda p: list(authors_challenges(p.rows, p.rows[5], 4, 2, 0)), "occurs in the corpus"),
    ],
)
def test_what_cannot_be_dealt_is_said(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(pool_of(12))


def test_special_tokens_are_not_asked_for() -> None:
    pool = SentencePool([[90, i, i, 91] for i in range(1, 9)], special_ids=(90, 91))
    seen = {int(d.positions) for d in deal(pool, 2, 40)}
    assert seen == {1, 2}
    few = SentencePool([[90, 1], [90, 2], [1, 2]], at_least=1, special_ids={90})
    with pytest.raises(ValueError, match="holds no target"):
        deal(few, 1, 1, spare=1)


class Words:
    """A tokenizer of three ids and special tokens, as Hugging Face's are called."""

    pad_token_id = 9

    def __call__(self, texts, truncation, max_length):
        assert truncation
        ids = [[*[7, *(int(w) for w in t.split())][: max_length - 1], 8] for t in texts]
        return {"input_ids": ids}


def test_what_is_equal_after_cutting_is_kept_once_and_in_order() -> None:
    rows = [[1, 2, 3, 4], [5], [2, 1], [1, 2, 3, 9], [2, 1, 7], [2, 1]]
    pool = SentencePool(rows, tokens=3)
    assert [r.tolist() for r in pool.rows] == [[1, 2, 3], [2, 1], [2, 1, 7]]
    assert (pool.duplicates, pool.short, len(pool)) == (2, 1, 3)
    longer = SentencePool(rows, tokens=4, at_least=3)
    assert [r.tolist() for r in longer.rows] == [[1, 2, 3, 4], [1, 2, 3, 9], [2, 1, 7]]


def test_padding_is_masked() -> None:
    pool = SentencePool([[1, 2, 3], [4, 5], [6, 7]], pad_id=9)
    ids, mask = pad([pool.rows[1], pool.rows[0]], pool.pad_id)
    assert ids.tolist() == [[4, 5, 9], [1, 2, 3]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    ids, mask = pad([pool.rows[1]], pool.pad_id, length=4)
    assert ids.tolist() == [[4, 5, 9, 9]]
    assert mask.sum() == 2


def test_the_tokenizer_cuts_so_that_special_tokens_stay() -> None:
    pool = SentencePool.from_texts(["1 2 3 4 5", "3"], Words(), tokens=4)
    assert [r.tolist() for r in pool.rows] == [[7, 1, 2, 8], [7, 3, 8]]
    assert pool.pad_id == 9
    started = SentencePool.from_texts(["1 2 3 4 5", "3"], Words(), tokens=4, start_token_id=6)
    assert [r.tolist() for r in started.rows] == [[6, 7, 1, 8], [6, 7, 3, 8]]


@pytest.mark.parametrize(
    ("rows", "tokens"), [([], 4), ([[1, 2], [1, 2, 3]], 2), ([[1, 2], [3, 4]], 1)]
)
def test_too_little_text_is_said(rows: list[list[int]], tokens: int) -> None:
    with pytest.raises(ValueError, match="distinct sentences: give more"):
        SentencePool(rows, tokens)
