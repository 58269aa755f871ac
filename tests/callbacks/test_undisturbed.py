"""Promise 1: with any monitor on, training is bit-identical."""

import weakref

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedleak.attacks import EmbeddingDescent, PrefixInversion, TokenRelaxation
from lightning_fedleak.attacks.membership.attention import AttentionMembership, AttentionSettings
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Kept, Probe, assert_same, fit, monitor_with
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2

PUBLIC = [[(7 * i + 3 * j) % 94 + 3 for j in range(20)] for i in range(12)]


def watchers(**settings):
    flatchat = FlatChat(PublicText(PUBLIC), shapes=((1, 8), (2, 8), (4, 12)))
    monitor = LeakageMonitor(
        [flatchat, Probe()], every_n_steps=1, stages=("local", "shared", "aggregate"), **settings
    )
    gate = RiskGate(
        "leakage/flatchat/f1", at_most=1.0, strict=False
    )  # with LoRA the head is frozen
    return [gate, monitor], monitor


def games(**settings):
    """Membership games at every layer of the tiny model, beside a word attack."""
    attacks = [
        FCMembership(layer=0, name="fc_0"),
        FCMembership(layer=1, name="fc_1"),
        FCMembership(layer=2, granularity="full", name="fc_2"),
        AttentionMembership(
            1,
            PublicText(PUBLIC * 6),
            batch=8,
            attention=AttentionSettings(calibration_tokens=600),
        ),
        Probe(),
    ]
    monitor = monitor_with(attacks, every_n_steps=1, stages=("local", "shared"), **settings)
    return [RiskGate("leakage/fc_1/auc", at_most=1.0), monitor], monitor


def inversions(**settings):
    """Every inversion attack, at every layer of the tiny model, beside a word attack."""
    attacks = [
        PrefixInversion(1, None, language_model=False),
        EmbeddingDescent(0, steps=30, name="descent_0"),
        EmbeddingDescent(2, steps=6, sweeps=1, name="descent_2"),
        TokenRelaxation(1, steps=3),
        Probe(),
    ]
    monitor = LeakageMonitor(
        attacks,
        every_n_steps=4,
        stages=("local", "shared"),
        reveal=True,
        settings=MonitorSettings(texts=2),
        **settings,
    )
    return [RiskGate("leakage/prefix_inversion/token_accuracy", at_most=1.0), monitor], monitor


def lora():
    from peft import LoraConfig, get_peft_model

    L = LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, lora_dropout=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return CausalLMModule(get_peft_model(tiny_gpt2().train(), L), optimizer="adamw")


def checkpointed():
    model = tiny_gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return CausalLMModule(model, optimizer="adamw")


CASES = {
    "fp32 with dropout": ({}, None),
    "bf16-mixed": ({"precision": "bf16-mixed"}, None),
    "bf16-true": ({"precision": "bf16-true"}, None),
    "accumulation": ({"accumulate_grad_batches": 2}, None),
    "clipping": ({"gradient_clip_val": 0.05}, None),
    "LoRA": ({}, lora),
    "gradient checkpointing": ({}, checkpointed),
}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """Runs without callbacks: each kind of module and settings is run once."""
    runs = {}

    def plain(make=None, **settings):
        key = make, *sorted(settings.items())
        if key not in runs:
            root = tmp_path_factory.mktemp("plain")
            runs[key] = Kept.of(fit([], root, module=make and make(), **settings))
        return runs[key]

    return plain


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_with_monitor_and_gate(case, plain_run, tmp_path):
    settings, make = CASES[case]
    plain = plain_run(make, **settings)
    callbacks, monitor = watchers()
    watched = fit(callbacks, tmp_path / "watched", module=make and make(), **settings)
    assert_same(plain, watched)
    assert monitor.looks == watched.global_step
    assert monitor.failures == 0


@pytest.mark.parametrize("case", CASES)
def test_membership_games_do_not_disturb_either(case, plain_run, tmp_path):
    settings, make = CASES[case]
    plain = plain_run(make, **settings)
    callbacks, monitor = games()
    watched = fit(callbacks, tmp_path / "watched", module=make and make(), **settings)
    assert_same(plain, watched)
    assert monitor.looks == watched.global_step
    assert monitor.failures == 0
    for name in ("fc_1", "fc_2"):
        assert monitor.latest[f"leakage/{name}/auc"] > 0.9
    assert monitor.latest["leakage/attention_membership/auc"] > 0.6


