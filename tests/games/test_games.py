"""Games with challenges: how they are played, and what is known of a model at a state."""

import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks.papers.baselines import PublishedAttention
from lightning_fedleak.attacks.membership.attention import AttentionMembership, AttentionSettings
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.evaluation.auditing import audit_games, audit_scores
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.evaluation.games.play import client_states, find_collisions, reads_ahead
from lightning_fedleak.evaluation.games.pool import Challenge, game_challenges, pad
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states, undisturbed
from tests.helpers.models import (
    own_rng,
    tiny_bert_classifier,
    tiny_bert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
)

PAPER = importlib.import_module("benchmarks.papers.membership")
MODELS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "bert": tiny_bert_mlm}


def anatomy_of(name: str, spread: float = 4, **more: Any):
    """At initialisation states of tiny models lie close together; spread them as training does."""
    model = MODELS[name](**more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(spread)
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
    return [FCMembership(layer, name="fc"), FCMembership(layer, "full", tokens=7, name="fc-full")]


@pytest.mark.parametrize("name", MODELS)
def test_fc_is_perfect_where_the_lemmas_assumption_holds_and_not_at_layer_0(name: str) -> None:
    anatomy, pool = anatomy_of(name), pool_of(40, words=24)
    results = play(
        anatomy,
        [FCMembership(k, g, tokens=7, name=f"{g}{k}") for k in (0, 2) for g in ("token", "full")],
        pool,
        GameConfig(games=60, batch=10),
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
    attacks = [
        FCMembership(2, name="fc"),
        AttentionMembership(2, **given, attention=plain, name="matched"),
        PublishedAttention(2, **given, name="coordinates"),
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


def test_games_that_share_batches_bound_nothing() -> None:
    [result] = play(anatomy_of("gpt2"), [FCMembership(1)], pool_of(), GameConfig(20, 3))
    assert result.relation == "replace_one"
    assert audit_games(result).relation == "replace_one"
    with pytest.raises(ValueError, match="targets_per_batch=1"):
        audit_games(replace(result, batches=torch.zeros_like(result.batches)))


def test_a_seed_repeats_the_games_and_nothing_global_moves() -> None:
    anatomy, pool = anatomy_of("bert"), pool_of()
    anatomy.model.train()
    flags = [m.training for m in anatomy.model.modules()]
    weights = [p.detach().clone() for p in anatomy.model.parameters()]
    before = torch.random.get_rng_state()
    config = GameConfig(games=8, batch=4)
    first = play(anatomy, [FCMembership(1)], pool, config)[0]
    again = play(anatomy, [FCMembership(1)], pool, config)[0]
    other = play(anatomy, [FCMembership(1)], pool, replace(config, seed=1))[0]
    beside = play(anatomy, [FCMembership(2, name="other"), FCMembership(1)], pool, config)[1]
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

    [result] = play(anatomy, [Distance(2)], pool_of(), GameConfig(games=30, batch=6))
    member = torch.tensor(seen)[result.bits]
    assert float(member.max()) < 1e-3
    assert float(member.max()) > 0


def test_the_authors_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worlds, decided by the mean of all scores; the model reads the padding."""
    monkeypatch.setattr(PAPER, "AUTHORS_POSITION", 3)
    seen: list[tuple[int, bool]] = []

    class Spy(FCMembership):
        def gradient(self, targets, hidden, mask, upstream):
            seen.append((hidden.shape[1], bool(mask.all())))
            return super().gradient(targets, hidden, mask, upstream)

    pool, planted = pool_of(), torch.tensor([95, 96, 95, 96, 95, 96, 95, 96])
    challenges = PAPER.authors_challenges(pool, planted, 6, 8)
    config, attacks = GameConfig(batch=6), [Spy(1), *attacks_of(1)]
    results = play(anatomy_of("bert"), attacks, pool, config, challenges=challenges)
    for result in PAPER.by_the_mean(results):
        assert result.bits.tolist() == [True, False] * 4
        assert result.positions.tolist() == [3] * 8
        assert torch.equal(result.guesses, result.scores > result.scores.mean())
        assert torch.equal(result.guesses, result.bits)
    assert seen == [(7, True)] * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"games": 0}, "games must be an integer of at least 1"),
        ({"batch": True}, "batch must be an integer of at least 1"),
        ({"targets_per_batch": 0}, "targets_per_batch"),
        ({"relation": "substitute"}, "relation must be '"),
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
    if relation == "replace_one":
        (alone,) = play(anatomy, attacks[:1], pool_of(), config)
        assert torch.equal(alone.scores, gradient.scores)


def test_a_game_without_a_loss_is_refused_to_servers_without_layers() -> None:
    anatomy = find_anatomy(tiny_bert_classifier())
    with pytest.raises(ValueError, match=r"'gradient_membership': .*labels"):
        play(anatomy, [GradientMembership(pool_of().rows)], pool_of(), GameConfig(games=2, batch=4))


# The texts of a game, and how targets and batches are dealt from them.


def challenges_pool_of(n: int) -> SentencePool:
    return SentencePool([[i, *range(1, 2 + i % 5)] for i in range(n)])


def deal(pool, batch, games, seed=1, spare=0, **settings) -> list[Challenge]:
    config = GameConfig(games=games, batch=batch, seed=seed, **settings)
    return list(game_challenges(pool, config, spare))


def keys(rows) -> list[tuple[int, ...]]:
    return [tuple(r.tolist()) for r in rows]


@pytest.mark.parametrize("targets_per_batch", [1, 4])
def test_deals_are_those_of_figure_2(targets_per_batch: int) -> None:
    pool = challenges_pool_of(30)
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
    pool = challenges_pool_of(30)

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
    pool, batch, games = challenges_pool_of(12), 4, 6000
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
    pool, planted = challenges_pool_of(12), torch.arange(50, 82)
    challenges = list(PAPER.authors_challenges(pool, planted, 4, 6))
    rows = keys(pad([planted, *pool.rows], pool.pad_id)[0])[1:]
    assert [bool(d.bits) for d in challenges] == [True, False] * 3
    for run in range(3):
        world1, world0 = challenges[2 * run : 2 * run + 2]
        assert keys(world0.data) == rows[4 * run : 4 * run + 4]
        assert keys(world1.data) == [tuple(range(50, 82)), *keys(world0.data)[1:]]
        assert (int(world1.places), int(world0.places)) == (0, -1)
        assert keys(world1.targets) == keys(world0.targets) == [tuple(range(50, 82))]
        assert int(world1.positions) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: deal(p, 12, 1), "gives .* distinct sentences"),
        (lambda p: list(PAPER.authors_challenges(p, torch.arange(32), 4, 8)), "16 sentences"),
        (lambda p: list(PAPER.authors_challenges(p, torch.arange(31), 4, 2)), "a long target"),
        (
            lambda p: list(
                PAPER.authors_challenges(p, pad([*p.rows, torch.ones(32)], 0)[0][5], 4, 2)
            ),
            "occurs in the text",
        ),
    ],
)
def test_what_cannot_be_dealt_is_said(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(challenges_pool_of(12))


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


# What games compute: states of a batch by one forward, and of ids that a defence replaced.


# model, tells positions apart at layer 0, reads ahead above it
POSITIONAL_AND_AHEAD = {"gpt2": (True, False), "llama": (False, False), "bert": (True, True)}


@pytest.mark.parametrize("name", MODELS)
def test_one_forward_gives_every_layer_of_the_clients_batch(name: str) -> None:
    anatomy = anatomy_of(name, 8)
    ids, mask = pad(SentencePool([[5, 6, 7, 8], [9, 8, 7], [4, 3]]).rows, 0)
    before = torch.random.get_rng_state()
    seen = client_states(anatomy, [0, 1, 2], ids, mask)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in anatomy.root.modules())
    with undisturbed(anatomy) as model, torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        torch.testing.assert_close(seen[layer], wanted[layer], rtol=0, atol=0)
    for layer in (0, 1, 2):
        server = hidden_states(anatomy, layer, ids, mask)
        real = mask.bool()
        torch.testing.assert_close(seen[layer][real], server[real], rtol=1e-12, atol=1e-12)
    assert set(client_states(anatomy, [1], ids, mask)) == {1}


def test_encoders_without_a_head_and_of_encoder_decoders_are_read_too() -> None:
    config = BertConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    with own_rng(0):
        anatomy = find_anatomy(BertModel(config), kind="classifier")
    ids, mask = pad(SentencePool([[5, 6, 7], [9, 8]]).rows, 0)
    assert client_states(anatomy, [2], ids, mask)[2].shape == (2, 3, 16)
    assert reads_ahead(anatomy, 1)
    assert client_states(find_anatomy(tiny_t5()), [1], ids, mask)[1].shape == (2, 3, 16)


def dealt(targets, positions, places, data) -> Challenge:
    return Challenge(tuple(data), tuple(targets), places >= 0, positions, places)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_collisions_are_where_the_targets_state_occurs_elsewhere(name: str, layer: int) -> None:
    """Against the hidden states themselves, on a language of three words."""
    anatomy, (positional, ahead) = anatomy_of(name, 8), POSITIONAL_AND_AHEAD[name]
    rows = [list(w) for n in (2, 3) for w in itertools.product((11, 12, 13), repeat=n)]
    pool = SentencePool(rows)
    states = [hidden_states(anatomy, layer, row[None])[0] for row in pool.rows]
    generator = torch.Generator().manual_seed(layer)
    found, wanted = [], []
    for _ in range(40):
        order = torch.randperm(len(pool), generator=generator).tolist()
        data, inside = order[:4], int(torch.randint(2, (1,), generator=generator))
        place = 2 if inside else -1
        target = pool.rows[data[2] if inside else order[4]]
        position = int(torch.randint(len(target), (1,), generator=generator))
        found.append(
            find_collisions(
                dealt(
                    [target],
                    torch.tensor([position]),
                    torch.tensor([place]),
                    [pool.rows[i] for i in data],
                ),
                layer=layer,
                reads=lambda position: None,
                ahead=ahead and layer > 0,
                positional=positional,
            ).item()
        )
        state = states[data[2] if inside else order[4]][position]
        batch = torch.cat([states[i] for k, i in enumerate(data) if k != place])
        wanted.append(bool(((batch - state).abs().sum(1) < 1e-8).any()))
    assert found == wanted
    assert any(found) is (layer == 0 or not ahead)


def test_whole_sentences_collide_where_what_is_read_of_them_is_the_same() -> None:
    pool = SentencePool([[1, 2], [1, 2, 3], [1, 3, 3]])
    targets = list(pool.rows)
    for layer, tokens, ahead, wanted in (
        (1, 8, False, [False, False, False]),
        (1, 3, False, [False, False, False]),
        (1, 2, False, [True, True, False]),
        (0, 1, False, [True, True, True]),
        (1, 1, True, [False, False, False]),
    ):
        flags = find_collisions(
            dealt(targets, torch.zeros(3, dtype=torch.int64), torch.arange(3), pool.rows),
            layer=layer, reads=lambda p, n=tokens: slice(0, n), ahead=ahead, positional=True,
        )  # fmt: skip
        assert flags.tolist() == wanted


def test_who_attends_to_a_sentence_or_its_prefix_collides_where_that_occurs() -> None:
    pool = SentencePool([[1, 2, 3], [1, 2, 4], [2, 2, 3]])

    def flags(layer, reads, position=1, ahead=False):
        data = [torch.tensor([1, 2, 3, 5])]
        return find_collisions(
            dealt(pool.rows, torch.full((3,), position), torch.full((3,), -1), data),
            layer=layer, reads=reads, ahead=ahead, positional=True,
        ).tolist()  # fmt: skip

    def prefix(position):
        return slice(0, position + 1)

    for layer in (0, 1):
        assert flags(layer, lambda p: slice(0, None)) == [False] * 3
        assert flags(layer, prefix) == [True, True, False]
        assert flags(layer, prefix, 2) == [True, False, False]
    assert flags(0, lambda p: None) == [True, True, True]
    assert flags(1, lambda p: None) == [True, True, False]
    assert flags(1, prefix, ahead=True) == [False] * 3


def test_the_client_computes_on_what_the_defence_gives() -> None:
    anatomy, pool = find_anatomy(tiny_gpt2()), pool_of()
    config = GameConfig(games=12, batch=5)
    shapes: list[tuple[int, ...]] = []

    def same(ids: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        assert ids.shape == mask.shape
        shapes.append(tuple(ids.shape))
        return ids

    def other(ids: Tensor, mask: Tensor | None) -> Tensor:
        return (ids + 1) % 97

    def attacks() -> list[FCMembership]:
        return [FCMembership(1, "full", tokens=7)]

    (plain,) = play(anatomy, attacks(), pool, config)
    (unchanged,) = play(anatomy, attacks(), pool, config, defend=same)
    (changed,) = play(anatomy, attacks(), pool, config, defend=other)
    assert len(shapes) == 12
    assert torch.equal(plain.scores, unchanged.scores)
    assert torch.equal(plain.guesses, plain.bits)
    assert torch.equal(plain.bits, changed.bits)
    assert not changed.guesses.any()


def test_an_adversary_knows_that_the_clients_ids_are_replaced_and_forgets_it() -> None:
    anatomy, pool = find_anatomy(tiny_gpt2()), pool_of()
    texts = torch.Generator().manual_seed(2)
    public = PublicText(list(torch.randint(4, 90, (60, 7), generator=texts)))
    attack = AttentionMembership(1, public, tokens=7, batch=5)
    config = GameConfig(games=4, batch=5)

    def widest(**given: Any) -> object:
        play(anatomy, [attack], pool, config, **given)
        widths = attack.config()["widths"]
        assert isinstance(widths, list)
        return widths[-1]

    assert widest(defend=lambda ids, mask: ids) == 0.999
    assert widest() == 0.7
