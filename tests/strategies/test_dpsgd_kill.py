"""A fit under DPSGD is killed at ten random points: nothing is forgotten, nothing drawn twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_fedleak.defenses.accounting import TruncatedPoisson
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from tests.helpers.processes import one_process
from tests.strategies.dpsgd_lives import FACTORS, LIVES, NOISE, live
from tests.strategies.dpsgd_runs import BATCH, CLIP, N

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes"),
]


def test_killed_at_ten_random_points_it_forgets_no_release_and_repeats_no_noise(
    tmp_path: Path,
) -> None:
    said = one_process("tests.strategies.dpsgd_lives", tmp_path, LIVES, log=tmp_path / "log")
    lives = json.loads((tmp_path / "lives.json").read_text())
    releases = np.load(tmp_path / "releases.npy")

    assert len(lives) == LIVES == 10
    counted = 0
    for life in lives:
        assert life["killed"], said[-4000:]
        assert life["seen"] >= life["until"]
        assert life["seen"] <= life["ledger"] - counted <= life["seen"] + 1
        counted = life["ledger"]
    steps, draws = releases[:, 0], releases[:, 1:]
    assert len(set(steps.tolist())) < len(steps)  # kills undid steps, but not their releases

    scale = NOISE * 0.9 / BATCH
    assert np.std(draws) == pytest.approx(scale, rel=0.05)
    alike = np.corrcoef(draws)
    np.fill_diagonal(alike, 0.0)
    assert np.abs(alike).max() < 0.5

    last = live(tmp_path, None, max_steps=int(steps.max()) + 3)
    assert last.accountant.steps > counted
    assert last.accountant.history == ((NOISE, BATCH / N, last.accountant.steps),)
    epsilon = epsilon_of([(NOISE, BATCH / N, counted)], 1e-3, "rdp")
    assert last.privacy.epsilon >= epsilon > 0


def test_killed_a_run_of_truncated_batches_forgets_no_release(tmp_path: Path) -> None:
    output = one_process("tests.strategies.dpsgd_lives", tmp_path, 3, 9, log=tmp_path / "log")
    lives = json.loads((tmp_path / "lives.json").read_text())
    counted = 0
    for life in lives:
        assert life["killed"], output[-4000:]
        assert life["seen"] <= life["ledger"] - counted <= life["seen"] + 1
        counted = life["ledger"]
    assert [path.name for path in tmp_path.glob("ledger*")] == ["ledger.at-most-9-of-25"]
    steps = int(np.load(tmp_path / "releases.npy")[:, 0].max()) + 3
    last = live(tmp_path, None, most=9, max_steps=steps)
    assert last.accountant.steps > counted > 0
    cell = (NOISE, BATCH / N, last.accountant.steps)
    epsilon = epsilon_of([cell], 1e-3, "rdp", TruncatedPoisson(N + 1, 9))
    assert last.privacy.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert epsilon > epsilon_of([cell], 1e-3, "rdp")


def test_killed_a_planned_run_goes_on_with_its_plan_and_pays_for_each_noise(tmp_path: Path) -> None:
    output = one_process(
        "tests.strategies.dpsgd_lives", tmp_path, 4, 0, "planned", log=tmp_path / "log"
    )
    lives = json.loads((tmp_path / "lives.json").read_text())
    releases = np.load(tmp_path / "releases.npy")
    counted, numbers = 0, []
    for life in lives:
        assert life["killed"], output[-4000:]
        assert life["seen"] <= life["ledger"] - counted <= life["seen"] + 1
        numbers += range(counted, counted + life["seen"])
        counted = life["ledger"]
    epoch = N // BATCH
    expected = [FACTORS[number // epoch] for number in numbers]
    sizes = releases[:, 1:].std(axis=1) * BATCH / CLIP / NOISE
    np.testing.assert_allclose(sizes, expected, rtol=0.2)
    last = live(tmp_path, None, planned=True, max_epochs=int(releases[:, 0].max()) // epoch + 2)
    paid = [(sigma / NOISE, steps) for sigma, _, steps in last.accountant.history]
    assert last.accountant.steps > counted
    for (factor, steps), planned in zip(paid[:-1], FACTORS, strict=False):
        assert (factor, steps) == (pytest.approx(planned), epoch)
