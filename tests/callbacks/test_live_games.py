"""Membership games on live steps: what is played, on what, and what becomes of it."""

import json
import math

import lightning.pytorch as L
import pytest
import scipy.stats
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.membership.attention import (
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.membership.base import CRAFTED, MembershipGuess
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.insertion import insert
from lightning_fedleak.attacks.membership.trained import TrainedMembership
from lightning_fedleak.callbacks import Games, LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.defenses import Defense, Freeze, GradientNoise, TokenLDP
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.evaluation.canaries import InclusionMismatch, with_canaries
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import HONEST_BUT_CURIOUS, ThreatModelError
from tests.callbacks.runs import Probe, fit
from tests.helpers.lightning_modules import CausalLMModule, FusedLossModule, random_token_loader
from tests.helpers.models import tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2

AUC = "leakage/recording/auc"


class Recording(FCMembership):
    """Keeps what it was shown of the steps themselves."""

    default_name = "recording"
    needs_control = False

    def __init__(self, layer=1, **settings):
        super().__init__(layer, **settings)
        self.seen = []
        self.computed = []

    def gradient(self, targets, hidden, mask, upstream):
        out = super().gradient(targets, hidden, mask, upstream)
        self.computed.append((targets, hidden, mask, upstream, out))
        return out

    def run(self, view, query=None):
        snapshot = view.gradients[-1]
        self.seen.append((snapshot.step, str(snapshot.stage), snapshot, query))
        return super().run(view, query)

    def at(self, stage):
        return [s.tensors[CRAFTED] for _, st, s, _ in self.seen if st == stage]


def lines(monitor):
    return [json.loads(line) for line in monitor.engine.jsonl.path.read_text().splitlines()]


def still(optimizer="sgd", lr=0.0, **settings):
    """A model that does not move, without dropout."""
    return CausalLMModule(tiny_gpt2(dropout=0.0, **settings).train(), lr=lr, optimizer=optimizer)


def own_rows(query):
    rows = zip(query.input_ids, query.attention_mask, strict=True)
    return [ids[mask != 0].tolist() for ids, mask in rows]


# ---- what is asked, and of whom -----------------------------------------------------------------


def test_half_of_the_targets_are_in_the_batch_and_half_in_an_earlier_one(tmp_path):
    attack = Recording()
    monitor = LeakageMonitor(attack, every_n_steps=3)
    fit([monitor], tmp_path, module=still())
    batches = [b["input_ids"].tolist() for b in random_token_loader(32)]
    assert [step for step, *_ in attack.seen] == [1, 3, 6]
    for step, _, _, query in attack.seen:
        asked = own_rows(query)
        inside = [text for text in asked if text in batches[step]]
        outside = [text for text in asked if text not in batches[step]]
        assert sorted(inside) == sorted(batches[step])
        earlier = batches[step - 1] + batches[max(0, step - 2)]
        assert len(outside) == 4
        assert all(text in earlier for text in outside)
    assert [line["n"] for line in lines(monitor)] == [8, 16, 24]
    assert lines(monitor)[-1]["metrics"]["auc"]["value"] == 1
    assert monitor.failures == 0


def test_texts_of_ones_own_can_be_held_out_and_then_the_first_look_has_a_result(tmp_path):
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(3, 97, (30, 9), generator=generator)
    batch = next(iter(random_token_loader(32)))["input_ids"]
    public = PublicText([*texts.tolist(), *batch.tolist()])
    attack = Recording()
    monitor = LeakageMonitor(attack, every_n_steps=100, games=Games(held_out=public, targets=3))
    fit([monitor], tmp_path, module=still())
    ((step, _, _, query),) = attack.seen
    asked = own_rows(query)
    assert step == 0
    assert sum(t in batch.tolist() for t in asked) == 3
    assert sum(t in texts.tolist() for t in asked) == 3
    assert monitor.look_values[AUC] == 1


def test_the_hidden_states_are_those_of_eval_mode_and_the_upstream_that_of_the_real_step(tmp_path):
    attack = Recording(layer=1)
    module = CausalLMModule(tiny_gpt2(dropout=0.3).train(), lr=0.0)
    monitor = LeakageMonitor(attack, every_n_steps=3, games=Games(targets=2, scale=10.0))
    kept = []

    def keep(_, __, output):
        states = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled():
            kept.append([states, None])
            entry = kept[-1]
            states.register_hook(lambda g: entry.__setitem__(1, g.clone()))

    module.model.transformer.h[0].register_forward_hook(keep)
    fit([monitor], tmp_path, module=module)
    batch = list(random_token_loader(32))[1]
    model = module.model.eval()
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states[1]
    targets, hidden, mask, upstream, _ = attack.computed[1]
    torch.testing.assert_close(hidden, expected)
    assert torch.equal(mask, batch["attention_mask"])
    unit = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (10 * unit / unit.norm()).float()
    torch.testing.assert_close(upstream, kept[1][1] @ unit, rtol=1e-5, atol=1e-9)
    assert (kept[1][0] - hidden).abs().max() > 0.01
    rows = attack.seen[0][3]
    with torch.no_grad():
        states = model(rows.input_ids, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(targets, states[torch.arange(4), rows.positions])


@pytest.mark.parametrize("granularity", ["token", "full"])
def test_the_gradient_is_that_of_layers_that_are_really_there(tmp_path, granularity):
    """One step with the crafted layers in the model, by autograd, against the live canary."""
    attack = Recording(layer=1, granularity=granularity, tokens=12)
    scale = 1e-6
    monitor = LeakageMonitor(attack, every_n_steps=3, games=Games(targets=2, scale=scale))
    module = still()
    fit([monitor], tmp_path, module=module)
    batch = list(random_token_loader(32))[1]
    shared = attack.at("shared")[0]
    assert shared.shape == (4, attack.rungs)
    assert int((shared.abs().sum(1) > 0).sum()) == 2
    for target, game in zip(attack.computed[1][0], shared, strict=True):
        crafted = attack.craft(target)
        with insert(find_anatomy(module), 1, crafted, scale=scale):
            (real,) = torch.autograd.grad(module.model(**batch).loss, [crafted.bias])
        torch.testing.assert_close(game, real, rtol=1e-3, atol=1e-7 * scale)


def test_the_loss_scale_of_amp_is_not_in_the_canary(tmp_path):
    from lightning.pytorch.plugins.precision import MixedPrecision

    seen = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        attack = Recording()
        monitor = LeakageMonitor(attack, every_n_steps=3, games=Games(targets=2))
        fit([monitor], tmp_path / str(scale), module=still(), plugins=[plugin])
        assert monitor.latest[AUC] == 1
        seen.append(attack.computed[1][3])
    assert seen[0].abs().max() > 0
    torch.testing.assert_close(seen[0], seen[1], rtol=0.05, atol=float(seen[0].abs().max()) / 50)


def test_accumulated_batches_are_samples_of_one_game(tmp_path):
    attack = Recording()
    monitor = LeakageMonitor(attack, every_n_steps=2, games=Games(targets=8))
    fit([monitor], tmp_path, module=still(), accumulate_grad_batches=2)
    batches = [b["input_ids"].tolist() for b in random_token_loader(32)]
    step, _, snapshot, query = attack.seen[0]
    assert step == 1
    joined = batches[2] + batches[3]
    assert sorted(t for t in own_rows(query) if t in joined) == sorted(joined)
    first, second = (attack.computed[i][-1] for i in (1, 2))
    expected = torch.cat([first, second]).sum(0)
    torch.testing.assert_close(snapshot.tensors[CRAFTED], expected)
    assert monitor.look_values[AUC] == 1


def test_padded_batches_are_told_apart_perfectly(tmp_path):
    for name, model in (("gpt2", tiny_gpt2()), ("bert", tiny_bert_mlm())):
        monitor = LeakageMonitor(Recording(), every_n_steps=2)
        module = CausalLMModule(model.train())
        loader = random_token_loader(32, padded=True)
        fit_with(loader, monitor, tmp_path / name, module)
        assert monitor.latest[AUC] == monitor.latest["leakage/recording/accuracy"] == 1
        assert monitor.failures == 0


def fit_with(loader, monitor, root, module, **settings):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root, **settings,
    )  # fmt: skip
    trainer.fit(module, loader if isinstance(loader, DataLoader) else DataLoader(loader, None))
    return trainer


def test_batches_without_a_mask_and_of_several_lengths(tmp_path):
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 7, 5, 12, 6]
    rows = [
        {"input_ids": (ids := torch.randint(3, 97, (4, n), generator=generator)), "labels": ids}
        for n in lengths
    ]

    class NoMask(CausalLMModule):
        def training_step(self, batch, batch_idx):
            assert "attention_mask" not in batch
            return super().training_step(batch, batch_idx)

    monitor = LeakageMonitor(Recording(), every_n_steps=1)
    fit_with(rows, monitor, tmp_path, NoMask(tiny_gpt2().train()))
    assert (monitor.failures, monitor.latest[AUC]) == (0, 1)


