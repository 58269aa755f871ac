"""A run by the Trainer of ``lightning`` and of ``pytorch_lightning``: alike, or one sentence."""

from __future__ import annotations

import csv
import importlib
import json
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
from lightning_fedleak.cli.finetuning import TextDataModule
from lightning_fedleak.cli.finetuning.module import load_model
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.lightning_packages import PACKAGES, both, package_of, twin
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, save_tiny_causal_lm
from tests.helpers.settings import QUIET

OTHER = dict(zip(PACKAGES, reversed(PACKAGES), strict=True))


def lightning(package: str) -> ModuleType:
    return importlib.import_module(package)


def fine_tuning(package: str) -> type:
    """The module of ``cli.finetuning``, as one of a package."""

    class FineTuning(lightning(package).LightningModule):
        def __init__(self, model: str) -> None:
            super().__init__()
            self.model = load_model(model).train()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return FineTuning


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
        L = lightning(package)
        L.seed_everything(3, verbose=False)
        self.module = fine_tuning(package)(files.model)
        data = TextDataModule(files.text, files.model, batch_size=2, length=16)
        data.setup()
        self.monitor = LeakageMonitor(
            Probe(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared"))
        )
        self.gate = RiskGate("leakage/probe/recall", at_most=at_most)
        given = {"logger": L.loggers.CSVLogger(folder, flush_logs_every_n_steps=1)} | settings
        self.trainer = L.Trainer(
            devices=1,
            max_steps=3,
            log_every_n_steps=1,
            callbacks=[self.monitor, self.gate],
            default_root_dir=folder,
            **QUIET | given,
        )
        self.trainer.fit(self.module, data.train_dataloader(), ckpt_path=ckpt_path)

    def rows(self) -> list[dict[str, str]]:
        """What the CSV logger wrote, but for what the clock gave."""
        with (Path(self.trainer.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{n: v for n, v in row.items() if n != "monitor/seconds"} for row in rows]

    def lines(self) -> list[dict[str, Any]]:
        """``leakage.jsonl``, but for the name of the run and hashes."""
        text = (Path(self.trainer.log_dir) / "leakage.jsonl").read_text()
        of_this_run = {"run": "", "before": "", "hash": ""}
        return [json.loads(line) | of_this_run for line in text.splitlines()]

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

    # Each goes on from what the Trainer of the other has saved.
    resumed = [
        Run(p, files, tmp_path / f"{p} on", ckpt_path=path)
        for p, path in zip(PACKAGES, reversed(saved), strict=True)
    ]
    assert [run.trainer.global_step for run in resumed] == [3, 3]
    assert [run.monitor.looks for run in resumed] == [3, 3]
    assert_alike(*resumed)


@pytest.mark.parametrize("strategy", ["auto", "instance"])
def test_a_defended_strategy_is_of_the_trainers_package(strategy, files, tmp_path) -> None:
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
            f"of `{package}`: import both from the same package."
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_the_other_package_alone_knows_is_refused(package: str) -> None:
    registry = lightning(OTHER[package]).strategies.StrategyRegistry
    kind = lightning(OTHER[package]).strategies.DDPStrategy
    registry.register("only_there", kind, override=True)
    try:
        with pytest.raises(DefenseError, match="'only_there' is not supported"):
            lightning(package).Trainer(strategy=DefendedStrategy("only_there"), accelerator="cpu")
    finally:
        registry.remove("only_there")


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
    said = r"add_callback\(LeakageCallback\(trainer"
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
    )
    with pytest.raises(TypeError, match=said):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments, callbacks=[callback])
    with pytest.raises(TypeError, match=said):
        Fabric(accelerator="cpu", devices=1, callbacks=[callback]).setup(torch.nn.Linear(2, 2))
