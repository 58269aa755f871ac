"""A run by the Trainer of ``lightning`` and of ``pytorch_lightning``: alike, or one sentence."""

from __future__ import annotations

import csv
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from lightning_fedleak import (
    DefendedStrategy,
    DefenseError,
    GradientNoise,
    LeakageMonitor,
    RiskGate,
)
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.lightning_packages import PACKAGES, both, package_of, twin
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, save_tiny_causal_lm

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "callbacks"
OTHER = dict(zip(PACKAGES, reversed(PACKAGES), strict=True))


def lightning(package: str) -> ModuleType:
    return importlib.import_module(package)


def finetuning(package: str) -> ModuleType:
    name = "lightning" if package == "lightning.pytorch" else package
    return importlib.import_module(f"lightning_fedleak.cli.finetuning.{name}")


@dataclass
class Files:
    model: str
    text: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    (folder / "private.txt").write_text("\n".join(TEXTS))
    return Files(str(save_tiny_causal_lm(folder / "model")), str(folder / "private.txt"))


class Run:
    """A fit by one package's Trainer, and what it left."""

    def __init__(
        self,
        package: str,
        files: Files,
        folder: Path,
        *,
        at_most: float = 1.0,
        ckpt_path: Any = None,
        **settings: Any,
    ) -> None:
        L, own = lightning(package), finetuning(package)
        L.seed_everything(3, verbose=False)
        self.module = own.CausalLMFineTuning(files.model, lr=1e-2)
        data = own.TextDataModule(files.text, files.model, batch_size=2, length=16)
        self.monitor = LeakageMonitor(
            Probe(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared"))
        )
        self.gate = RiskGate("leakage/probe/recall", at_most=at_most)
        given = {"logger": L.loggers.CSVLogger(folder, flush_logs_every_n_steps=1)} | settings
        self.trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=3,
            log_every_n_steps=1,
            callbacks=[self.monitor, self.gate],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            **given,
        )
        self.trainer.fit(self.module, data, ckpt_path=ckpt_path)

    def rows(self) -> list[dict[str, str]]:
        """What the CSV logger wrote, but for what the clock gave."""
        with (Path(self.trainer.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{n: v for n, v in row.items() if n != "monitor/seconds"} for row in rows]

    def lines(self) -> list[dict[str, Any]]:
        """``leakage.jsonl``, but for the name of the run."""
        text = (Path(self.trainer.log_dir) / "leakage.jsonl").read_text()
        return [{**json.loads(line), "run": ""} for line in text.splitlines()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.module.parameters()]


def assert_alike(first: Run, second: Run) -> None:
    assert package_of(first.trainer) != package_of(second.trainer)
    assert first.trainer.global_step == second.trainer.global_step
    assert first.rows() == second.rows()
    assert first.lines() == second.lines()
    assert all(map(torch.equal, first.weights(), second.weights()))


def test_a_gate_stops_and_both_go_on_from_its_checkpoint(files: Files, tmp_path: Path) -> None:
    stopped = [Run(p, files, tmp_path / p, at_most=0.0) for p in PACKAGES]
    assert stopped[0].trainer.global_step == 1
    assert stopped[0].monitor.latest["leakage/probe/recall"] > 0
    assert_alike(*stopped)
    saved = [run.gate.fired.checkpoint for run in stopped]
    found = [torch.load(path, weights_only=True) for path in saved]
    assert found[0]["callbacks"].keys() == found[1]["callbacks"].keys()
    assert {run.monitor.state_key for run in stopped} <= found[0]["callbacks"].keys()

    for package, run in zip(PACKAGES, stopped, strict=True):
        kind = finetuning(package).CausalLMFineTuning
        again = kind.load_from_checkpoint(run.gate.fired.checkpoint, model=files.model)
        assert again.lr == 1e-2
        assert all(map(torch.equal, again.parameters(), run.weights()))

    # Each goes on from what the Trainer of the other has saved.
    resumed = [
        Run(p, files, tmp_path / f"{p} on", ckpt_path=path)
        for p, path in zip(PACKAGES, reversed(saved), strict=True)
    ]
    assert [run.trainer.global_step for run in resumed] == [3, 3]
    assert [run.monitor.looks for run in resumed] == [3, 3]
    assert_alike(*resumed)


@pytest.mark.parametrize("strategy", ["auto", "instance"])
def test_a_defended_strategy_is_of_the_trainers_package(
    strategy: str, files: Files, tmp_path: Path
) -> None:
    runs = []
    for package in PACKAGES:
        single = lightning(package).strategies.SingleDeviceStrategy
        given = strategy if strategy == "auto" else single(device="cpu")
        defended = DefendedStrategy(given, [GradientNoise(clip=1.0, sigma=0.1, seed=0)])
        run = Run(package, files, tmp_path / package, strategy=defended)
        assert isinstance(run.trainer.strategy, single)
        assert not isinstance(run.trainer.strategy, twin_of_other(single))
        assert run.trainer.strategy.defenses[0].releases == 3
        runs.append(run)
    assert_alike(*runs)
    values = runs[0].monitor.latest
    assert values["leakage/probe/recall"] != values["leakage_local/probe/recall"]


def twin_of_other(kind: type) -> type:
    [other] = (k for k in both(f"strategies.{kind.__name__}") if k is not kind)
    return other


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["ddp", "ddp_spawn"])
def test_a_name_is_resolved_by_the_trainer(package: str, name: str) -> None:
    strategies = lightning(package).strategies
    defended = DefendedStrategy(name, [GradientNoise(clip=1.0, sigma=0.1)])
    assert not isinstance(defended, both("strategies.DDPStrategy"))
    trainer = lightning(package).Trainer(
        strategy=defended, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False
    )
    assert isinstance(trainer.strategy, strategies.DDPStrategy)
    assert not isinstance(trainer.strategy, twin_of_other(strategies.DDPStrategy))
    assert package_of(trainer.strategy.launcher) == package
    order = [kind.__module__ for kind in type(trainer.strategy).__mro__]
    own, foreign = (f"{p}.strategies.strategy" for p in (package, OTHER[package]))
    assert order.index(own) < order.index(foreign)  # no method of the other's comes first


