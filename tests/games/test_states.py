"""What games compute: states of a batch by one forward, and of ids that a defence replaced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.evaluation.games.play import (
    _PooledStates,
    client_states,
    find_collisions,
    reads_ahead,
)
from lightning_fedleak.evaluation.games.pool import Challenge, pad
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states, undisturbed
from tests.games.test_play import pool_of
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5

# model, tells positions apart at layer 0, reads ahead above it
MODELS = {
    "gpt2": (tiny_gpt2, True, False),
    "llama": (tiny_llama, False, False),
    "bert": (tiny_bert_mlm, True, True),
}


def anatomy_of(name: str, layers: int = 2):
    model = MODELS[name][0](layers=layers).double()
    # At initialisation states of tiny models lie close together; spread them as training does.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return find_anatomy(model)


@pytest.mark.parametrize("name", MODELS)
def test_one_forward_gives_every_layer_of_the_clients_batch(name: str) -> None:
    anatomy = anatomy_of(name)
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
    anatomy, (_, positional, ahead) = anatomy_of(name), MODELS[name]
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [None, 7])
def test_a_batch_put_together_differs_from_its_own_forward_by_rounding(name, length) -> None:
    anatomy = anatomy_of(name)
    pool = SentencePool([[i, *range(20, 22 + i % 4)] for i in range(1, 12)])
    pooled = _PooledStates(
        anatomy, [0, 1, 2], pool.rows, 4, 0, torch.Generator().manual_seed(0), length
    )
    for indices in ([3, 0, 7], [10, 3, 2, 1]):
        data = [pool.rows[i] for i in indices]
        ids, mask = pad(data, 0, length)
        together = pooled.batch_states(data)
        wanted = client_states(anatomy, [0, 1, 2], ids, mask if length is None else None)
        real = mask.bool() if length is None else torch.ones_like(ids, dtype=torch.bool)
        for layer in (0, 1, 2):
            assert together[layer].shape == wanted[layer].shape
            torch.testing.assert_close(
                together[layer][real], wanted[layer][real], rtol=1e-12, atol=1e-12
            )


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


def test_pooled_states_cannot_be_defended() -> None:
    config = GameConfig(games=2, batch=5, forwards="pooled")
    with pytest.raises(ValueError, match=r"defend= .* needs forwards='fresh'"):
        play(
            find_anatomy(tiny_gpt2()),
            [FCMembership(1)],
            pool_of(),
            config,
            defend=lambda ids, mask: ids,
        )


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
