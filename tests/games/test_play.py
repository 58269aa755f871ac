from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_fedleak.attacks.membership.attention import AttentionMembership, AttentionSettings
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.evaluation.auditing import audit_games, audit_scores
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.model.anatomy import find_anatomy
from tests.helpers.models import tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2, tiny_llama

POOLS = importlib.import_module("lightning_fedleak.evaluation.games.pool")
MODELS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "bert": tiny_bert_mlm}


def anatomy_of(name: str):
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return find_anatomy(model)


def pool_of(n: int = 30, words: int = 90, length: int = 7) -> SentencePool:
    generator = torch.Generator().manual_seed(0)
    return SentencePool(
        [
            torch.randint(4, 4 + words, (3 + i % (length - 2),), generator=generator)
            for i in range(n)
        ],
        tokens=length,
    )


COLUMNS = ("bits", "guesses", "scores", "collides", "positions", "batches")


def without_collisions(result: Any) -> Any:
    """Return the games in which the assumption of Lemma 1 holds."""
    return replace(result, **{n: getattr(result, n)[~result.collides] for n in COLUMNS})


def attacks_of(layer: int) -> list:
    return [
        FCMembership(layer, name="fc"),
        FCMembership(layer, "full", tokens=7, name="fc-full"),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_pooled_forwards_give_the_same_games_and_guesses(name: str) -> None:
    anatomy, pool = anatomy_of(name), pool_of(20)
    config = GameConfig(games=8, batch=5, seed=1)
    fresh = play(anatomy, attacks_of(1), pool, config)
    pooled = play(anatomy, attacks_of(1), pool, replace(config, forwards="pooled"))
    for one, other in zip(fresh, pooled, strict=True):
        for column in COLUMNS:
            assert torch.equal(getattr(one, column), getattr(other, column)), column
        clean = without_collisions(one)
        assert torch.equal(clean.bits, clean.guesses)
    assert 0 < int(fresh[0].bits.sum()) < 8


@pytest.mark.parametrize("name", MODELS)
def test_fc_is_perfect_where_the_lemmas_assumption_holds_and_not_at_layer_0(name: str) -> None:
    anatomy, pool = anatomy_of(name), pool_of(40, words=24)
    results = play(
        anatomy,
        [FCMembership(k, g, tokens=7, name=f"{g}{k}") for k in (0, 2) for g in ("token", "full")],
        pool,
        GameConfig(games=60, batch=10, forwards="pooled"),
    )
    by_name = {r.attack: r for r in results}
    for result in results:
        clean = without_collisions(result)
        rates = clean.summary()
        assert rates["accuracy"].value == rates["auc"].value == 1
        assert len(clean) + int(result.collides.sum()) == len(result) == 60
        # Where the target's state is in D outside the target the guess is always yes.
        assert bool(result.guesses[result.collides].all())
    word = by_name["token0"]
    assert 0 < int(word.collides.sum()) < 60
    rates = word.summary()
    assert rates["accuracy"].value < 1
    assert rates["auc"].value < 1
    assert bool(by_name["token2"].collides.any()) is (name != "bert")
    assert not by_name["full0"].collides.any()


def test_an_attack_on_whole_sentences_collides_with_no_other_sentence(monkeypatch) -> None:
    """Sentences of a causal model that begin alike: a token's state is twice in D, a text once."""
    anatomy = anatomy_of("gpt2")
    generator = torch.Generator().manual_seed(0)
    pool = SentencePool(
        [[5, 6, 7, *torch.randint(10, 90, (4,), generator=generator).tolist()] for _ in range(30)],
        tokens=7,
    )
    public = torch.randint(10, 90, (60, 7), generator=generator).tolist()
    given = {"public_text": public, "tokens": 7}
    plain = AttentionSettings(whiten=False, beta=1.0, widths=(1e-6,))
    coordinates = replace(plain, score="coordinates")
    attacks = [
        FCMembership(2, name="fc"),
        AttentionMembership(2, **given, attention=plain, name="matched"),
        AttentionMembership(2, **given, attention=coordinates, name="coordinates"),
    ]
    monkeypatch.setattr("lightning_fedleak.evaluation.games.pool._position", lambda *_: 2)
    fc, matched, coordinates = play(anatomy, attacks, pool, GameConfig(games=40, batch=8))
    assert bool(fc.collides.all())
    assert bool(coordinates.collides.all())
    assert bool(fc.guesses.all())
    assert not matched.collides.any()
    assert torch.equal(matched.guesses, matched.bits)


def test_games_that_add_or_remove_are_told_apart_and_audited_as_such() -> None:
    anatomy = anatomy_of("gpt2")
    config = GameConfig(games=20, batch=3, relation="add_remove")
    [result] = play(anatomy, [FCMembership(1)], pool_of(), config)
    assert result.relation == "add_remove"
    assert torch.equal(result.guesses | result.collides, result.bits | result.collides)
    bound = audit_games(result, delta=1e-5)
    assert bound.relation == "add_remove"
    assert bound == audit_scores(result.scores, result.bits, delta=1e-5, relation="add_remove")


def test_games_that_share_batches_or_have_no_random_bit_bound_nothing() -> None:
    [result] = play(anatomy_of("gpt2"), [FCMembership(1)], pool_of(), GameConfig(20, 3))
    assert result.relation == "replace_one"
    assert audit_games(result).relation == "replace_one"
    with pytest.raises(ValueError, match="protocol='game'"):
        audit_games(replace(result, protocol="authors"))
    with pytest.raises(ValueError, match="targets_per_batch=1"):
        audit_games(replace(result, batches=torch.zeros_like(result.batches)))


def test_a_seed_repeats_the_games_and_nothing_global_moves() -> None:
    anatomy, pool = anatomy_of("bert"), pool_of()
    anatomy.model.train()
    flags = [m.training for m in anatomy.model.modules()]
    weights = [p.detach().clone() for p in anatomy.model.parameters()]
    before = torch.random.get_rng_state()
    config = GameConfig(games=8, batch=4)
    calls: list[int] = []
    first = play(anatomy, [FCMembership(1)], pool, config, progress=calls.append)[0]
    again = play(anatomy, [FCMembership(1)], pool, config)[0]
    other = play(anatomy, [FCMembership(1)], pool, replace(config, seed=1))[0]
    beside = play(anatomy, [FCMembership(2, name="other"), FCMembership(1)], pool, config)[1]
    assert calls == [1] * 8
    assert torch.equal(first.bits, again.bits)
    assert torch.equal(first.positions, again.positions)
    assert torch.equal(first.scores, again.scores)
    # What is drawn does not depend on who plays.
    assert torch.equal(first.bits, beside.bits)
    assert torch.equal(first.positions, beside.positions)
    assert not torch.equal(first.positions, other.positions)
    assert torch.equal(before, torch.random.get_rng_state())
    assert flags == [m.training for m in anatomy.model.modules()]
    assert all(map(torch.equal, weights, anatomy.model.parameters()))


def test_client_and_server_compute_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the member's distance is rounding: small, and not exactly zero everywhere."""
    anatomy = find_anatomy(tiny_bert_mlm(d=64))
    seen: list[float] = []

    class Distance(FCMembership):
        def gradient(self, targets, hidden, mask, upstream):
            near = (hidden[:, None] - targets[None, :, None]).abs().sum(-1)
            near = near.masked_fill(mask[:, None] == 0, torch.inf)
            seen.append(float(near.amin()))
            return super().gradient(targets, hidden, mask, upstream)

    for forwards in ("fresh", "pooled"):
        seen.clear()
        config = GameConfig(games=30, batch=6, forwards=forwards)
        [result] = play(anatomy, [Distance(2)], pool_of(), config)
        member = torch.tensor(seen)[result.bits]
        assert float(member.max()) < 1e-3
        assert float(member.max()) > 0


def test_the_authors_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POOLS, "AUTHORS_POSITION", 3)
    anatomy, pool = anatomy_of("bert"), pool_of()
    planted = torch.tensor([95, 96, 95, 96, 95, 96, 95, 96])
    config = GameConfig(games=8, batch=6, protocol="authors")
    for forwards in ("fresh", "pooled"):
        results = play(
            anatomy, attacks_of(1), pool, replace(config, forwards=forwards), planted=planted
        )
        for result in results:
            assert result.protocol == "authors"
            assert result.bits.tolist() == [True, False] * 4
            assert result.positions.tolist() == [3] * 8
            assert torch.equal(result.guesses, result.scores > result.scores.mean())
            assert torch.equal(result.guesses, result.bits)


