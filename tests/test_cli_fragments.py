"""Each ready-made fragment, appended to a user's config and run for a few steps."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    FCMembership,
    FlatChat,
    PrefixInversion,
    SubspaceTexts,
)
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.cli.commands.fit import fit
from lightning_fedleak.defenses import DPSGD, Freeze, GradientNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.folders import TEXTS, save_tiny_causal_lm

ROOT = Path(__file__).parents[1]
FRAGMENTS = ROOT / "callbacks"

USERS_OWN = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture
def fitted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `fedleak fit` with fragments; gives the Trainer."""
    text, config = tmp_path / "private.txt", tmp_path / "config.yaml"
    text.write_text("\n".join(TEXTS))
    config.write_text(USERS_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedleak"])
    trainers: list[L.Trainer] = []
    original = L.Trainer.fit

    def keep(self: L.Trainer, *args, **kwargs) -> None:
        trainers.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(L.Trainer, "fit", keep)
    defaults = AlignedFlatChat.__init__.__wrapped__.__kwdefaults__
    assert defaults["calibration_tokens"] > 2_000
    monkeypatch.setitem(defaults, "calibration_tokens", 2_000)
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)

    def run(*fragments: str, more: tuple[str, ...] = ()) -> L.Trainer:
        configs = [ROOT / "examples" / "finetune.yaml", config]
        configs += [FRAGMENTS / f"{name}.yaml" for name in fragments]
        arguments = [a for path in configs for a in ("--config", str(path))]
        arguments += [f"--model.model={model}", f"--data.text={text}", "--data.batch_size=4"]
        arguments += ["--data.length=32", "--trainer.max_steps=3", "--trainer.accelerator=cpu"]
        arguments += ["--trainer.devices=1", "--trainer.enable_progress_bar=false"]
        fit(["fit", *arguments, *more])
        callback(trainers[-1], L.callbacks.LearningRateMonitor)  # the user's own is still there
        return trainers[-1]

    return run


def callback(trainer: L.Trainer, kind: type) -> L.Callback:
    [match] = [c for c in trainer.callbacks if isinstance(c, kind)]
    return match


def test_every_fragment_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    names = {path.stem.removeprefix("gate_") for path in FRAGMENTS.glob("*.yaml")}
    assert {name for name in names if f'"{name}"' not in here} == set()


def test_leakage_and_its_gate(fitted) -> None:
    trainer = fitted("leakage", "gate_leakage")
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert monitor.engine.selection.auto
    assert (gate.metric, gate.at_most) == ("leakage/worst/words", 0.5)
    assert 0 <= monitor.latest["leakage/worst/words"] <= 1


@pytest.mark.parametrize(
    ("name", "attacks", "certain", "gated", "at_most"),
    [
        (
            "word_leakage",
            [FlatChat, AlignedFlatChat],
            ("flatchat/exposed", "aligned_flatchat/exposed"),
            "aligned_flatchat/f1",
            0.5,
        ),
        (
            "membership",
            [FCMembership],
            [f"fc_membership/{metric}" for metric in ("auc", "accuracy", "advantage")],
            "fc_membership/auc",
            0.6,
        ),
    ],
)
def test_attacks_and_their_gate(fitted, name, attacks, certain, gated, at_most) -> None:
    trainer = fitted(name, f"gate_{name}")
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert [type(a) for a in monitor.attacks] == attacks
    assert monitor.failures == 0
    assert all(float(trainer.callback_metrics[f"leakage/{value}"]) == 1 for value in certain)
    assert 0 <= float(trainer.callback_metrics[f"leakage/{gated}"]) <= 1
    assert (gate.metric, gate.at_most, gate.action) == (f"leakage/{gated}", at_most, "stop")


@pytest.mark.slow
def test_inversion_and_its_gate(fitted) -> None:
    trainer = fitted("inversion", "gate_inversion")
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    [attack] = monitor.attacks
    assert isinstance(attack, PrefixInversion)
    assert (attack.layer, attack.budget_seconds, monitor.engine.options.texts) == (2, 2.0, 2)
    assert monitor.failures == 0
    assert 0 <= float(trainer.callback_metrics["leakage/prefix_inversion/token_accuracy"]) <= 1
    assert (gate.metric, gate.at_most) == ("leakage/prefix_inversion/token_accuracy", 0.5)


@pytest.mark.slow
def test_whole_texts_and_its_gate(fitted) -> None:
    small = ("--data.batch_size=1", "--data.length=6")
    trainer = fitted("whole_texts", "gate_whole_texts", more=small)
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    [attack] = monitor.attacks
    assert isinstance(attack, SubspaceTexts)
    assert (attack.budget_seconds, monitor.engine.options.texts) == (30.0, 8)
    assert monitor.failures == 0
    assert 0 <= float(trainer.callback_metrics["leakage/subspace_texts/token_accuracy"]) <= 1
    assert float(trainer.callback_metrics["leakage/subspace_texts/exposed"]) == 1
    assert (gate.metric, gate.at_most) == ("leakage/subspace_texts/token_accuracy", 0.5)


def test_memorization_needs_enough_texts(fitted) -> None:
    with pytest.raises(ValueError, match=r"pay for \d+ of 200 texts: settings"):
        fitted("memorization")


@pytest.mark.slow
def test_dp_sgd(fitted) -> None:
    pytest.importorskip("opacus")
    trainer = fitted("word_leakage", "dp_sgd", more=("--model.loss=sample_mean",))
    [defense] = trainer.strategy.defenses
    assert isinstance(defense, DPSGD)
    assert defense.releases == trainer.global_step == 3
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 8
    assert float(trainer.callback_metrics["privacy/delta"]) == pytest.approx(1e-5)


def test_defences_add_up(fitted) -> None:
    trainer = fitted("noise_gradients", "freeze_head_and_embeddings", "word_leakage")
    noise, freeze = trainer.strategy.defenses
    assert isinstance(trainer.strategy, DefendedStrategy)
    assert isinstance(noise, GradientNoise)
    assert isinstance(freeze, Freeze)
    assert noise.releases == trainer.global_step == 3
    for name in ("flatchat", "aligned_flatchat"):
        assert float(trainer.callback_metrics[f"leakage/{name}/exposed"]) == 0
        assert float(trainer.callback_metrics[f"leakage/{name}/f1"]) == 0


def test_a_config_has_rare_settings_of_the_monitor_in_a_group() -> None:
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(L.Callback, "callback")
    kind = "lightning_fedleak.callbacks.LeakageMonitor"
    attacks = [{"class_path": "lightning_fedleak.attacks.BagOfWords"}]
    settings = {"texts": 2, "client": "world", "utility": ["loss"]}
    keys = {"attacks": attacks, "settings": settings}
    config = parser.parse_object({"callback": {"class_path": kind, "init_args": keys}})
    monitor = parser.instantiate_classes(config).callback
    assert monitor.engine.options.texts == 2
    assert monitor.engine.options.utility == ("loss",)
    again = parser.parse_string(parser.dump(config))  # as the config.yaml of a run is read again
    assert again.callback.init_args.settings.client == "world"
    keys = {"attacks": attacks, "settings": {"memorization": {"max_overhead": 0.1}}}
    config = parser.parse_object({"callback": {"class_path": kind, "init_args": keys}})
    monitor = parser.instantiate_classes(config).callback
    assert monitor.engine.options.memorization.max_overhead == 0.1
