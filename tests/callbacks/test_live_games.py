"""Membership games beside defences: what becomes of the crafted layers' gradients."""

import math

import pytest
import scipy.stats
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
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.defenses.test_canary import Halves
from tests.engine.test_games import AUC, RecordingAttack, id_batches, texts_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
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


@pytest.mark.slow
def test_under_clip_and_noise_a_canary_leaks_as_the_gaussian_mechanism_does(tmp_path):
    """In the worst case it takes the whole norm: AUC = Phi(1 / (sigma sqrt 2)) for a known sign.

    Here the sign is not known: scores are |x|, folded normals.
    """
    clip, sigma, attack = 3.0, 0.5, RecordingAttack(ladder=(1.0,))
    noise = GradientNoise(clip=clip, sigma=sigma, seed=0)
    games = Games(window=200)
    monitor = defended(tmp_path, attack, noise, every_n_steps=1, games=games, n=400)
    shared = torch.cat(attack.at("shared"))[:, 0].double() / (sigma * clip)
    batches = id_batches(400)
    members = torch.tensor(
        [text in batches[step] for step, _, _, query in attack.runs for text in texts_of(query)]
    )
    assert int(members.sum()) * 2 == len(members)
    by_place = members.view(-1, 8).double().mean(0)
    assert 0.3 < float(by_place.min()) <= float(by_place.max()) < 0.7
    outside, inside = shared[~members], shared[members]
    assert scipy.stats.kstest(outside.numpy(), "norm").pvalue > 1e-3
    folded = scipy.stats.foldnorm(1 / sigma)
    assert scipy.stats.kstest(inside.abs().numpy(), folded.cdf).pvalue > 1e-3
    grid = torch.linspace(0, 12, 20_001, dtype=torch.float64).numpy()
    below, steps = scipy.stats.foldnorm(0).cdf(grid), folded.cdf(grid)
    expected = float(((below[1:] + below[:-1]) / 2) @ (steps[1:] - steps[:-1]))
    assert monitor.latest[AUC] == pytest.approx(expected, abs=0.06)
    assert {s.noise_std for _, stage, s, _ in attack.runs if stage == "shared"} == {sigma * clip}


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
