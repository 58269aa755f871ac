"""DLG, TAG, LAMP and FILM's beam while a model is trained: nothing is disturbed."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from lightning_fedleak import (
    DPSGD,
    BeamFromWords,
    DefendedStrategy,
    GradientMatching,
    GradientNoise,
    LeakageMonitor,
)
from lightning_fedleak.threats import ThreatModelError
from tests.attacks.row_space.models import VOCABULARY, bert
from tests.callbacks.runs import assert_same, fit
from tests.callbacks.test_live_subspace import LORA, module
from tests.helpers.lightning_modules import random_token_loader

NAMES = ("dlg", "tag", "lamp", "beam_from_words")


def loader(length: int = 10):
    return random_token_loader(n=4, batch_size=1, length=length, vocab=VOCABULARY)


def monitor(length: int = 10, **settings: object) -> LeakageMonitor:
    descent = {"steps": 3, "budget_seconds": None}
    attacks = [
        GradientMatching.dlg(1, length, **descent),
        GradientMatching.tag(1, length, **descent),
        GradientMatching.lamp(1, length, starts=2, swaps=4, swap_every=2, **descent),
        BeamFromWords(length, moves=4, budget_seconds=None),
    ]
    return LeakageMonitor(attacks, every_n_steps=2, **settings)


CASES = {
    "whole": (dict, None),
    "lora": (dict, LORA),
    "bf16-mixed": (lambda: {"precision": "bf16-mixed"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical(case: str, tmp_path: Path) -> None:
    settings, lora = CASES[case]
    watching = monitor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit([], tmp_path / "a", module=module(lora=lora), loader=loader(), **settings())
        seen = fit(
            [watching], tmp_path / "b", module=module(lora=lora), loader=loader(), **settings()
        )
    assert_same(plain, seen)
    assert watching.looks >= 2
    for name in NAMES[:3]:
        assert 0 <= watching.latest[f"leakage/{name}/token_accuracy"] < 1
        assert watching.latest[f"leakage/{name}/finished"] == 1
        assert f"leakage/{name}/certified" not in watching.latest
    assert watching.latest["leakage/beam_from_words/exposed"] == 1


def test_every_stage_is_read_behind_a_defence(tmp_path: Path) -> None:
    watching = monitor(stages=("local", "shared", "aggregate"))
    strategy = DefendedStrategy("auto", [GradientNoise(None, 1.0, seed=3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([watching], tmp_path, module=module(), loader=loader(), strategy=strategy)
    for stage in ("leakage", "leakage_local", "leakage_aggregate"):
        for name in NAMES:
            assert watching.latest[f"{stage}/{name}/token_accuracy"] < 0.5


def test_dpsgd_is_measured(tmp_path: Path) -> None:
    watching = monitor()
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=0.5)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([watching], tmp_path, module=module(), loader=loader(), strategy=strategy)
    for name in NAMES:
        found = watching.latest[f"leakage/{name}/token_accuracy"]
        assert math.isnan(found) or found < 0.5


def test_a_short_text_is_read_while_training(tmp_path: Path) -> None:
    """Its two tokens that count, of 300 that each could be."""
    attack = GradientMatching.lamp(1, 3, steps=120, starts=5, swaps=0, seed=1)
    watching = LeakageMonitor(attack, every_n_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([watching], tmp_path, module=module(), loader=loader(3))
    assert watching.failures == 0
    assert watching.latest["leakage/lamp/token_accuracy"] == 1
    assert watching.latest["leakage/lamp/exact_sentences"] == 1


def test_models_that_cannot_be_matched_are_refused_at_setup(tmp_path: Path) -> None:
    with pytest.raises(ThreatModelError, match="Remove the attack"):
        fit(
            [LeakageMonitor(GradientMatching(1, 10), every_n_steps=1)],
            tmp_path,
            module=module(bert),
            loader=loader(),
        )
