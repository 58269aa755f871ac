"""Each ready-made fragment, appended to a user's config and run for a few steps."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fedleak.attacks import AlignedFlatChat, FCMembership
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
DEFENSE = """
trainer:
  strategy:
    class_path: lightning_fedleak.strategies.DefendedStrategy
    init_args:
      defenses+:
        - class_path: lightning_fedleak.defenses.{kind}
          init_args: {settings}
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

    def run(*fragments: tuple[str, ...]) -> L.Trainer:
        """Each fragment comes with the options that change it."""
        arguments = [f"--config={path}" for path in (ROOT / "examples" / "finetune.yaml", config)]
        for name, *options in fragments:
            arguments += [f"--config={FRAGMENTS / f'{name}.yaml'}", *options]
        arguments += [f"--model.model={model}", f"--data.text={text}", "--data.batch_size=4"]
        arguments += ["--data.length=32", "--trainer.max_steps=3", "--trainer.accelerator=cpu"]
        arguments += ["--trainer.devices=1", "--trainer.enable_progress_bar=false"]
        fit(["fit", *arguments])
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
    trainer = fitted(("leakage",), ("gate_leakage",))
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert monitor.engine.selection.auto
    assert (gate.metric, gate.at_most) == ("leakage/worst/words", 0.5)
    assert 0 <= monitor.latest["leakage/worst/words"] <= 1


def test_attacks_and_a_metric_of_the_users_own(fitted) -> None:
    """As the recipes' comments have it: other attacks and another number, a line each."""
    attacks = "[{class_path: lightning_fedleak.attacks.FCMembership, init_args: {layer: 1}}]"
    metric = "leakage/fc_membership/auc"
    trainer = fitted(
        ("leakage", f"--trainer.callbacks.attacks={attacks}"),
        ("gate_leakage", f"--trainer.callbacks.metric={metric}", "--trainer.callbacks.at_most=0.6"),
    )
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert [type(a) for a in monitor.attacks] == [FCMembership]
    assert monitor.failures == 0
    assert float(trainer.callback_metrics[metric]) == 1
    assert (gate.metric, gate.at_most, gate.action) == (metric, 0.6, "stop")


def test_memorization_needs_enough_texts(fitted) -> None:
    with pytest.raises(ValueError, match=r"allow \d+ of \d+ texts: 20 rows are"):
        fitted(("memorization",))


@pytest.mark.slow
def test_dp_sgd(fitted) -> None:
    pytest.importorskip("opacus")
    trainer = fitted(("leakage",), ("dp_sgd", "--model.loss=sample_mean"))
    [defense] = trainer.strategy.defenses
    assert isinstance(defense, DPSGD)
    assert defense.releases == trainer.global_step == 3
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 8
    assert float(trainer.callback_metrics["privacy/delta"]) == pytest.approx(1e-5)


def test_defences_add_up(fitted, tmp_path: Path) -> None:
    """Lines of the user's own, as docs/defend.md has them, for each defence."""
    kinds = {"GradientNoise": "{clip: 1.0, sigma: 0.001}", "Freeze": "{part: head+embeddings}"}
    for kind, settings in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(DEFENSE.format(kind=kind, settings=settings))
    attacks = ", ".join(
        f"{{class_path: lightning_fedleak.attacks.{kind}, init_args: {{public_text: sampled}}}}"
        for kind in ("FlatChat", "AlignedFlatChat")
    )
    leakage = "leakage", f"--trainer.callbacks.attacks=[{attacks}]"
    trainer = fitted(*((str(tmp_path / kind),) for kind in kinds), leakage)
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