@pytest.mark.parametrize("attack", [Recording, GradientMembership])
def test_rows_without_a_label_are_not_asked_for(attack, tmp_path):
    """Such a row has no part in the gradient: as a member it would make a sure attack a coin."""
    rows = list(random_token_loader(32))
    for batch in rows:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][1::2] = -100
    monitor = LeakageMonitor(attack(), every_n_steps=2)
    fit_with(rows, monitor, tmp_path, still())
    assert monitor.failures == 0
    assert monitor.latest[f"leakage/{monitor.attacks[0].name}/auc"] == 1


# ---- stages and defences ------------------------------------------------------------------------


def test_without_defences_local_and_shared_are_the_same(tmp_path):
    attack = Recording()
    monitor = LeakageMonitor(attack, every_n_steps=3, stages=("local", "shared", "aggregate"))
    fit([monitor], tmp_path, strategy=DefendedStrategy("auto"))
    seen = [attack.at(s) for s in monitor.engine.options.stages]
    assert len(seen[0]) == 3
    for local, shared, aggregate in zip(*seen, strict=True):
        assert torch.equal(local, shared)
        assert torch.equal(shared, aggregate)


def test_canaries_pass_through_the_defences_in_one_norm_with_the_update(tmp_path):
    attack = Recording()
    norms = []

    class Norm(Defense):
        name, guarantee = "norm", "none"

        def on_gradients(self, parameters, context):
            norms.append(torch.cat([p.grad.flatten() for p in parameters]).norm())

        def on_canary(self, canary, parameters, context):
            return canary

    clip = 0.02
    strategy = DefendedStrategy("auto", defenses=[Norm(), GradientNoise(clip=clip, sigma=0.0)])
    stages = ("local", "shared")
    monitor = LeakageMonitor(attack, every_n_steps=3, stages=stages, games=Games(scale=1e3))
    fit([monitor], tmp_path, strategy=strategy)
    steps = [step for step, stage, *_ in attack.seen if stage == "local"]
    for step, local, shared in zip(steps, attack.at("local"), attack.at("shared"), strict=True):
        joint = (norms[step] ** 2 + local.norm(dim=1) ** 2).sqrt()
        assert bool((joint > clip).all())
        torch.testing.assert_close(shared, local * (clip / joint)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_under_clip_and_noise_a_canary_leaks_as_the_gaussian_mechanism_does(tmp_path, sigma):
    """In the worst case it takes the whole norm: AUC = Phi(1 / (sigma sqrt 2)) for a known sign.

    Here the sign is not known: scores are |x|, folded normals.
    """
    clip = 3.0
    strategy = DefendedStrategy("auto", defenses=[GradientNoise(clip=clip, sigma=sigma, seed=0)])
    attack = Recording(ladder=(1.0,))
    monitor = LeakageMonitor(attack, every_n_steps=1, games=Games(window=200))
    fit([monitor], tmp_path, strategy=strategy, module=still(), n=400)
    shared = torch.cat(attack.at("shared"))[:, 0].double() / (sigma * clip)
    batches = [b["input_ids"].tolist() for b in random_token_loader(400)]
    members = torch.tensor(
        [text in batches[step] for step, _, _, query in attack.seen for text in own_rows(query)]
    )
    assert int(members.sum()) * 2 == len(members)
    by_place = members.view(-1, 8).double().mean(0)
    assert float(by_place.min()) > 0.3
    assert float(by_place.max()) < 0.7
    outside, inside = shared[~members], shared[members]
    assert scipy.stats.kstest(outside.numpy(), "norm").pvalue > 1e-3
    folded = scipy.stats.foldnorm(1 / sigma)
    assert scipy.stats.kstest(inside.abs().numpy(), folded.cdf).pvalue > 1e-3
    grid = torch.linspace(0, 12, 20_001, dtype=torch.float64).numpy()
    below = scipy.stats.foldnorm(0).cdf(grid)
    expected = float(
        ((below[1:] + below[:-1]) / 2) @ (folded.cdf(grid)[1:] - folded.cdf(grid)[:-1])
    )
    assert monitor.latest["leakage/recording/auc"] == pytest.approx(expected, abs=0.06)
    assert {s.noise_std for _, st, s, _ in attack.seen if st == "shared"} == {sigma * clip}


@pytest.mark.slow
def test_under_clip_and_noise_the_default_ladder_leaks_no_less_than_one_rung(tmp_path):
    noise = GradientNoise(clip=3.0, sigma=0.5, seed=0)
    attacks = [FCMembership(1, name="default"), FCMembership(1, ladder=(1.0,), name="one")]
    assert attacks[0].rungs == 14
    monitor = LeakageMonitor(attacks, every_n_steps=1, games=Games(window=200))
    strategy = DefendedStrategy("auto", defenses=[noise])
    fit([monitor], tmp_path / "noise", strategy=strategy, module=still(), n=400)
    assert attacks[0].config()["ladder"] == [1.0]
    one = "leakage/one/auc"
    found = monitor.latest["leakage/default/auc"]
    assert monitor.latest[f"{one}_low"] <= found <= monitor.latest[f"{one}_high"]
    assert found > 0.78
    fit([LeakageMonitor(attacks, every_n_steps=3)], tmp_path / "none", module=still())
    assert attacks[0].rungs == 14


@pytest.mark.slow
def test_under_clip_and_noise_attention_has_one_width_and_leaks_no_less(tmp_path):
    generator = torch.Generator().manual_seed(5)
    public = PublicText(list(torch.randint(3, 97, (200, 12), generator=generator)))
    default = AttentionMembership(1, public, tokens=12, batch=4, name="default")
    many = AttentionMembership(
        1,
        public,
        tokens=12,
        batch=4,
        attention=AttentionSettings(widths=(*WIDTHS, 0.6)),
        name="many",
    )
    monitor = LeakageMonitor([default, many], every_n_steps=1, games=Games(window=200))
    strategy = DefendedStrategy("auto", defenses=[GradientNoise(clip=3.0, sigma=0.5, seed=0)])
    fit([monitor], tmp_path / "noise", strategy=strategy, module=still(), n=400)
    assert default.config()["widths"] == [0.1]
    found, before = (monitor.latest[f"leakage/{n}/auc"] for n in ("default", "many"))
    assert found > max(0.7, before + 0.05)
    fit([LeakageMonitor(default, every_n_steps=3)], tmp_path / "none", module=still())
    assert tuple(default.config()["widths"]) == WIDTHS


def test_noise_without_a_clip_holds_no_server_back_that_scales_its_layers(tmp_path):
    strategy = DefendedStrategy("auto", defenses=[GradientNoise(clip=None, sigma=1.0)])
    monitor = LeakageMonitor(Recording(), every_n_steps=1)
    fit([monitor], tmp_path, strategy=strategy, module=still())
    assert monitor.latest[AUC] == 1


def test_a_defence_that_does_not_know_canaries_makes_them_unknown(tmp_path):
    class Halves(Defense):
        name, guarantee = "halves", "none"

        def on_gradients(self, parameters, context):
            for p in parameters:
                p.grad.mul_(0.5)

    monitor = LeakageMonitor([Recording(), Probe()], every_n_steps=3, stages=("local", "shared"))
    with pytest.warns(UserWarning, match="'halves' does not say what it does to a canary"):
        fit([monitor], tmp_path, strategy=DefendedStrategy("auto", defenses=[Halves()]))
    assert math.isnan(monitor.latest[AUC])
    assert monitor.latest["leakage_local/recording/auc"] == 1
    assert monitor.latest["leakage/probe/f1"] > 0
    assert monitor.failures == 3


def test_freezing_does_not_freeze_the_servers_own_layers(tmp_path):
    attack = Recording()
    monitor = LeakageMonitor([attack, Probe()], every_n_steps=3)
    strategy = DefendedStrategy("auto", defenses=[Freeze("head+embeddings")])
    fit([monitor], tmp_path, strategy=strategy)
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert monitor.latest["leakage/recording/exposed"] == 1
    assert monitor.latest[AUC] == 1


class Writes(Defense):
    """Gives the model other words in place of those from ``first`` on."""

    name, guarantee = "writes", "none"

    def __init__(self, first):
        self.first = first
        self.written = []

    def on_batch(self, batch, context):
        ids = batch["input_ids"].clone()
        ids[:, self.first :] = (ids[:, self.first :] + 31) % 97
        self.written.append(ids)
        return batch | {"input_ids": ids}


def test_the_client_reads_what_a_defence_has_written_in_place_of_its_batch(tmp_path):
    attack, defense = Recording(), Writes(first=0)
    monitor = LeakageMonitor(attack, every_n_steps=3, stages=("local", "shared"))
    module = still()
    fit([monitor], tmp_path, module=module, strategy=DefendedStrategy("auto", defenses=[defense]))
    anatomy = find_anatomy(module)
    batches = list(random_token_loader(32))
    for look, step in enumerate([1, 3, 6]):
        _, hidden, mask, _, _ = attack.computed[1 + look]
        truth = batches[step]["input_ids"]
        assert not torch.equal(truth, defense.written[step])
        torch.testing.assert_close(hidden, hidden_states(anatomy, 1, defense.written[step], mask))
        query = next(q for s, _, _, q in attack.seen if s == step)
        assert sum(text in truth.tolist() for text in own_rows(query)) == len(truth)
    assert monitor.failures == 0
    assert monitor.latest["leakage/recording/accuracy"] == 0.5

    untouched = LeakageMonitor(Recording(), every_n_steps=3)
    strategy = DefendedStrategy("auto", defenses=[Writes(first=99)])
    fit([untouched], tmp_path, module=still(), strategy=strategy)
    assert untouched.latest[AUC] == 1


def test_where_a_defence_replaces_the_batch_attention_plays_wider_bands(tmp_path):
    words = torch.Generator().manual_seed(5)
    public = PublicText(list(torch.randint(3, 97, (60, 12), generator=words)))
    default = AttentionMembership(1, public, tokens=12, batch=4, name="default")
    given = AttentionMembership(
        1, public, tokens=12, batch=4, attention=AttentionSettings(widths=WIDTHS), name="given"
    )
    monitor = LeakageMonitor([default, given], every_n_steps=3)

    def run(*defenses):
        strategy = DefendedStrategy("auto", defenses=defenses)
        fit([monitor], tmp_path / str(len(defenses)), strategy=strategy, module=still())
        return [attack.config()["widths"] for attack in (default, given)]

    ldp = TokenLDP("grr", epsilon=5, per="token", special_ids=[0, 1, 2])
    widths = run(ldp)
    assert widths[0][-1] == 0.999
    assert widths[1] == list(WIDTHS)
    assert monitor.failures == 0
    assert run(ldp, GradientNoise(clip=3.0, sigma=0.5, seed=0)) == [[0.1], list(WIDTHS)]
    assert run() == [list(WIDTHS)] * 2


def test_a_batch_that_is_replaced_and_cannot_be_seen_is_unknown(tmp_path):
    class Embeds(CausalLMModule):
        def training_step(self, batch, batch_idx):
            states = self.model.transformer.wte(batch["input_ids"])
            return self.model(inputs_embeds=states, labels=batch["labels"]).loss

    monitor = LeakageMonitor(Recording(), every_n_steps=3)
    strategy = DefendedStrategy("auto", defenses=[Writes(first=0)])
    module = Embeds(tiny_gpt2(dropout=0.0).train(), lr=0.0)
    with pytest.warns(UserWarning, match="the token ids that the model was run on are not known"):
        fit([monitor], tmp_path, module=module, strategy=strategy)
    assert math.isnan(monitor.latest[AUC])


def test_layers_behind_rewritten_hidden_states_are_unknown_and_those_below_are_not(tmp_path):
    attacks = [FCMembership(k, name=f"fc_{k}") for k in (0, 1, 2)]
    monitor = LeakageMonitor(attacks, every_n_steps=3, stages=("local", "shared"))
    strategy = DefendedStrategy("auto", defenses=[ActivationNoise(1, sigma=50.0)])
    with pytest.warns(UserWarning, match="rewrites the hidden states at layer 1"):
        fit([monitor], tmp_path, module=still(), strategy=strategy)
    for prefix in ("leakage", "leakage_local"):
        assert monitor.latest[f"{prefix}/fc_0/auc"] > 0.8
        assert math.isnan(monitor.latest[f"{prefix}/fc_1/auc"])
        assert math.isnan(monitor.latest[f"{prefix}/fc_2/auc"])


# ---- pending ------------------------------------------------------------------------------------


def test_before_a_text_is_known_to_be_outside_the_result_is_pending(tmp_path):
    monitor = LeakageMonitor([Recording(), Probe()], every_n_steps=2)
    seen = []
    gate = RiskGate(AUC, at_most=1.0, action="raise")

    monitor_publish = monitor.engine._publish

    def publishing(look, outcomes):
        monitor_publish(look, outcomes)
        seen.append((look.step, AUC in monitor.latest, AUC in monitor.pending))

    monitor.engine._publish = publishing
    fit([gate, monitor], tmp_path, module=still())
    assert seen == [(0, False, True), *((step, True, False) for step in (1, 2, 4, 6))]
    assert monitor.failures == 0
    assert gate.fired is None
    assert [(x["step"], x["attack"]) for x in lines(monitor)][:3] == [
        (0, "probe"), (1, "recording"), (2, "recording"),
    ]  # fmt: skip


def test_a_run_that_ends_before_there_was_one_is_unknown(tmp_path):
    monitor = LeakageMonitor(Recording(), every_n_steps=100)
    gate = RiskGate(AUC, at_most=1.0, action="raise")
    with (
        pytest.warns(UserWarning, match=r"unknown, not 0\. \(Said once"),
        pytest.raises(RuntimeError, match="unknown"),
    ):
        fit([gate, monitor], tmp_path, max_steps=1)
    assert monitor.failures == 1
    [line] = lines(monitor)
    assert line["unknown"] == (
        "training ended before there was a first result: membership needs texts outside this "
        "batch: later batches bring some, or pass games=Games(held_out=texts)"
    )


def test_what_stays_pending_is_unknown(tmp_path):
    rows = [{"input_ids": (ids := torch.arange(3, 12)[None].repeat(4, 1)), "labels": ids}] * 30
    monitor = LeakageMonitor(Recording(), every_n_steps=1)
    with pytest.warns(UserWarning, match=r"outside this batch: .*, for more than 20 looks"):
        fit_with(rows, monitor, tmp_path, CausalLMModule(tiny_gpt2().train()))
    assert monitor.failures == 10
    assert math.isnan(monitor.latest[AUC])


# ---- failures -----------------------------------------------------------------------------------


def test_a_loss_that_does_not_depend_on_the_layer_is_unknown_not_safe(tmp_path):
    class Shallow(CausalLMModule):
        def training_step(self, batch, batch_idx):
            hidden = self.model(**batch, output_hidden_states=True).hidden_states[1]
            loss = hidden.square().mean()
            self.log("train_loss", loss)
            return loss

    monitor = LeakageMonitor(Recording(layer=2), every_n_steps=3)
    with pytest.warns(UserWarning, match="gradient at layer 2 was seen in 0 of 1 batches"):
        fit([monitor], tmp_path, module=Shallow(tiny_gpt2().train()))
    assert math.isnan(monitor.latest[AUC])


def test_tokens_that_the_loss_looks_away_from_are_unknown_not_safe(tmp_path):
    class Early(FusedLossModule):
        def training_step(self, batch, batch_idx):
            labels = batch["labels"].clone()
            labels[:, 6:] = -100
            return super().training_step({**batch, "labels": labels}, batch_idx)

    monitor = LeakageMonitor(Recording(layer=1), every_n_steps=3)
    with pytest.warns(UserWarning, match="not depend on .* at layer 1 of any of the 4"):
        fit([monitor], tmp_path, module=Early(tiny_gpt2().train()))
    assert math.isnan(monitor.latest[AUC])
    assert monitor.failures == 3


def test_games_ask_for_tokens_that_the_step_s_own_graph_counts(tmp_path):
    class Early(CausalLMModule):
        def training_step(self, batch, batch_idx):
            labels = batch["labels"].clone()
            labels[:, 6:] = -100
            return super().training_step({**batch, "labels": labels}, batch_idx)

    monitor = LeakageMonitor(Recording(layer=1), every_n_steps=3)
    fit([monitor], tmp_path, module=Early(tiny_gpt2().train()))
    assert not math.isnan(monitor.latest[AUC])
    assert monitor.failures == 0


def test_a_single_token_that_the_loss_looks_away_from_is_not_asked_for(tmp_path):
    class Early(FusedLossModule):
        def training_step(self, batch, batch_idx):
            labels = batch["labels"].clone()
            labels[0, 6:] = labels[2, 6:] = -100
            return super().training_step({**batch, "labels": labels}, batch_idx)

    attack = Recording()
    fit([LeakageMonitor(attack, every_n_steps=3)], tmp_path, module=Early(tiny_gpt2().train()))
    batches = [b["input_ids"].tolist() for b in random_token_loader(32)]
    for step, _, snapshot, query in attack.seen:
        asked = own_rows(query)
        members = [text for text in asked if text in batches[step]]
        assert sorted(members) == sorted([batches[step][1], batches[step][3]])
        assert len(asked) == len(snapshot.tensors[CRAFTED]) == 4


def test_crashes_and_scores_that_are_none_are_counted(tmp_path):
    class Crashing(Recording):
        default_name = "crashing"

        def gradient(self, *args):
            if not self.armed:
                return super().gradient(*args)
            raise RuntimeError("secret")

        armed = False

        def prepare(self, anatomy):
            super().prepare(anatomy)

    class NoScore(Recording):
        default_name = "no_score"

        def run(self, view, query=None):
            return MembershipGuess(torch.full((8,), math.nan), torch.zeros(8, dtype=torch.bool))

    class NoDecision(Recording):
        default_name = "no_decision"

        def run(self, view, query=None):
            return MembershipGuess(torch.zeros(8), torch.zeros(1, dtype=torch.bool))

    crashing = Crashing()
    attacks = [crashing, NoScore(), NoDecision(), Recording()]
    monitor = LeakageMonitor(attacks, every_n_steps=3)

    class Arms(CausalLMModule):
        def on_train_start(self):
            crashing.armed = True

    with pytest.warns(UserWarning, match="gave no result") as caught:
        fit([monitor], tmp_path, module=Arms(tiny_gpt2().train()))
    said = " ".join(str(w.message) for w in caught)
    assert "RuntimeError at test_live_games.py" in said
    assert "gave no score for some of its targets" in said
    assert "decided about other targets" in said
    assert "secret" not in said
    assert math.isnan(monitor.latest["leakage/crashing/auc"])
    assert math.isnan(monitor.latest["leakage/no_score/auc"])
    assert monitor.latest[AUC] == 1
    assert monitor.failures == 9


def test_rates_that_cannot_be_computed_are_unknown_and_stop_nothing(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_fedleak.evaluation.metrics.membership.membership_rates", broken)
    monitor = LeakageMonitor([Recording(), Probe()], every_n_steps=3)
    with pytest.warns(UserWarning, match="ZeroDivisionError at test_live_games"):
        trainer = fit([monitor], tmp_path)
    assert trainer.global_step == 8
    assert math.isnan(monitor.latest[AUC])
    assert monitor.latest["leakage/probe/f1"] > 0
    assert monitor.failures == 3


def test_a_classifier_can_be_played_on(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "input_ids": torch.randint(3, 97, (4, 10), generator=generator),
            "labels": torch.randint(3, (4,), generator=generator),
        }
        for _ in range(8)
    ]
    monitor = LeakageMonitor(Recording(), every_n_steps=3)
    fit_with(rows, monitor, tmp_path, CausalLMModule(tiny_bert_classifier().train()))
    assert (monitor.latest[AUC], monitor.failures) == (1, 0)


# ---- what is refused, and when ------------------------------------------------------------------


def test_an_honest_server_adds_no_layers(tmp_path):
    monitor = LeakageMonitor(Recording(), settings=MonitorSettings(assume=HONEST_BUT_CURIOUS))
    with pytest.raises(ThreatModelError, match=r"recording.*chooses the modules"):
        fit([monitor], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"targets": 0}, "targets must be an integer of at least 1"),
        ({"window": 1.5}, "window must be an integer of at least 1"),
        ({"scale": 0.0}, "scale must be a number above 0"),
        ({"held_out": ["a text"]}, "held_out must be a PublicText"),
    ],
)
def test_games_that_cannot_be_meant_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Games(**arguments)


