"""DLG, TAG and LAMP while a model is trained: nothing is disturbed."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor
from lightning_fedleak.labs.gradient_matching import GradientMatching
from tests.attacks.row_space.models import VOCABULARY
from tests.callbacks.runs import assert_same, fit
from tests.engine.test_row_spaces import model_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

pytestmark = pytest.mark.slow
NAMES = ("dlg", "tag", "lamp")


def module() -> CausalLMModule:
    return CausalLMModule(model_of().train(), optimizer="adamw")


def loader(length: int = 10):
    return random_token_loader(n=4, batch_size=1, length=length, vocab=VOCABULARY)


def monitor() -> LeakageMonitor:
    descent = {"steps": 3, "budget_seconds": None}
    attacks = [
        GradientMatching(1, 10, "dlg", **descent),
        GradientMatching(1, 10, "tag", **descent),
        GradientMatching(1, 10, "lamp", starts=2, swaps=4, **descent),
    ]
    return LeakageMonitor(attacks, every_n_steps=2)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}], ids=["fp32", "bf16"])
def test_training_is_bit_identical(settings: dict[str, str], tmp_path: Path) -> None:
    watching = monitor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit([], tmp_path / "a", module=module(), loader=loader(), **settings)
        watched = fit([watching], tmp_path / "b", module=module(), loader=loader(), **settings)
    assert_same(plain, watched)
    assert watching.looks >= 2
    for name in NAMES:
        assert 0 <= watching.latest[f"leakage/{name}/token_accuracy"] < 1
        assert watching.latest[f"leakage/{name}/finished"] == 1
        assert f"leakage/{name}/certified" not in watching.latest


def test_dpsgd_is_measured(tmp_path: Path) -> None:
    watching = monitor()
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=0.5)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([watching], tmp_path, module=module(), loader=loader(), strategy=strategy)
    for name in NAMES:
        accuracy = watching.latest[f"leakage/{name}/token_accuracy"]
        assert math.isnan(accuracy) or accuracy < 0.5


def test_a_short_text_is_read_while_training(tmp_path: Path) -> None:
    """Its two tokens that count, of 300 that each could be."""
    attack = GradientMatching(1, 3, "lamp", steps=120, starts=5, swaps=0, seed=1)
    watching = LeakageMonitor(attack, every_n_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([watching], tmp_path, module=module(), loader=loader(3))
    assert watching.failures == 0
    assert watching.latest["leakage/lamp/exact_sentences"] == 1
