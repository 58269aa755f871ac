"""Noise and clip norms that change over a run, planned or by a quantile."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedleak.defenses import (
    DPSGD,
    ClipSettings,
    DefenseError,
    QuantileClip,
    ReleaseSettings,
    Schedule,
)
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Run, clipped, first, trainer

STEPS = 20


def run_of(defense: DPSGD, steps: int = STEPS) -> Run:
    root = Net()
    root._trainer = trainer(max_steps=steps, max_epochs=-1)
    return Run(defense, root)


def scheduled(noise: Any = None, clip: Any = None, **more: Any) -> DPSGD:
    settings = {"noise_multiplier": 1.0, "target_delta": 1e-3, "accountant": "rdp"} | more
    return DPSGD(
        CLIP,
        clip=ClipSettings(schedule=clip),
        release=ReleaseSettings(noise_schedule=noise),
        **settings,
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("linear", 0.1), np.linspace(1, 0.1, 10)),
        (Schedule("exponential", 0.25), np.geomspace(1, 0.25, 10)),
        ([1.0, 0.5, 2.0], [1.0, 0.5, 2.0]),
    ],
)
def test_noise_follows_its_plan_and_is_accounted_so(schedule: Any, expected: Any) -> None:
    defense = scheduled(schedule)
    run = run_of(defense)
    noises = []
    for _ in range(STEPS + 2):
        noises.append(defense.noise_multiplier_now)
        assert defense.noise_std(run.context) == pytest.approx(noises[-1] * CLIP / 8)
        run.step(first(3))
    plan = [expected[min(step * len(expected) // STEPS, len(expected) - 1)] for step in range(22)]
    np.testing.assert_allclose(noises, plan)
    alone = [(sigma, 0.2, plan.count(sigma)) for sigma in dict.fromkeys(plan)]
    assert defense.privacy.epsilon == pytest.approx(epsilon_of(alone, 1e-3, "rdp"), rel=1e-9)
    assert defense.settings()["noise_schedule"].startswith("1, ")


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_target_is_met_by_the_whole_plan(accountant: str) -> None:
    factors = [2.0, 1.0, 0.5]
    defense = scheduled(factors, noise_multiplier=None, target_epsilon=3.0, accountant=accountant)
    run = run_of(defense, 12)
    for left in range(11, -1, -1):
        run.step(first(3))
        assert run.root._trainer.should_stop == (left == 0)
    sigma = defense.noise_multiplier
    assert sigma is not None
    plan = [(sigma * factor, 0.2, 4) for factor in factors]
    epsilon = epsilon_of(plan, 1e-3, accountant)  # type: ignore[arg-type]
    assert 2.99 < epsilon <= 3.0
    assert defense.privacy.epsilon == pytest.approx(epsilon, rel=1e-6)


def test_the_noise_that_is_added_is_the_planned_one() -> None:
    defense = scheduled([1.0, 3.0])
    run = run_of(defense, 2)
    sizes = []
    for _ in range(2):
        run.backward(first(1))
        exact = clipped(run.one_by_one(first(1))).sum(0) / 8
        sizes.append(float((run.release() - exact).std()) * 8 / CLIP)
    assert sizes == pytest.approx([1.0, 3.0], rel=0.25)  # of 83 numbers


def test_the_clip_norm_follows_its_plan_at_no_cost() -> None:
    plan = [1.0, 0.5, 0.1]
    defense = scheduled(clip=plan, noise_multiplier=0.0)
    run = run_of(defense, 3)
    for factor in plan:
        rows = run.one_by_one(first(5))
        expected = clipped(rows, CLIP * factor).sum(0) / 8
        torch.testing.assert_close(run.step(first(5)), expected, rtol=1e-5, atol=1e-8)
    noised, constant = (scheduled(clip=c) for c in (plan, None))
    for defense in (noised, constant):
        run = run_of(defense, 3)
        for _ in range(3):
            run.step(first(3))
    assert noised.privacy.epsilon == constant.privacy.epsilon
    assert noised.noise_std(run.context) == pytest.approx(0.1 * constant.noise_std(run.context))


def test_a_resumed_run_goes_on_with_its_plan() -> None:
    first_half = scheduled([1.0, 0.5], clip=[1.0, 0.2])
    run = run_of(first_half, 4)
    run.step(first(3))
    run.step(first(3))
    again = scheduled([1.0, 0.5], clip=[1.0, 0.2])
    again.load_state_dict(first_half.state_dict())
    run = run_of(again, 400)
    assert again.noise_multiplier_now == 0.5
    assert again.noise_std(run.context) == pytest.approx(0.5 * 0.2 * CLIP / 8)
    other = scheduled([1.0, 0.9])
    with pytest.raises(DefenseError, match="go on with the same schedule"):
        other.load_state_dict(first_half.state_dict())


# ---- quantiles ----------------------------------------------------------------------------------


def following(z: float = 1.0, **more: Any) -> DPSGD:
    quantile = QuantileClip(**{"quantile": 0.5, "rate": 0.3, "noise": 2.0} | more)
    return DPSGD(
        CLIP,
        z,
        target_delta=1e-3,
        accountant="rdp",
        clip=ClipSettings(quantile=quantile),
        max_physical_batch_size=3,
    )


def test_the_norm_comes_to_the_quantile() -> None:
    defense = following(0.0)
    run = run_of(defense, 400)
    rows = run.one_by_one(first(8))
    for _ in range(300):
        run.step(first(8), lr=0.0)
    norms = rows.norm(dim=1).sort().values
    clip = defense._fit_step.clip.sensitivity
    assert float(norms[3]) * 0.95 <= clip <= float(norms[4]) * 1.05


def test_sum_and_count_together_cost_what_the_noise_multiplier_says() -> None:
    """The least squares of both releases over their sensitivities is 1 / z^2."""
    z, count = 1.0, 2.0
    defense = following(z, noise=count)
    run = run_of(defense)
    gradients, logs = [], []
    for _ in range(150):
        before = defense._fit_step.clip.sensitivity
        run.backward(first(2))
        exact = clipped(run.one_by_one(first(2)), before).sum(0) / 8
        halves = float(torch.where(run.one_by_one(first(2)).norm(dim=1) <= before, 0.5, -0.5).sum())
        gradients.append((run.release() - exact) * 8 / before)
        after = defense._fit_step.clip.sensitivity
        logs.append((-math.log(after / before) / 0.3 + 0.5 - 0.5) * 8 - halves)
    of_sum, of_count = float(torch.cat(gradients).std()), float(np.std(logs))
    assert of_sum == pytest.approx((z**-2 - (2 * count) ** -2) ** -0.5, rel=0.02)
    assert of_count == pytest.approx(count, rel=0.2)
    assert of_sum**-2 + (2 * of_count) ** -2 == pytest.approx(z**-2, rel=0.06)
    expected = epsilon_of([(z, 0.2, 150)], 1e-3, "rdp")
    assert defense.privacy.epsilon == pytest.approx(expected, rel=1e-9)


def test_one_sample_moves_the_count_by_a_half() -> None:
    counts = []
    for samples in (8, 9):
        run = run_of(following(0.0))
        run.backward(first(samples))
        counts.append(float(run.defense._fit_step.clipped(run.parameters, run.context).halves()))
    assert abs(counts[1] - counts[0]) == 0.5


def test_the_norm_of_a_quantile_goes_on_after_a_resume() -> None:
    defense = following()
    run = run_of(defense)
    run.step(first(4))
    clip = defense._fit_step.clip.sensitivity
    assert clip != CLIP
    again = following()
    again.load_state_dict(defense.state_dict())
    run_of(again)
    assert again._fit_step.clip.sensitivity == clip


BANDED = {"mechanism": "banded", "bands": 2}


def test_bad_factors_and_a_count_that_costs_too_much_are_refused() -> None:
    for bad in ([], "linear", [0.0], [math.inf], 0.5):
        with pytest.raises(DefenseError, match="noise_schedule"):
            ReleaseSettings(noise_schedule=bad)  # type: ignore[arg-type]
    with pytest.raises(DefenseError, match="end must be"):
        Schedule("linear", 0.0)
    with pytest.raises(DefenseError, match="form must be"):
        Schedule("cosine", 0.5)  # type: ignore[arg-type]
    with pytest.raises(DefenseError, match=r"QuantileClip\(noise=\) above 0.5"):
        run_of(following(1.0, noise=0.4))
    with pytest.raises(DefenseError, match="a schedule needs to know how many steps"):
        Run(scheduled([1.0, 0.5]))