def test_rounds_of_steps_are_refused():
    with pytest.raises(ValueError, match="reads what one step sends"):
        LeakageMonitor(Recording(), local_steps=2)


def test_a_layer_that_is_not_there_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"layer=3 is out of range: the model has 2 blocks"):
        fit([LeakageMonitor(Recording(layer=3))], tmp_path)


def test_a_model_without_blocks_is_refused_before_training(tmp_path):
    class Plain(CausalLMModule):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Embedding(97, 16), nn.Linear(16, 97)))

        def training_step(self, batch, batch_idx):
            raise AssertionError("the step must not be reached")

    with pytest.raises(ValueError, match="no transformer blocks"):
        fit([LeakageMonitor(Recording())], tmp_path, module=Plain())


def test_an_attack_that_does_not_fit_the_models_width_is_refused_before_training(tmp_path):
    class Fixed(Recording):
        def embed(self, hidden, query):
            return super().embed(hidden, query)[:, :7]

    with pytest.raises(ValueError, match=r"'recording' cannot be played on this model.*\(G, 16\)"):
        fit([LeakageMonitor(Fixed())], tmp_path)


# ---- over looks ---------------------------------------------------------------------------------


def test_games_are_pooled_over_the_window_and_a_look_has_its_own_values(tmp_path):
    class Sometimes(Recording):
        def run(self, view, query=None):
            guess = super().run(view, query)
            if view.gradients[-1].step in (4, 5):
                return MembershipGuess(-guess.scores, guess.members)
            if view.gradients[-1].step == 6:
                return MembershipGuess(guess.scores, ~guess.members)
            return guess

    monitor = LeakageMonitor(Sometimes(), every_n_steps=1, games=Games(window=3))
    values = []
    accuracies = []
    accuracy = "leakage/recording/accuracy"
    publish = monitor.engine._publish

    def publishing(look, outcomes):
        publish(look, outcomes)
        values.append((monitor.look_values.get(AUC), monitor.latest.get(AUC)))
        accuracies.append((monitor.look_values.get(accuracy), monitor.latest.get(accuracy)))

    monitor.engine._publish = publishing
    fit([monitor], tmp_path, module=still())
    assert [own for own, _ in values] == [None, 1, 1, 1, 0, 0, 1, 1]
    assert [own for own, _ in accuracies] == [None, 1, 1, 1, 1, 1, 0, 1]
    assert accuracies[-2][1] == pytest.approx(2 / 3), "of its own decisions, not of the scores"
    assert values[3][1] == 1
    assert all(0 < pooled < 1 for _, pooled in values[4:])
    sizes = [line["n"] for line in lines(monitor)]
    assert sizes == [8, 16, 24, 24, 24, 24, 24]
    assert lines(monitor)[3]["metrics"]["auc_of_this_look"]["value"] == 0


