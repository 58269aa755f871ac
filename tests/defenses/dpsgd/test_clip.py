"""Automatic clipping: sums against brute force, sensitivity, noise, account."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedleak.defenses import DPSGD, CanaryGradient
from tests.defenses.dpsgd.test_dpsgd import Run, first
from tests.defenses.dpsgd.test_logical import Pieces
from tests.helpers.dpsgd_settings import grouped

GAMMA = 0.01
FORMS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "fixed": ({"max_grad_norm": 0.4}, 0.4, None),
    "auto": ({"max_grad_norm": "auto"}, 1.0, GAMMA),
    "gamma": ({"max_grad_norm": "auto", "gamma": 0.5}, 1.0, 0.5),
}
"""Settings; to what norm they clip; gamma of automatic clipping."""


def brute(run: Run, batch: Any, name: str) -> Tensor:
    """(B, d) clipped gradients, each sample by itself, in float64."""
    _, clip, gamma = FORMS[name]
    gradients = run.one_by_one(batch).double()
    norm = gradients.norm(dim=1, keepdim=True)
    return gradients * (clip / norm.clamp(min=clip) if gamma is None else clip / (norm + gamma))


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("name", FORMS)
def test_clipped_sums_are_those_of_brute_force(name: str, most: int | None) -> None:
    defense = DPSGD(noise_multiplier=0.0, max_physical_batch_size=most, **grouped(**FORMS[name][0]))
    run, batch = Pieces(defense), first(12)
    batch[0] = batch[0] * torch.logspace(-3, 6, 12)[:, None]
    expected = brute(run, batch, name).sum(0) / 8
    result = run.step(batch).double()
    assert float((result - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("name", ["auto", "gamma"])
def test_noise_is_accounted_as_one_gaussian_of_the_noise_multiplier(name: str) -> None:
    settings, clip, _ = FORMS[name]
    sigma = 1.7
    defense = DPSGD(
        noise_multiplier=sigma, target_delta=1e-3, accountant="rdp", **grouped(**settings)
    )
    run = Run(defense)
    noise = torch.cat([8 * run.step(first(0), lr=1e-3).double() for _ in range(250)])
    assert float(noise.std()) == pytest.approx(sigma * clip, rel=6 / math.sqrt(2 * len(noise)))
    assert defense.accountant.history == ((sigma, 0.2, 250),)
    assert defense.measured_noise_multiplier == pytest.approx(sigma, rel=0.35)
    assert defense.noise_std(run.context) == pytest.approx(sigma * clip / 8, rel=1e-9)


def test_a_canary_is_clipped_automatically_too() -> None:
    run, batch = Run(DPSGD("auto", noise_multiplier=0.0)), first(5)
    local = run.one_by_one(batch)
    run.backward(batch)
    canary = CanaryGradient(torch.randn(5, 2, 30, generator=torch.Generator().manual_seed(1)))
    result = run.defense.on_canary(canary, run.parameters, run.context).samples
    joint = torch.cat([local, 5 * canary.samples[:, 0]], 1)
    expected = 5 * canary.samples[:, 0] / (joint.norm(dim=1, keepdim=True) + GAMMA) / 8
    torch.testing.assert_close(result[:, 0], expected, rtol=1e-4, atol=1e-8)
