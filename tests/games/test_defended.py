"""Games in which the client trains on other token ids than its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.evaluation.games import GameConfig, play
from lightning_fedleak.model.anatomy import find_anatomy
from tests.games.test_play import pool_of
from tests.helpers.models import tiny_gpt2


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