# ---- the user's own canaries --------------------------------------------------------------------


def audited(root, every_n_steps=1, seed=3, **settings):
    """One epoch on 24 texts of the data and some of 16 canaries; gives monitor and data."""
    generator = torch.Generator().manual_seed(9)
    own = random_token_loader(24).dataset
    texts = torch.randint(3, 97, (16, 12), generator=generator)
    ones = torch.ones(12, dtype=torch.long)
    data = with_canaries(
        own, [{"input_ids": t, "attention_mask": ones, "labels": t} for t in texts], seed=seed
    )
    attack = Recording()
    monitor = LeakageMonitor(
        attack,
        every_n_steps=every_n_steps,
        games=Games(canaries=data.canaries),
    )
    loader = DataLoader(data, batch_size=4, shuffle=False)
    fit_with(loader, monitor, root, still(), **settings)
    return monitor, data, attack


def test_canaries_in_the_batch_are_members_and_those_left_out_of_the_data_are_not(tmp_path):
    monitor, data, attack = audited(tmp_path)
    included = {tuple(t.tolist()) for t, i in marked(data) if i}
    left_out = {tuple(t.tolist()) for t, i in marked(data) if not i}
    batches = [{tuple(t) for t in b["input_ids"].tolist()} for b in DataLoader(data, batch_size=4)]
    holding = [step for step, batch in enumerate(batches) if batch & included]
    audits = [
        (step, {tuple(t) for t in own_rows(query)})
        for step, _, _, query in attack.seen
        if {tuple(t) for t in own_rows(query)} & left_out
    ]
    assert [step for step, _ in audits] == holding
    for step, asked in audits:
        members = asked & batches[step]
        assert members == batches[step] & included
        assert asked - members < left_out
        assert len(asked) == 2 * len(members)
    apart = ("recording", "audit/recording")  # the attack's own results, and those of canaries
    found = [line for line in lines(monitor) if line["attack"] in apart]
    assert sum(line["attack"] == "audit/recording" for line in found) == len(holding)
    assert monitor.latest["leakage/recording/auc"] == 1
    assert "audit/recording/auc" in monitor.metric_names()
    values = [x["metrics"]["auc"]["value"] for x in found if x["stage"] == "shared"]
    assert len(values) == len(batches) - 1 + len(holding)
    assert set(values) == {1.0}


