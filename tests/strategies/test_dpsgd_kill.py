"""A fit under DPSGD is killed at ten random points: nothing is forgotten, nothing drawn twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from tests.helpers.processes import one_process
from tests.strategies.dpsgd_lives import LIVES, NOISE, live
from tests.strategies.dpsgd_runs import BATCH, N

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
