"""Promise 1: with any monitor on, training is bit-identical."""

import weakref

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks import EmbeddingDescent, PrefixInversion
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate, WatchSettings
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.defenses.activations import ActivationNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Kept, Probe, assert_same, fit, monitor_with
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import own_rng, tiny_gpt2

PUBLIC = [[(7 * i + 3 * j) % 94 + 3 for j in range(20)] for i in range(12)]


def watchers(*more):
    """Return gates and a monitor with attacks on words and members, and ``more``."""
    attacks = [
        FlatChat(PublicText(PUBLIC), shapes=((1, 8), (2, 8), (4, 12))),
        Probe(),
        FCMembership(layer=1, name="fc_1"),
        *more,
    ]
    options = {"stages": ("local", "shared"), "reveal": True, "texts": 1}
    monitor = monitor_with(attacks, every_n_steps=4, **options)
    gates = [
        RiskGate(name, at_most=1.0, strict=False)
        for name in ("leakage/flatchat/f1", "leakage/fc_1/auc")
    ]
    return [*gates, monitor], monitor


def adapted():
    config = LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, lora_dropout=0.1)
    with own_rng(1):
        model = get_peft_model(tiny_gpt2().train(), config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return CausalLMModule(model, optimizer="adamw")


def checkpointing():
    model = tiny_gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return CausalLMModule(model, optimizer="adamw")


def frozen():
    model = tiny_gpt2(tied=False).train()
    model.transformer.requires_grad_(False)
    return CausalLMModule(model, optimizer="adamw")


CASES = {
    "fp32 with dropout": ({}, None),
    "LoRA, accumulation, clipping and gradient checkpointing": (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        adapted,
    ),
    "bf16-true, frozen lower layers": ({"precision": "bf16-true"}, frozen),
    "gradient noise": (
        {"strategy": lambda: DefendedStrategy("auto", [GradientNoise(1.0, 0.01, seed=4)])},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_with_monitor_and_gate(case, tmp_path):
    settings, make = CASES[case]

    def run(name, callbacks):
        given = {key: value() if callable(value) else value for key, value in settings.items()}
        return fit(callbacks, tmp_path / name, module=make and make(), **given)

    plain = Kept.of(run("plain", []))
    attention = AttentionMembership(1, PublicText(PUBLIC * 6), batch=8)
    more = [attention] if case == "fp32 with dropout" else []
    callbacks, monitor = watchers(
        FCMembership(layer=2, granularity="full", name="fc_2"),
        PrefixInversion(1, None, language_model=False),
        EmbeddingDescent(0, steps=12, name="descent_0"),
        EmbeddingDescent(2, steps=6, sweeps=1, name="descent_2"),
        *more,
    )
    watched = run("watched", callbacks)
    assert_same(plain, watched)
    assert monitor.looks >= 2
    # Under noise FlatChat names the whole vocabulary, which is no result, at two of three looks.
    assert monitor.failures == (2 if "noise" in case else 0)
    if "noise" not in case:
        assert monitor.latest["leakage/fc_1/auc"] > 0.9
    if more:
        assert monitor.latest["leakage/attention_membership/auc"] > 0.6
    for name in ("prefix_inversion", "descent_0"):
        assert monitor.latest[f"leakage/{name}/token_accuracy"] > 0.4


@pytest.mark.parametrize("make", [lambda: None, checkpointing])
def test_inversion_neither_disturbs_noised_activations_nor_their_noise(make, tmp_path, monkeypatch):
    monkeypatch.setattr("os.urandom", lambda n: bytes(range(n)))

    def run(name, callbacks):
        strategy = DefendedStrategy("auto", defenses=[ActivationNoise(1, sigma=0.05)])
        return fit(callbacks, tmp_path / name, module=make(), strategy=strategy, n=16)

    plain = run("plain", [])
    attacks = [EmbeddingDescent(1, steps=20), PrefixInversion(1, None, language_model=False)]
    settings = WatchSettings(stages=("local", "shared"), texts=2)
    monitor = LeakageMonitor(attacks, every_n_steps=4, settings=settings)
    assert_same(plain, run("watched", [monitor]))
    assert monitor.failures == 0
    name = "embedding_descent/token_accuracy"
    assert monitor.latest[f"leakage_local/{name}"] > monitor.latest[f"leakage/{name}"]


def test_averaging_callbacks_do_not_disturb(tmp_path):
    averaging = getattr(lightning_callbacks, "WeightAveraging", None)  # absent before 2.6

    def run(*callbacks):
        return fit([*callbacks, *([averaging()] if averaging else [])], tmp_path)

    monitor = LeakageMonitor(Probe(), every_n_steps=1)
    assert_same(run(), run(monitor))
    assert monitor.failures == 0


def test_a_resumed_run_is_bit_identical_and_its_games_go_on(tmp_path):
    monitors = []

    def resumed(root, *, is_watched):
        """Train one epoch and save; then resume in a new Trainer with new callbacks."""

        def callbacks():
            listed, monitor = watchers() if is_watched else ([], None)
            monitors.append(monitor)
            return listed

        saver = ModelCheckpoint(root / "ckpt", save_last=True)
        fit([*callbacks(), saver], root / "first", enable_checkpointing=True)
        state = torch.load(root / "ckpt" / "last.ckpt", weights_only=True)  # nothing is pickled
        path = root / "ckpt" / "last.ckpt"
        return fit(callbacks(), root / "second", max_epochs=2, ckpt_path=path), state

    plain, _ = resumed(tmp_path / "plain", is_watched=False)
    watched, state = resumed(tmp_path / "watched", is_watched=True)
    assert_same(plain, watched)
    first, second = monitors[2:]
    assert (second.failures, second.last_step) == (0, 12)
    assert second.looks > first.looks > 2
    assert any(name.startswith("LeakageMonitor") for name in state["callbacks"])
    before, after = (m.engine.state_dict()["games of leakage/fc_1"] for m in monitors[2:])
    assert all(map(torch.equal, before, after))
    assert len(after) > len(before) > 0


@pytest.mark.slow
def test_a_compiled_model_is_watched_and_not_disturbed(tmp_path):
    """By all families at once: each fit compiles its model again."""

    def compiled():
        torch.compiler.reset()
        module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), optimizer="adamw")
        module.model = torch.compile(module.model, backend="aot_eager")
        return module

    plain = Kept.of(fit([], tmp_path / "plain", module=compiled(), n=12))
    attacks = [Probe(), PrefixInversion(1, None, language_model=False), FCMembership(layer=1)]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    assert_same(plain, fit([monitor], tmp_path / "watched", module=compiled(), n=12))
    assert (monitor.failures, monitor.looks) == (0, 3)
    assert monitor.latest["leakage/prefix_inversion/token_accuracy"] == 1
    assert monitor.latest["leakage/fc_membership/auc"] == 1


def test_between_looks_nothing_of_a_look_is_kept_alive(tmp_path):
    references, alive = [], []

    class Weak(Probe):
        def run(self, view, query=None):
            guess = super().run(view, query)
            references.extend(weakref.ref(x) for x in (view.gradients[-1], guess, guess.scores))
            return guess

    class Counts(L.Callback):
        def on_train_batch_start(self, *args):
            alive.append(sum(reference() is not None for reference in references))

    monitor = LeakageMonitor(
        Weak(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared", "aggregate"))
    )
    fit([Counts(), monitor], tmp_path)
    assert len(references) == 8 * 3  # without a defence one gradient stands for all three stages
    assert alive == [0] * 8