def marked(data):
    return zip(data.canaries.token_ids, data.canaries.included.tolist(), strict=True)


def test_a_checkpoint_commits_to_the_canaries_and_refuses_others(tmp_path):
    monitor, data, _ = audited(tmp_path)
    state = monitor.state_dict()
    assert state["canaries"] == {"commitment": data.canaries.commitment}
    same, *_ = audited(tmp_path / "same")
    same.load_state_dict(state)
    other, *_ = audited(tmp_path / "other", seed=4)
    with pytest.raises(InclusionMismatch):
        other.load_state_dict(state)


def test_the_text_that_an_attack_is_calibrated_on_is_not_held_out():
    texts = [[1, 2, 3], [4, 5, 6]]
    text = PublicText(texts)
    attack = TrainedMembership(1, text)
    for held_out in (text, PublicText(texts)):
        with pytest.raises(ValueError, match="held_out= is the public text that 'trained_memb"):
            LeakageMonitor(attack, games=Games(held_out=held_out))
    LeakageMonitor(attack, games=Games(held_out=PublicText([[1, 2, 3], [4, 5, 7]])))
    LeakageMonitor(FCMembership(1), games=Games(held_out=text))


def test_canaries_that_nothing_is_asked_about_are_refused():
    data = with_canaries(random_token_loader(4).dataset, [
        {n: torch.arange(3, 15) for n in ("input_ids", "attention_mask", "labels")}
    ], seed=0)  # fmt: skip
    with pytest.raises(ValueError, match="membership attacks are asked for, and none is listed"):
        LeakageMonitor(Probe(), games=Games(canaries=data.canaries))
    with pytest.raises(ValueError, match="add 'shared' to stages"):
        LeakageMonitor(Recording(), stages=["local"], games=Games(canaries=data.canaries))
