"""Batches of a fixed number: pairs of laws, and their composition, against computations of them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.stats import norm

from lightning_fedleak.defenses.accounting import Accountant, RenyiFilter
from lightning_fedleak.defenses.accounting.accounting import (
    ORDERS,
    epsilon_of,
    noise_multiplier_for,
    rdp_of,
)

pytest.importorskip("opacus")

FIXED = "without_replacement"
DELTA = 1e-5
CELLS = [(3.0, 0.01, 25), (1.0, 0.1, 100)]


def composed(
    sigma: float, rate: float, rounds: int, *, up: bool, width: float = 2e-4
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return losses and masses of all rounds, by FFT of a mesh of one pair made of two.

    Losses are rounded up, so that every delta is an upper bound, or down. They are read off
    cells of the outcome, whose masses are differences of normal distribution functions.
    """
    ends = np.linspace(-10 * sigma, 1 + 10 * sigma, 400_001)
    p, q = np.diff(norm.cdf(ends, 1, sigma)), np.diff(norm.cdf(ends, 0, sigma))
    first, second = (1 - rate) * q + rate * p, (1 - rate) * p + rate * q
    seen = (p > 0) & (q > 0)
    p, q, first, second = p[seen], q[seen], first[seen], second[seen]
    above = first > q
    masses = np.concatenate([first[above], p[~above]])
    losses = np.log(np.concatenate([(first / q)[above], (p / second)[~above]]))
    return summed(masses, losses, rounds, up=up, width=width)


def summed(
    masses: NDArray[np.float64], losses: NDArray[np.float64], rounds: int, *, up: bool, width: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rounded = np.ceil if up else np.floor
    places = rounded(losses / width).astype(int)
    size = 1 << 19
    mesh = np.bincount(places % size, masses, size)
    mesh[0] += max(1 - mesh.sum(), 0.0)  # the rest is of loss 0
    sums = np.maximum(irfft(rfft(mesh) ** rounds, size), 0.0)
    steps = np.arange(size)
    return width * np.where(steps < size // 2, steps, steps - size), sums


def epsilon_at(losses: NDArray[np.float64], masses: NDArray[np.float64]) -> float:
    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        above = losses > middle
        delta = -(masses[above] * np.expm1(middle - losses[above])).sum()
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return high


@pytest.mark.parametrize(("sigma", "rate", "rounds"), CELLS)
def test_epsilon_is_that_of_a_mesh_of_the_pair(sigma: float, rate: float, rounds: int) -> None:
    low, high = (epsilon_at(*composed(sigma, rate, rounds, up=up)) for up in (False, True))
    found = epsilon_of([(sigma, rate, rounds)], DELTA, "prv", FIXED)
    assert low <= found <= 1.006 * high
    assert (low + high) / 2 == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"), [(1.0, 0.1, 2.0), (0.6, 0.3, 5.5), (8, 0.01, 32)]
)
def test_renyi_divergence_is_the_pairs(sigma: float, rate: float, order: float) -> None:
    mp = pytest.importorskip("mpmath")
    with mp.workdps(40):

        def terms(x: float) -> float:
            p, q = (mp.npdf(x, mean, sigma) for mean in (1, 0))
            first, second = (1 - rate) * q + rate * p, (1 - rate) * p + rate * q
            return first**order * q ** (1 - order) if p > q else p**order * second ** (1 - order)

        rest = (1 - mp.mpf(rate)) * (2 * mp.ncdf(0.5 / sigma) - 1)
        places = [*mp.linspace(0.5 - 12 * sigma, 0.5, 9), *mp.linspace(0.5, order + 12 * sigma, 33)]
        moment = mp.quad(terms, places) + rest
        expected = float(mp.log(moment) / (order - 1))
    assert rdp_of(sigma, rate, FIXED)[ORDERS.index(order)] == pytest.approx(expected, rel=1e-9)


def test_accountants_targets_and_filters_use_the_same_account() -> None:
    sigma, rate, rounds = CELLS[1]
    account = Accountant("prv", sampling=FIXED)
    account.step(sigma, rate, rounds)
    assert account.epsilon(DELTA) == epsilon_of([CELLS[1]], DELTA, "prv", FIXED)
    for kind in ("prv", "rdp"):
        noise = noise_multiplier_for(3.0, DELTA, rate, rounds, kind, FIXED)
        assert epsilon_of([(noise, rate, rounds)], DELTA, kind, FIXED) == pytest.approx(3, abs=1e-3)
    budget = RenyiFilter(3.0, DELTA, sampling=FIXED)
    budget.begin(noise, rate)
    assert budget.allows(noise, rate, rounds - 1)
    assert not budget.allows(noise, rate, rounds + 1)