CONFIG = """
trainer:
  callbacks:
    - class_path: {package}.callbacks.LearningRateMonitor
    - class_path: RiskGate
      init_args: {{metric: leakage/flatchat/f1, at_most: 1.0}}
  strategy:
    class_path: lightning_fedleak.strategies.DefendedStrategy
    init_args:
      strategy:
        class_path: {package}.strategies.SingleDeviceStrategy
        init_args: {{device: cpu}}
"""


def test_recipes_are_appended_to_a_lightning_cli(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    found = []
    for package in PACKAGES:
        own = tmp_path / f"{package}.yaml"
        own.write_text(CONFIG.format(package=package))
        recipes = [RECIPES / f"{name}.yaml" for name in ("word_leakage", "noise_gradients")]
        options = {
            "model.model": files.model,
            "data.text": files.text,
            "data.tokenizer": files.model,
            "data.batch_size": 2,
            "data.length": 16,
            "trainer.max_steps": 2,
            "trainer.accelerator": "cpu",
            "trainer.enable_progress_bar": False,
            "trainer.enable_model_summary": False,
            "trainer.enable_checkpointing": False,
        }
        arguments = ["fit", *(f"--config={path}" for path in (own, *recipes))]
        cli = importlib.import_module(f"{package}.cli").LightningCLI(
            finetuning(package).CausalLMFineTuning,
            finetuning(package).TextDataModule,
            seed_everything_default=0,
            save_config_callback=None,
            args=[*arguments, *(f"--{name}={value}" for name, value in options.items())],
        )
        trainer = cli.trainer
        assert package_of(trainer) == package_of(trainer.strategy) == package
        assert trainer.strategy.defenses[0].releases == trainer.global_step == 2
        monitor, gate = (
            next(c for c in trainer.callbacks if isinstance(c, kind))
            for kind in (LeakageMonitor, RiskGate)
        )
        assert monitor.failures == 0
        assert gate.fired is None
        assert 0 < monitor.latest["leakage/flatchat/f1"] < 1
        found.append(set(trainer.callback_metrics))
    assert found[0] == found[1]


# ---- two packages in one run ----------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_a_strategy_of_the_other_package_is_refused_in_one_sentence(package: str) -> None:
    strategies = lightning(OTHER[package]).strategies
    for inner in (strategies.SingleDeviceStrategy(device="cpu"), strategies.DDPStrategy()):
        defended = DefendedStrategy(inner)
        with pytest.raises(DefenseError) as refusal:
            lightning(package).Trainer(strategy=defended, accelerator="cpu", logger=False)
        assert str(refusal.value) == (
            f"DefendedStrategy({type(inner).__name__}) is of `{OTHER[package]}` and this Trainer "
            f"of `{package}`: import both from one of the two."
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_the_other_package_alone_knows_is_refused(package: str) -> None:
    registry = lightning(OTHER[package]).strategies.StrategyRegistry
    kind = lightning(OTHER[package]).strategies.DDPStrategy
    registry.register("only_there", kind, override=True)
    try:
        with pytest.raises(DefenseError, match=f"other package than .*`{package}`: import both"):
            lightning(package).Trainer(strategy=DefendedStrategy("only_there"), accelerator="cpu")
    finally:
        registry.remove("only_there")


@pytest.mark.parametrize("package", PACKAGES)
def test_data_of_the_other_package_is_refused_in_one_sentence(package: str, files: Files) -> None:
    module = finetuning(package).CausalLMFineTuning(files.model)
    data = finetuning(OTHER[package]).TextDataModule(files.text, files.model)
    trainer = lightning(package).Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError) as refusal:
        trainer.fit(module, datamodule=data)
    assert str(refusal.value) == (
        f"TextDataModule is of `{OTHER[package]}` and this Trainer of `{package}`: import both "
        "from one of the two."
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_of_the_other_package_is_lightnings_own_error(package: str, files: Files) -> None:
    module = finetuning(OTHER[package]).CausalLMFineTuning(files.model)
    trainer = lightning(package).Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer.fit(module)
    own = f"finetuning.{'pytorch_lightning.' * package.startswith('py')}CausalLMFineTuning"
    assert own in type(module).__doc__


# ---- which package something is of -----------------------------------------------------------


def test_what_comes_from_neither_package_is_said() -> None:
    class Own(lightning("pytorch_lightning").Trainer):
        pass

    assert package_of(Own) == "pytorch_lightning"
    assert twin("trainer.Trainer", Own) is lightning("pytorch_lightning").Trainer
    with pytest.raises(TypeError, match=r"neither lightning\.pytorch nor pytorch_lightning"):
        package_of(object())


@pytest.mark.parametrize(
    "made", [LeakageMonitor, lambda: RiskGate("leakage/worst/words", at_most=0.5)]
)
def test_other_trainers_are_refused_in_one_sentence(made: Any, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    callback = made()
    said = f"{type(callback).__name__} is a callback of Lightning's Trainer and does not work in "
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
    )
    with pytest.raises(TypeError, match=re.escape(f"{said}transformers.Trainer: ")):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments, callbacks=[callback])
    with pytest.raises(TypeError, match=re.escape(f"{said}Fabric: ")):
        Fabric(accelerator="cpu", devices=1, callbacks=[callback]).setup(torch.nn.Linear(2, 2))
