"""Membership games and inversion beside defences; where games can be played and go on."""

import math

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.membership.attention import (
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.defenses import Defense, Freeze, GradientNoise, TokenLDP
from lightning_fedleak.defenses.activations import ActivationNoise
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.engine import Engine, Options, WatchSettings, selected
from lightning_fedleak.engine.options import known_stages
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out, with_states_out
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers.loop import Loop, LoopRun
from tests.callbacks.runs import Probe, assert_same, fit
from tests.defenses.test_canary import Halves
from tests.engine.test_games import AUC, RecordingAttack, texts_of
from tests.engine.test_inversion import ACCURACY, Recording, exact
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of, watched
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import grouped


def still(lr=0.0, kind=CausalLMModule):
    """Return a model that does not move, without dropout."""
    return kind(tiny_gpt2(dropout=0.0).train(), lr=lr)


def defended(root, attacks, *defenses, module=None, n=32, **settings):
    """Return the monitor of a fit under defences."""
    monitor = LeakageMonitor(attacks, **grouped(settings, every_n_steps=3))
    strategy = DefendedStrategy("auto", defenses=[*defenses])
    fit([monitor], root, module=module or still(), strategy=strategy, n=n)
    return monitor


def public(n=60):
    generator = torch.Generator().manual_seed(5)
    return PublicText(list(torch.randint(3, 97, (n, 12), generator=generator)))


def attention(name, text, **settings):
    return AttentionMembership(
        1, text, tokens=12, batch=4, attention=AttentionSettings(**settings), name=name
    )


def test_the_loss_scale_of_amp_is_not_in_the_canary(tmp_path):
    upstreams = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        attack = RecordingAttack()
        monitor = LeakageMonitor(attack, every_n_steps=3, games=Games(targets=2))
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fit([monitor], tmp_path / str(scale), module=still(), plugins=[plugin], n=16)
        assert monitor.latest[AUC] == 1
        upstreams.append(attack.computed[1][3])
    first, second = upstreams
    assert first.abs().max() > 0
    torch.testing.assert_close(first, second, rtol=0.05, atol=float(first.abs().max()) / 50)


def test_noise_without_a_clip_holds_no_server_back_that_scales_its_layers(tmp_path):
    noise = GradientNoise(clip=None, sigma=1.0)
    assert defended(tmp_path, RecordingAttack(), noise).latest[AUC] == 1


def test_a_defence_that_does_not_know_canaries_makes_them_unknown(tmp_path):
    with pytest.warns(UserWarning, match="'halves' does not say what it does to a canary"):
        monitor = defended(
            tmp_path, [RecordingAttack(), Probe()], Halves(), stages=("local", "shared")
        )
    assert math.isnan(monitor.latest[AUC])
    assert monitor.latest["leakage_local/recording/auc"] == 1
    assert monitor.latest["leakage/probe/f1"] > 0
    assert monitor.failures == 3


def test_freezing_does_not_freeze_the_servers_own_layers(tmp_path):
    monitor = defended(tmp_path, [RecordingAttack(), Probe()], Freeze("head+embeddings"))
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert monitor.latest["leakage/recording/exposed"] == monitor.latest[AUC] == 1


class Writes(Defense):
    """Replaces the words of the batch from ``first`` on."""

    name, guarantee = "writes", "none"

    def __init__(self, first=0):
        self.first = first
        self.written = []

    def on_batch(self, batch, context):
        ids = batch["input_ids"].clone()
        ids[:, self.first :] = (ids[:, self.first :] + 31) % 97
        self.written.append(ids)
        return batch | {"input_ids": ids}


def test_the_client_reads_what_a_defence_has_written_in_place_of_its_batch(tmp_path):
    attack, defense, module = RecordingAttack(), Writes(), still()
    monitor = defended(tmp_path, attack, defense, module=module, stages=("local", "shared"))
    batches = list(random_token_loader(32))
    for look, step in enumerate([1, 3, 6]):
        _, hidden, mask, _, _ = attack.computed[1 + look]
        truth, written = batches[step]["input_ids"], defense.written[step]
        assert not torch.equal(truth, written)
        torch.testing.assert_close(hidden, hidden_states(find_anatomy(module), 1, written, mask))
        query = next(query for number, _, _, query in attack.runs if number == step)
        assert sum(text in truth.tolist() for text in texts_of(query)) == len(truth)
    assert monitor.failures == 0
    assert monitor.latest["leakage/recording/accuracy"] == 0.5
    assert defended(tmp_path, RecordingAttack(), Writes(first=99)).latest[AUC] == 1


def test_where_a_defence_acts_attention_plays_wider_bands_and_one_under_noise(tmp_path):
    attacks = [attention("default", public()), attention("given", public(), widths=WIDTHS)]
    ldp = TokenLDP("grr", epsilon=5, per="token", special_ids=[0, 1, 2])
    cases = [
        ([ldp], 0.999, list(WIDTHS)),
        ([ldp, GradientNoise(clip=3.0, sigma=0.5, seed=0)], 0.1, [0.1]),
        ([], WIDTHS[-1], list(WIDTHS)),
    ]
    for defenses, widest, given in cases:
        monitor = defended(tmp_path, attacks, *defenses)
        widths = [attack.config()["widths"] for attack in attacks]
        assert widths[0][-1] == widest
        assert widths[1] == given
        assert monitor.failures == 0


class Embeds(CausalLMModule):
    def training_step(self, batch, batch_idx):
        states = self.model.transformer.wte(batch["input_ids"])
        return self.model(inputs_embeds=states, labels=batch["labels"]).loss


def test_a_batch_that_is_replaced_and_cannot_be_read_is_unknown(tmp_path):
    with pytest.warns(UserWarning, match="the token ids that the model ran on are unknown"):
        monitor = defended(tmp_path, RecordingAttack(), Writes(), module=still(kind=Embeds))
    assert math.isnan(monitor.latest[AUC])


def test_layers_behind_rewritten_hidden_states_are_unknown_and_those_below_are_not(tmp_path):
    attacks = [FCMembership(k, name=f"fc_{k}") for k in (0, 1, 2)]
    with pytest.warns(UserWarning, match="rewrites the hidden states at layer 1"):
        monitor = defended(tmp_path, attacks, ActivationNoise(1, sigma=50.0))
    assert monitor.latest["leakage/fc_0/auc"] > 0.8
    assert math.isnan(monitor.latest["leakage/fc_1/auc"])
    assert math.isnan(monitor.latest["leakage/fc_2/auc"])


class Shift(Defense):
    """Adds a constant to the hidden states at a layer."""

    name, guarantee = "shift", "none"

    def __init__(self, layer, by=1.0):
        self.activation_layers = (layer,)
        self.by = by

    def before_setup(self, context):
        place = place_of(find_anatomy(context.root), self.activation_layers[0])
        if place.side == "input":
            self.handle = place.module.register_forward_pre_hook(
                lambda _, args: (args[0] + self.by, *args[1:])
            )
        else:
            self.handle = place.module.register_forward_hook(
                lambda _, __, out: with_states_out(out, states_out(out) + self.by)
            )

    def teardown(self):
        self.handle.remove()


def inverted(root, attacks, *defenses, **settings):
    monitor = LeakageMonitor(attacks, **grouped(settings))
    module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), lr=0.0)
    strategy = DefendedStrategy("auto", defenses=[*defenses]) if defenses else "auto"
    fit([monitor], root, module=module, strategy=strategy, n=4)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(part, name) for part in module.modules() for name in hooks)
    return monitor


