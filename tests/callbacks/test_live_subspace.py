"""Attacks on row spaces behind defences: what noise hides is unknown or low, never certified."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak import DefendedStrategy, GradientNoise
from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.callbacks import LeakageMonitor
from tests.callbacks.runs import fit
from tests.engine.test_row_spaces import LOADER, LORA, model_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.settings import grouped


def defended(root: Path, attacks: Any, *defenses: Any, lora: Any = None, **settings: Any) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, **grouped(settings))
    module = CausalLMModule(model_of(lora=lora).train(), optimizer="adamw")
    strategy = DefendedStrategy("auto", [*defenses])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([monitor], root, module=module, loader=random_token_loader(**LOADER), strategy=strategy)
    return monitor


class Levels(SubspaceWords):
    """Keeps the standard deviation of the noise that it knows of."""

    needs_control = False  # its runs are counted

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.levels: list[float] = []

    def run(self, view: Any, query: Any = None) -> Any:
        self.levels.append(view.gradients[-1].noise_std)
        return super().run(view, query)


class Mute(GradientNoise):
    name = "mute"

    def noise_std(self, context: Any) -> float:
        raise RuntimeError("private")


class Second(GradientNoise):
    name = "second"


def test_attacks_know_the_noise_of_the_defences_or_are_unknown(tmp_path: Path) -> None:
    attack, stages = Levels(), ("local", "shared", "aggregate")
    noise = (GradientNoise(None, 3e-3), Second(1.0, 4e-3))
    defended(tmp_path / "a", attack, *noise, lora=LORA, stages=stages)
    assert attack.levels == pytest.approx([0.0, 5e-3, 5e-3] * 4)
    monitor = defended(
        tmp_path / "b", SubspaceWords(capacity_seconds=0), Mute(None, 1e-3), lora=LORA
    )
    assert (monitor.looks, monitor.failures) == (4, 3)  # a LoRA's first step has no result yet