@pytest.mark.parametrize("case", CASES)
def test_inversion_attacks_do_not_disturb_either(case, plain_run, tmp_path):
    settings, make = CASES[case]
    plain = plain_run(make, **settings)
    callbacks, monitor = inversions()
    watched = fit(callbacks, tmp_path / "watched", module=make and make(), **settings)
    assert_same(plain, watched)
    assert monitor.looks == (1 if case == "accumulation" else 2)
    assert monitor.failures == 0
    prefix, *descents = monitor.attacks[:4]
    settings = [prefix.settings, *(attack.descent for attack in descents)]
    assert all(one.autocast is None for one in settings)
    for name in ("prefix_inversion", "descent_0"):
        assert monitor.latest[f"leakage/{name}/token_accuracy"] > 0.4


def reentrant():
    model = tiny_gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return CausalLMModule(model, optimizer="adamw")


def test_inversion_on_a_reentrant_checkpoint_does_not_disturb(plain_run, tmp_path):
    plain = plain_run(reentrant)
    callbacks, monitor = inversions()
    assert_same(plain, fit(callbacks, tmp_path / "watched", module=reentrant()))
    assert monitor.failures == 0
    assert monitor.latest["leakage/descent_0/token_accuracy"] > 0.4


@pytest.mark.parametrize("make", [lambda: None, checkpointed, reentrant])
def test_inversion_neither_disturbs_noised_activations_nor_their_noise(make, tmp_path, monkeypatch):
    monkeypatch.setattr("os.urandom", lambda n: bytes(range(n)))

    def strategy():
        return DefendedStrategy("auto", defenses=[ActivationNoise(1, sigma=0.05)])

    plain = fit([], tmp_path / "plain", module=make(), strategy=strategy())
    attacks = [EmbeddingDescent(1, steps=20), PrefixInversion(1, None, language_model=False)]
    monitor = LeakageMonitor(
        attacks, every_n_steps=4, stages=("local", "shared"), settings=MonitorSettings(texts=2)
    )
    watched = fit([monitor], tmp_path / "watched", module=make(), strategy=strategy())
    assert_same(plain, watched)
    assert monitor.failures == 0
    local, shared = (
        monitor.latest[f"{stage}/embedding_descent/token_accuracy"]
        for stage in ("leakage_local", "leakage")
    )
    assert local > shared


def test_games_on_a_reentrant_checkpoint_do_not_disturb(plain_run, tmp_path):
    plain = plain_run(reentrant)
    callbacks, monitor = games()
    assert_same(plain, fit(callbacks, tmp_path / "watched", module=reentrant()))
    assert monitor.latest["leakage/fc_1/auc"] == 1


def test_games_on_frozen_lower_layers_do_not_disturb(tmp_path):
    def frozen():
        model = tiny_gpt2(tied=False).train()
        model.transformer.requires_grad_(False)
        return CausalLMModule(model, optimizer="adamw")

    plain = fit([], tmp_path / "plain", module=frozen())
    callbacks, monitor = games()
    assert_same(plain, fit(callbacks, tmp_path / "watched", module=frozen()))
    assert monitor.latest["leakage/fc_1/auc"] == 1
    assert monitor.failures == 0


def test_local_steps_do_not_disturb(plain_run, tmp_path):
    plain = plain_run()
    monitor = LeakageMonitor(Probe(), every_n_steps=2, local_steps=2)
    assert_same(plain, fit([monitor], tmp_path / "watched"))
    assert monitor.looks == 4


def test_games_of_a_defended_run_do_not_disturb_nor_replay_its_noise(tmp_path):
    def strategy():
        return DefendedStrategy("auto", defenses=[GradientNoise(clip=1.0, sigma=0.01, seed=4)])

    plain = fit([], tmp_path / "plain", strategy=strategy())
    callbacks, monitor = games()
    assert_same(plain, fit(callbacks, tmp_path / "watched", strategy=strategy()))
    assert monitor.failures == 0


def resumed(callbacks_of, root):
    """One epoch, saved; then a second one resumed in a new Trainer with new callbacks."""
    saver = ModelCheckpoint(root / "ckpt", save_last=True)
    fit([*callbacks_of(), saver], root / "first", enable_checkpointing=True)
    callbacks = callbacks_of()
    return fit(callbacks, root / "second", max_epochs=2, ckpt_path=root / "ckpt" / "last.ckpt")


