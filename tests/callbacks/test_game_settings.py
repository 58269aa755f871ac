"""Where a live membership game can be played, and what a resumed one goes on with."""

from dataclasses import replace

import pytest
import torch

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.engine import Engine, Options, selected
from lightning_fedleak.engine.options import known_stages
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.trainers.loop import Loop, LoopRun
from tests.callbacks.runs import Probe
from tests.helpers.loops import watched
from tests.helpers.models import tiny_gpt2


def opened(*attacks, stages=("shared",), **processes):
    """An engine whose channels are opened on a run of several processes."""
    model = tiny_gpt2()
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    run = LoopRun.of_loop(loop, find_anatomy(model), "rank", frozenset())
    engine = Engine(selected(attacks), Options(stages=known_stages(stages)))
    engine.open(replace(run, processes=2, **processes))


def test_each_rank_of_ddp_may_be_a_client_and_nothing_else():
    for stages in (("shared",), ("local", "shared")):
        opened(FCMembership(1), stages=stages)
    with pytest.raises(ValueError, match=r"'fc_membership' .* use DDP with client='rank'"):
        opened(Probe(), FCMembership(1), client="world")
    with pytest.raises(ValueError, match="leave 'aggregate' out of stages"):
        opened(FCMembership(1), stages=("shared", "aggregate"))
    # Attacks on words are not concerned.
    opened(Probe(), client="world")
    opened(Probe(), stages=("shared", "aggregate"))


def public(seed):
    generator = torch.Generator().manual_seed(seed)
    return PublicText(torch.randint(3, 97, (60, 12), generator=generator))


def attention(text, **settings):
    return AttentionMembership(1, text, batch=8, **settings)


def test_a_resumed_calibration_is_of_the_same_text_and_refresh_or_made_again(tmp_path, monkeypatch):
    prepared = []
    plain = AttentionMembership.prepare
    monkeypatch.setattr(
        AttentionMembership, "prepare", lambda self, a: (prepared.append(self), plain(self, a))
    )
    first = attention(public(0))
    state = watched(tmp_path / "first", first, n=8).state_dict()
    assert prepared == [first]
    for case, attack, again in (
        ("same", attention(public(0)), False),
        ("text", attention(public(1)), True),
        ("refresh", attention(public(0)), True),
    ):
        prepared.clear()
        if case == "refresh":
            attack.refresh_every = 100
        watched(tmp_path / case, attack, n=8, state=state)
        assert prepared == ([attack] if again else [])
        means = [one.state_dict()["whitening.mean"] for one in (first, attack)]
        assert torch.equal(*means) is (case != "text")
