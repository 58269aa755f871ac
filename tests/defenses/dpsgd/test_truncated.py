"""Batches of one shape: truncated Poisson samples, filled up with rows that do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses import (
    DPSGD,
    CanaryGradient,
    ClipSettings,
    DefenseError,
    QuantileClip,
    ReleaseSettings,
)
from lightning_fedleak.defenses.accounting import TruncatedPoisson
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.dpsgd.poisson import Draws, PoissonBatchSampler
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, clipped, data, first, trainer
from tests.defenses.dpsgd.test_logical import Pieces

N, MOST = 40, 14


def truncated(most: int | None = None, **settings: Any) -> DPSGD:
    fixed = ReleaseSettings(truncated_batch_size=MOST, **settings.pop("release", {}))
    settings = {"noise_multiplier": 0.0, "target_delta": 1e-3} | settings
    return DPSGD(CLIP, release=fixed, max_physical_batch_size=most, **settings)


def emptied() -> list[Tensor]:
    return [value[:0] for value in data().tensors]


# ---- the law ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_of_those_that_are_drawn_each_is_left_out_as_often(rate: float) -> None:
    steps, n, most = 4000, 20, 6
    whole = PoissonBatchSampler(range(n), rate, 1, Draws(b"e" * 32))
    cut = PoissonBatchSampler(range(n), rate, 1, Draws(b"e" * 32, most=most))
    taken, drawn = np.zeros((steps, n), bool), np.zeros((steps, n), bool)
    for step in range(steps):
        taken[step, cut.draw(step)], drawn[step, whole.draw(step)] = True, True
        assert cut.draw(step) == sorted(cut.draw(step))
    np.testing.assert_array_equal(taken.sum(1), np.minimum(drawn.sum(1), most))
    assert not (taken & ~drawn).any()
    expected = (drawn * (np.minimum(1, most / np.maximum(drawn.sum(1), 1)))[:, None]).sum(0)
    assert (
        scipy.stats.chisquare(taken.sum(0), expected / expected.sum() * taken.sum()).pvalue > 1e-4
    )
    pairs = np.array([(taken[:, a] & taken[:, b]).sum() for a in range(n) for b in range(a)])
    assert scipy.stats.chisquare(pairs).pvalue > 1e-4  # no two of them together more often


# ---- releases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 5, MOST])
@pytest.mark.parametrize("form", ["auto", "per_sample", "ghost"])
@pytest.mark.parametrize("samples", [0, 1, 6, MOST])
def test_rows_that_fill_up_do_not_count(samples: int, form: Any, most: int | None) -> None:
    run = Pieces(truncated(most, clip=ClipSettings(form=form)))
    batch = first(samples)
    rows = run.one_by_one(batch) if samples else torch.zeros(1, 83)
    run.backward(batch)
    torch.testing.assert_close(run.update(), rows.mean(0), rtol=1e-5, atol=1e-8)
    expected = clipped(rows.double()).sum(0) / 8
    torch.testing.assert_close(run.release().double(), expected, rtol=1e-5, atol=1e-8)
    assert sum(run.sizes) == MOST
    assert run.sizes == {None: [14], 5: [5, 5, 4], MOST: [14]}[most]


@pytest.mark.parametrize("settings", [{"per_layer": True}, {"gamma": 0.01}])
def test_all_ways_to_clip_leave_them_out(settings: dict[str, Any]) -> None:
    updates = []
    for fixed in (MOST, None):
        norm: Any = "auto" if "gamma" in settings else CLIP
        release = ReleaseSettings(truncated_batch_size=fixed)
        run = Pieces(DPSGD(norm, 0.0, clip=ClipSettings(**settings), release=release))
        run.backward(first(6))
        updates.append(run.release())
    torch.testing.assert_close(*updates, rtol=1e-5, atol=1e-8)


def test_an_example_that_takes_a_place_moves_the_sum_by_twice_the_clip() -> None:
    batch = first(MOST)
    other = [value.clone() for value in batch]
    other[0][3] *= -1e3
    a, b = (Pieces(truncated()).step(rows) for rows in (batch, other))
    assert CLIP < float(8 * (a - b).norm()) <= 2 * CLIP * (1 + 1e-6)


def test_the_noise_is_the_same_and_an_empty_batch_is_a_release() -> None:
    run = Pieces(truncated(noise_multiplier=2.0))
    noise = torch.cat([run.step(emptied(), lr=0.0) for _ in range(40)])
    assert float(noise.std()) * 8 / CLIP == pytest.approx(2.0, rel=0.05)
    assert run.sizes == [MOST] * 40


def test_the_count_below_the_clip_norm_is_of_real_rows() -> None:
    halves = []
    for samples in (6, 7, 0):
        clip = ClipSettings(quantile=QuantileClip(noise=2.0))
        run = Pieces(truncated(5, clip=clip))
        run.backward(first(samples))
        norms = run.one_by_one(first(samples)).norm(dim=1) if samples else torch.zeros(0)
        expected = float(torch.where(norms <= CLIP, 0.5, -0.5).sum())
        step = run.defense._fit_step
        assert float(step.clipped(run.parameters, run.context).halves()) == expected
        halves.append(expected)
    assert abs(halves[0] - halves[1]) == 0.5


@pytest.mark.parametrize("most", [None, 5])
def test_a_canary_of_the_real_rows_is_clipped_with_them(most: int | None) -> None:
    released = []
    for defense in (truncated(most), DPSGD(CLIP, 0.0, max_physical_batch_size=most)):
        run = Pieces(defense)
        run.backward(first(6))
        canary = CanaryGradient(torch.ones(6, 2, 3) / 6)
        released.append(defense.on_canary(canary, run.parameters, run.context).samples)
    torch.testing.assert_close(*released, rtol=1e-5, atol=1e-8)


# ---- the account --------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_releases_are_accounted_as_truncated(accountant: Any) -> None:
    run = Pieces(truncated(noise_multiplier=1.0, accountant=accountant))
    for _ in range(3):
        run.step(first(6))
    cells = [(1.0, 0.2, 3)]
    expected = epsilon_of(cells, 1e-3, accountant, TruncatedPoisson(N + 1, MOST))
    assert run.defense.privacy.epsilon == pytest.approx(expected, rel=1e-9)
    assert expected > 1.001 * epsilon_of(cells, 1e-3, accountant)
    assert run.defense.settings()["truncated_batch_size"] == MOST
    assert dict(run.defense.curve())  # whoever leaves rows out by coins compares with it
    assert run.defense.group_privacy(2).epsilon == pytest.approx(2 * expected, rel=1e-9)


def test_a_target_is_met_and_a_filter_keeps_its_budget() -> None:
    root = Net()
    root._trainer = trainer(max_steps=12, max_epochs=-1)
    schedule = {"noise_schedule": [1.0, 0.7]}
    planned = truncated(
        noise_multiplier=None, target_epsilon=3.0, accountant="rdp", release=schedule
    )
    Pieces(planned, root=root)
    sigma = planned.noise_multiplier
    assert sigma is not None
    scheme = TruncatedPoisson(N + 1, MOST)
    spent = epsilon_of([(sigma, 0.2, 6), (0.7 * sigma, 0.2, 6)], 1e-3, "rdp", scheme)
    assert 2.99 < spent <= 3.0
    filtered = truncated(noise_multiplier=1.0, target_epsilon=4.0, accountant="filter")
    run = Pieces(filtered)
    while run.defense._budget.affords_another():
        run.step(first(6))
    assert epsilon_of([(1.0, 0.2, filtered.releases)], 1e-3, "rdp", scheme) <= 4.0
    plain = DPSGD(CLIP, 1.0, 4.0, 1e-3, "filter")
    assert Pieces(plain).defense._budget.accountant.allows(1.0, 0.2, filtered.releases + 1)


def test_a_resumed_run_draws_as_before_or_is_refused(tmp_path: Path) -> None:
    before = truncated(noise_multiplier=1.0, accountant="rdp")
    Pieces(before).step(first(6))
    state = before.state_dict()
    waiting = truncated(noise_multiplier=1.0, accountant="rdp")
    waiting.load_state_dict(state)
    assert waiting.privacy.epsilon == before.privacy.epsilon  # also before it knows the data
    again = Pieces(waiting)
    again.step(first(6))
    assert again.defense.accountant.steps == 2
    for settings in ({}, {"release": ReleaseSettings(truncated_batch_size=MOST + 1)}):
        other = DPSGD(CLIP, 1.0, target_delta=1e-3, accountant="rdp", **settings)
        other.load_state_dict(state)
        with pytest.raises(DefenseError, match="drawn by"):
            Pieces(other)
        late = Pieces(DPSGD(CLIP, 1.0, target_delta=1e-3, accountant="rdp", **settings))
        late.defense.load_state_dict(state)
        with pytest.raises(DefenseError, match="drawn by"):
            late.defense.on_train_start(late.context)
    plain = DPSGD(CLIP, 1.0, target_delta=1e-3, accountant="rdp")
    Pieces(plain).step(first(6))
    mixed = truncated(noise_multiplier=1.0, accountant="rdp")
    mixed.load_state_dict(plain.state_dict())
    with pytest.raises(DefenseError, match="drawn by"):
        Pieces(mixed)


def test_a_ledger_is_of_one_way_to_draw(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    settings = {"noise_multiplier": 1.0, "accountant": "rdp", "ledger": ledger}
    Pieces(truncated(**settings)).step(first(6))
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.at-most-14-of-41"]
    again = Pieces(truncated(**settings))
    assert again.defense.accountant.steps == 1
    assert again.defense.privacy.epsilon > 0
    with pytest.raises(DefenseError, match="batches drawn otherwise"):
        Pieces(DPSGD(CLIP, 1.0, ledger=ledger))
    fewer = DataLoader(Subset(data(), range(20)), batch_size=4)
    with pytest.raises(DefenseError, match="batches drawn otherwise"):
        Pieces(truncated(**settings), loader=fewer)


def test_fewer_rows_than_are_expected_are_refused() -> None:
    with pytest.raises(DefenseError, match="six times its root: 25"):
        Pieces(DPSGD(CLIP, 1.0, release=ReleaseSettings(truncated_batch_size=7)))
    with pytest.raises(DefenseError, match="truncated_batch_size"):
        ReleaseSettings(truncated_batch_size=0)