def test_padding_is_read_in_the_authors_protocol_and_masked_in_the_game(monkeypatch) -> None:
    """A state of a short sentence differs between the two wherever tokens see later ones."""
    monkeypatch.setattr(POOLS, "AUTHORS_POSITION", 1)
    seen: list = []

    class Spy(FCMembership):
        def gradient(self, targets, hidden, mask, upstream):
            seen.append((hidden.shape[1], mask))
            return super().gradient(targets, hidden, mask, upstream)

    anatomy, pool = anatomy_of("bert"), pool_of()
    play(anatomy, [Spy(1)], pool, GameConfig(games=2, batch=3))
    assert all(mask is not None for _, mask in seen)
    seen.clear()
    config = GameConfig(games=2, batch=3, protocol="authors")
    play(anatomy, [Spy(1)], pool, config, planted=torch.tensor([95, 96]))
    assert seen == [(7, None)] * 2


def test_a_planted_sentence_shorter_than_the_others_is_found(monkeypatch) -> None:
    """A token sees the padding behind it, on the server as on the client."""
    monkeypatch.setattr(POOLS, "AUTHORS_POSITION", 1)
    config = GameConfig(games=4, batch=3, protocol="authors")
    planted = torch.tensor([95, 96, 95])
    for result in play(anatomy_of("bert"), attacks_of(1), pool_of(), config, planted=planted):
        assert torch.equal(result.guesses, result.bits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"games": 0}, "games must be an integer of at least 1"),
        ({"batch": True}, "batch must be an integer of at least 1"),
        ({"targets_per_batch": 0}, "targets_per_batch"),
        ({"protocol": "paper"}, "protocol must be '"),
        ({"protocol": "authors", "targets_per_batch": 2}, "targets_per_batch must be 1"),
        ({"relation": "substitute"}, "relation must be '"),
        ({"relation": "add_remove", "protocol": "authors"}, "needs protocol='game'"),
        ({"relation": "add_remove", "targets_per_batch": 2}, "targets_per_batch=1"),
        ({"relation": "add_remove", "batch": 1}, "batch>1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GameConfig(**changes)


def test_what_does_not_go_together_is_said_before_the_first_game() -> None:
    anatomy, pool = anatomy_of("gpt2"), pool_of()
    config = GameConfig(games=2, batch=4)
    with pytest.raises(ValueError, match=r"attack 'fc_membership': layer must be .*got 3"):
        play(anatomy, [FCMembership(3)], pool, config)
    with pytest.raises(ValueError, match=r"tokens must be .*got 65"):
        play(anatomy, [FCMembership(1)], SentencePool([[1, 2], [3, 4]], tokens=65), config)
    with pytest.raises(ValueError, match="needs planted="):
        play(anatomy, [FCMembership(1)], pool, replace(config, protocol="authors"))
    with pytest.raises(ValueError, match="gives 30 distinct"):
        play(anatomy, [FCMembership(1)], pool, replace(config, batch=30))

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(20, 4)
            self.head = torch.nn.Linear(4, 20)

        def forward(self, input_ids, attention_mask=None):
            return self.head(self.embed(input_ids))

    with pytest.raises(ValueError, match="no transformer blocks"):
        play(find_anatomy(Bare(), kind="causal"), [FCMembership(1)], pool, config)


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
def test_servers_without_layers_of_their_own_play_the_same_games(relation: str) -> None:
    anatomy = find_anatomy(MODELS["llama"]())
    public = pool_of(12, words=60).rows
    attacks = [GradientMembership(public), SubspaceMembership(public), FCMembership(1, name="fc")]
    config = GameConfig(games=20, batch=4, relation=relation)
    gradient, subspace, fc = play(anatomy, attacks, pool_of(), config)
    assert torch.equal(gradient.bits, fc.bits)
    assert torch.equal(gradient.batches, fc.batches)
    assert (gradient.layer, gradient.granularity) == (None, "text")
    assert not gradient.collides.any()
    assert gradient.summary()["auc"].value > 0.95
    assert subspace.summary()["auc"].value > 0.8
    assert gradient.dtype == "float32"
    if relation == "replace_one":
        (alone,) = play(anatomy, attacks[:1], pool_of(), config)
        assert torch.equal(alone.scores, gradient.scores)


def test_a_game_without_a_loss_is_refused_to_servers_without_layers() -> None:
    anatomy = find_anatomy(tiny_bert_classifier())
    with pytest.raises(ValueError, match=r"'gradient_membership': .*labels"):
        play(anatomy, [GradientMembership(pool_of().rows)], pool_of(), GameConfig(games=2, batch=4))
