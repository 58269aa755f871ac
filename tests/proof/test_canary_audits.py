"""Whole fits under DPSGD, audited by canary texts; the long form: ``one_run_audit.py --texts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.defenses.dp_sgd_games import Refutations, refutations
from lightning_fedleak.callbacks import CanaryScorer
from lightning_fedleak.cli.finetuning.module import PadRight
from lightning_fedleak.defenses import DPSGD, noise
from lightning_fedleak.defenses.noise import NoiseGauge
from lightning_fedleak.evaluation.auditing import audit_canaries
from lightning_fedleak.evaluation.canaries import new_token_canaries, with_canaries
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.models import tiny_llama
from tests.helpers.settings import QUIET
from tests.strategies.dpsgd_runs import CausalLM

pytestmark = pytest.mark.slow

CANARIES, DELTA = 100, 1e-3


def audited(audits: int, folder: Path, sigma: float = 1.0) -> tuple[Refutations, float]:
    """Refutations of the accounted epsilon, and the mean bound over it."""
    bounds = []
    for seed in range(audits):
        model = tiny_llama(tied=True)
        texts = new_token_canaries(model, CANARIES)
        train = with_canaries([torch.arange(5, 8) + i for i in range(10)], texts, seed=seed)
        scorer = CanaryScorer(train.canaries)
        defense = DPSGD(0.1, noise_multiplier=sigma, target_delta=DELTA)
        L.Trainer(
            max_steps=1,
            strategy=DefendedStrategy("auto", [defense]),
            callbacks=[scorer],
            default_root_dir=folder,
            **QUIET,
        ).fit(CausalLM(model), DataLoader(train, len(train), collate_fn=PadRight(0)))
        audit = audit_canaries(train.canaries, scorer.scores(), delta=DELTA, claim="gaussian")
        bounds.append(audit.epsilon)
        epsilon = defense.accountant.epsilon(DELTA)
    return refutations(bounds, epsilon), sum(bounds) / len(bounds) / epsilon


def test_no_more_audits_by_canary_texts_than_allowed_exceed_epsilon(tmp_path: Path) -> None:
    count, power = audited(6, tmp_path)
    assert count.audits == 6
    assert count.p_value > 0.01
    assert power >= 0.1


def test_an_eighth_of_the_noise_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise._fill

    def little(block: torch.Tensor, generator: Any) -> None:
        right(block, generator)
        block.div_(8)

    monkeypatch.setattr(noise, "_fill", little)
    monkeypatch.setattr(NoiseGauge, "measured", lambda self: None)
    count, _ = audited(3, tmp_path)
    assert count.refuted >= 2
    assert count.p_value < 0.01