@pytest.mark.parametrize("layer", [0, 1])
def test_local_is_before_and_shared_behind_a_defence(tmp_path, layer):
    plain, attack, above = Recording(layer), Recording(layer), Recording(2)
    inverted(tmp_path, plain)
    inverted(tmp_path, attack, Shift(layer), stages=("local", "shared"))
    local, shared = (hidden for hidden, *_ in attack.inputs)
    assert torch.equal(local, plain.inputs[0][0])
    assert torch.equal(shared, local + 1)
    inverted(tmp_path, above, Shift(layer))
    assert len(above.inputs) == 1
    with pytest.raises(ValueError, match="leave 'local' out"):
        inverted(tmp_path, Recording(2), Shift(layer), stages=("local",))


def test_what_no_defence_rewrites_is_attacked_once_for_both_stages(tmp_path):
    attack = Recording()
    monitor = inverted(tmp_path, attack, Shift(2), stages=("local", "shared", "aggregate"))
    assert len(attack.inputs) == 1
    assert monitor.latest[ACCURACY] == monitor.latest["leakage_local/recording/token_accuracy"]
    assert not any("leakage_aggregate/" in n for n in [*monitor.latest, *monitor.metric_names()])


class Sizes(L.Callback):
    def __init__(self):
        self.sizes = []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.sizes.append(len(batch["input_ids"]))


