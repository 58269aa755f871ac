"""Where a live membership game can be played, and what a resumed one goes on with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.membership import fc as fc_membership
from lightning_fedleak.attacks.membership.attention import AttentionMembership, AttentionSettings
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.l1_distance import model_rounding
from lightning_fedleak.attacks.membership.trained import TrainedMembership, TrainingSettings
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses import Freeze
from lightning_fedleak.engine import Engine, Options, known_stages, selected
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers.loop import Loop, LoopRun
from tests.callbacks.runs import Probe, assert_same, fit, monitor_with
from tests.helpers.lightning_modules import CausalLMModule
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
    with pytest.raises(ValueError, match=r"'fc_membership' .* client='world' .* spread over"):
        opened(Probe(), FCMembership(1), client="world")
    with pytest.raises(ValueError, match="Leave 'aggregate' out of stages"):
        opened(FCMembership(1), stages=("shared", "aggregate"))
    # Attacks on words are not concerned.
    opened(Probe(), client="world")
    opened(Probe(), stages=("shared", "aggregate"))


@pytest.mark.parametrize("defended", [True, False])
def test_sharded_strategies_are_watched_as_one_client(defended):
    strategy = ModelParallelStrategy()
    if defended:
        strategy = DefendedStrategy(strategy, [Freeze("head")], client="world")
    monitor = monitor_with(Probe(), client="world")
    trainer = SimpleNamespace(strategy=strategy, callbacks=[monitor], world_size=2)
    monitor.setup(trainer, None, "fit")
    assert monitor.client == "world"


def test_local_steps_are_refused():
    with pytest.raises(ValueError, match=r"'fc_membership' reads .* without local_steps"):
        LeakageMonitor([Probe(), FCMembership(1)], local_steps=4)


def test_under_autocast_the_models_rounding_is_measured_and_training_not_disturbed(tmp_path):
    attack = FCMembership(2)
    monitor = LeakageMonitor(attack, every_n_steps=1)
    watched = fit([monitor], tmp_path / "watched", n=16, precision="bf16-mixed")
    plain = fit([], tmp_path / "plain", n=16, precision="bf16-mixed")
    assert_same(plain, watched)
    rounding = attack.config()["rounding"]
    assert rounding is not None
    anatomy = find_anatomy(watched.lightning_module.model)
    in_bf16 = model_rounding(anatomy, 2, 0.0, cast=torch.bfloat16)
    assert in_bf16 > 1e-4 or in_bf16 == 0  # some CPUs round a row alike in every batch
    assert model_rounding(anatomy, 2, 0.0) < 1e-5
    assert monitor.latest["leakage/fc_membership/accuracy"] == 1
    assert monitor.latest["leakage/fc_membership/auc"] == 1


# ---- resuming -----------------------------------------------------------------------------------


def public(seed):
    generator = torch.Generator().manual_seed(seed)
    return PublicText(torch.randint(3, 97, (60, 12), generator=generator))


def attention(text, **settings):
    return AttentionMembership(
        1, text, batch=8, attention=AttentionSettings(calibration_tokens=700), **settings
    )


def test_a_resumed_calibration_is_of_the_same_text_and_refresh_or_made_anew(tmp_path, monkeypatch):
    prepared = []
    plain = AttentionMembership.prepare
    monkeypatch.setattr(
        AttentionMembership, "prepare", lambda self, a: (prepared.append(self), plain(self, a))
    )
    first = LeakageMonitor(attention(public(0)), every_n_steps=1)
    fit([first], tmp_path / "first", n=8)
    assert prepared == first.attacks
    state = first.state_dict()
    for case, attack, anew in (
        ("same", attention(public(0)), False),
        ("text", attention(public(1)), True),
        ("refresh", attention(public(0), refresh_every=100), True),
    ):
        prepared.clear()
        resumed = LeakageMonitor(attack, every_n_steps=1)
        resumed.load_state_dict(state)
        fit([resumed], tmp_path / case, n=8)
        assert prepared == ([attack] if anew else [])
        means = [m.attacks[0].state_dict()["whitening.mean"] for m in (first, resumed)]
        assert torch.equal(*means) is (case != "text")


@pytest.mark.parametrize("kind", ["fc", "trained"])
def test_what_was_measured_is_resumed_and_not_measured_twice(tmp_path, monkeypatch, kind):
    measured = []
    if kind == "fc":
        plain = fc_membership.model_rounding
        counted = lambda *a, **k: (measured.append(1), plain(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(fc_membership, "model_rounding", counted)
    else:
        embed = TrainedMembership._embed_public
        counted = lambda self, a: (measured.append(1), embed(self, a))[1]  # noqa: E731
        monkeypatch.setattr(TrainedMembership, "_embed_public", counted)

    def built(seed=0):
        if kind == "fc":
            return FCMembership(2)
        return TrainedMembership(
            1,
            public(seed),
            training=TrainingSettings(hidden_units=64, steps=5, batch=64, public_rows=32),
        )

    settings = {"n": 8, "precision": "bf16-mixed"}
    first = LeakageMonitor(built(), every_n_steps=1)
    fit([first], tmp_path / "first", **settings)
    assert measured == [1]
    state = first.state_dict()
    resumed = LeakageMonitor(built(), every_n_steps=1)
    resumed.load_state_dict(state)
    moved = CausalLMModule(tiny_gpt2(seed=3).train(), optimizer="adamw")
    fit([resumed], tmp_path / "resumed", module=moved, **settings)
    assert measured == [1]
    kept, again = (m.attacks[0].state_dict() for m in (first, resumed))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[k], again[k]) for k in kept)
    assert first.attacks[0].config() == resumed.attacks[0].config()
    other = LeakageMonitor(built(seed=1), every_n_steps=1)
    other.load_state_dict(state)
    fit([other], tmp_path / "other", n=8)
    assert len(measured) == (1 if kind == "fc" else 2)
    if kind == "fc":
        assert other.attacks[0]._resolve_precision(torch.float32) == "fp32"