@pytest.fixture(scope="module")
def plain_resumed(tmp_path_factory):
    return Kept.of(resumed(list, tmp_path_factory.mktemp("resumed")))


def test_resume_is_bit_identical_and_goes_on_counting(plain_resumed, tmp_path):
    monitors = []

    def watching():
        callbacks, monitor = watchers()
        monitors.append(monitor)
        return callbacks

    assert_same(plain_resumed, resumed(watching, tmp_path / "watched"))
    first, second = monitors
    assert (first.looks, second.looks, second.last_step) == (8, 16, 15)


def test_games_resume_bit_identically_and_go_on_with_their_window(plain_resumed, tmp_path):
    monitors = []

    def watching():
        callbacks, monitor = games()
        monitors.append(monitor)
        return callbacks

    assert_same(plain_resumed, resumed(watching, tmp_path / "watched"))
    first, second = monitors
    saved = first.state_dict()["ledger"]["kinds"]["leakage/fc_1"]["games"]
    final = second.state_dict()["ledger"]["kinds"]["leakage/fc_1"]["games"]
    assert len(saved) == 7 * 8
    assert torch.equal(final[: len(saved)], saved)
    assert len(final) > len(saved)
    assert final[:, 0].unique().tolist() == list(range(len(final) // 8))


def test_inversion_resumes_bit_identically_and_draws_the_same_texts(plain_resumed, tmp_path):

    def watching():
        return inversions()[0]

    watched = resumed(watching, tmp_path / "watched")
    assert_same(plain_resumed, watched)
    [monitor] = [c for c in watched.callbacks if isinstance(c, LeakageMonitor)]
    assert (monitor.looks, monitor.failures, monitor.last_step) == (4, 0, 12)


def test_lora_gradients_can_be_watched_by_name(plain_run, tmp_path):
    name = "model.base_model.model.transformer.h.0.attn.c_attn.lora_B.default.weight"
    plain = plain_run(lora)
    probe = Probe(k=3, role=name)
    monitor = LeakageMonitor(probe, every_n_steps=3)
    assert_same(plain, fit([monitor], tmp_path / "watched", module=lora()))
    assert [step for step, *_ in probe.seen] == [0, 3, 6]


def test_checkpoint_loads_with_weights_only(tmp_path):
    callbacks, _ = watchers()
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit([*callbacks, saver], tmp_path, enable_checkpointing=True)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert any(key.startswith("LeakageMonitor[") for key in state["callbacks"])


def compiled():
    module = CausalLMModule(tiny_gpt2(dropout=0.0, layers=1).train(), optimizer="adamw")
    module.model = torch.compile(module.model, backend="aot_eager")
    return module


@pytest.mark.slow
def test_a_compiled_model_is_watched_and_not_disturbed(plain_run, tmp_path):
    """By all families at once: each fit compiles its model anew."""
    plain = plain_run(compiled, n=12)
    probe = Probe()
    attacks = [probe, PrefixInversion(1, None, language_model=False), FCMembership(layer=1)]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    watched = fit([monitor], tmp_path / "watched", module=compiled(), n=12)
    assert_same(plain, watched)
    assert monitor.failures == 0
    assert len(probe.at("shared")) == len(probe.at("local")) == 3
    assert monitor.latest["leakage/prefix_inversion/token_accuracy"] == 1
    assert monitor.latest["leakage/fc_membership/auc"] == 1


def test_between_looks_nothing_of_a_look_is_kept_alive(tmp_path):
    alive = []

    class Weak(Probe):
        def run(self, view, query=None):
            guess = super().run(view, query)
            alive.extend(weakref.ref(x) for x in (view.gradients[-1], guess, guess.scores))
            return guess

    class After(L.Callback):
        def on_train_batch_start(self, *args):
            kept.append(sum(r() is not None for r in alive))

    kept = []
    stages = ("local", "shared", "aggregate")
    monitor = LeakageMonitor(Weak(), every_n_steps=1, stages=stages)
    fit([After(), monitor], tmp_path)
    assert len(alive) == 8 * 5
    assert kept == [0] * 8


@pytest.mark.skipif(
    not hasattr(of_lightning, "WeightAveraging"),
    reason="this version of lightning has no WeightAveraging",
)
def test_a_model_that_is_watched_can_be_copied_by_an_averaging_callback(tmp_path):
    def averaged(*callbacks):
        return fit([*callbacks, of_lightning.WeightAveraging()], tmp_path)

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    assert_same(averaged(), averaged(monitor))
    assert monitor.failures == 0