def test_poisson_batches_of_dpsgd_are_read_and_its_empty_ones_passed_over(tmp_path):
    def run(callbacks, root):
        strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=0.5, seed=3)])
        module = CausalLMModule(tiny_gpt2(dropout=0.0, tied=False).train(), optimizer="adamw")
        loader = random_token_loader(10, batch_size=1)
        return fit(callbacks, root, module=module, strategy=strategy, loader=loader)

    attacks, stages = [exact(1), FCMembership(1), Probe()], ("local", "shared")
    monitor = LeakageMonitor(
        attacks, every_n_steps=1, settings=WatchSettings(stages=stages), folder=tmp_path
    )
    sizes = Sizes()
    assert_same(run([], tmp_path / "plain"), run([sizes, monitor], tmp_path / "watched"))
    assert monitor.failures == 0
    assert 0 in sizes.sizes
    lines = lines_of(tmp_path, "prefix_inversion")
    for stage in stages:
        steps = {line["step"]: line["n"] for line in lines if line["stage"] == stage}
        assert steps == {step: min(n, 4) for step, n in enumerate(sizes.sizes) if n}
    assert all(line["metrics"]["token_accuracy"]["value"] == 1 for line in lines)


def opened(*attacks, stages=("shared",), client="rank"):
    """An engine whose channels are opened on a run of several processes."""
    model = tiny_gpt2()
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    run = LoopRun(loop, "Watch", find_anatomy(model), client, frozenset())
    run.processes = 2
    engine = Engine(selected(attacks), Options(stages=known_stages(stages)))
    engine.open(run)


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


def seeded(seed):
    generator = torch.Generator().manual_seed(seed)
    return PublicText(torch.randint(3, 97, (60, 12), generator=generator))


def wide_attention(text, **settings):
    return AttentionMembership(1, text, batch=8, **settings)


def test_a_resumed_calibration_is_of_the_same_text_and_refresh_or_made_again(tmp_path, monkeypatch):
    prepared = []
    plain = AttentionMembership.prepare
    monkeypatch.setattr(
        AttentionMembership, "prepare", lambda self, a: (prepared.append(self), plain(self, a))
    )
    first = wide_attention(seeded(0))
    state = watched(tmp_path / "first", first, n=8).state_dict()
    assert prepared == [first]
    for case, attack, again in (
        ("same", wide_attention(seeded(0)), False),
        ("text", wide_attention(seeded(1)), True),
        ("refresh", wide_attention(seeded(0)), True),
    ):
        prepared.clear()
        if case == "refresh":
            attack.refresh_every = 100
        watched(tmp_path / case, attack, n=8, state=state)
        assert prepared == ([attack] if again else [])
        means = [one.state_dict()["whitening.mean"] for one in (first, attack)]
        assert torch.equal(*means) is (case != "text")
