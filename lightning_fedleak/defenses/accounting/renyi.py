"""Renyi differential privacy of one release of the Poisson-sampled Gaussian mechanism.

It is that of Mironov, Talwar & Zhang 2019, as Opacus computes it. Orders are converted to (epsilon,
delta) by Balle et al. 2020, Theorem 21.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.extras import install

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""


@functools.lru_cache(maxsize=1024)
def rdp_of(noise_multiplier: float, sample_rate: float) -> Floats:
    """Return (len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only.

    Args:
        noise_multiplier: standard deviation of the noise over the largest distance between the sums
            of two neighbouring datasets.
        sample_rate: chance of each example to be in a batch.
    """
    check_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp

    computed = compute_rdp(
        q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(ORDERS)
    )
    rdp: Floats = np.where(computed >= 0, computed, np.inf)
    rdp.flags.writeable = False
    return rdp


def epsilons_of_rdp(rdp: Floats, delta: float) -> Floats:
    """Return epsilon by each of :data:`ORDERS` (Balle et al. 2020, Theorem 21), at least 0."""
    return np.maximum(rdp + conversion(delta), 0.0)


def deltas_of_rdp(rdp: Floats, epsilons: Floats) -> Floats:
    """Return delta at each epsilon by the best of :data:`ORDERS`, at most 1; the same theorem."""
    orders = np.asarray(ORDERS)
    logs = (orders - 1) * (rdp + np.log1p(-1 / orders) - epsilons[:, None]) - np.log(orders)
    deltas: Floats = np.exp(np.minimum(logs.min(1), 0.0))
    return deltas


def conversion(delta: float) -> Floats:
    """Return what is added to the Renyi DP of :data:`ORDERS` to get epsilon at ``delta``."""
    orders = np.asarray(ORDERS)
    terms: Floats = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return terms


def check_opacus() -> None:
    """Raise a :class:`DefenseError` where Opacus is missing."""
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise DefenseError(f"accounting for DP-SGD needs Opacus: {install('dp')}") from error
