"""Renyi DP of the sampled Gaussian mechanism, by Opacus, order by order.

Mironov, Talwar & Zhang 2019; converted to epsilon at a delta after Balle et al. 2020, Theorem 21.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from lightning_fedleak.defenses.base import DefenseError

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""


@functools.lru_cache(maxsize=1024)
def rdp_of(noise_multiplier: float, sample_rate: float) -> Floats:
    """(len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only."""
    check_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp: Floats
    if noise_multiplier == 0:
        rdp = np.full(len(ORDERS), np.inf)
    else:
        rdp = np.asarray(
            compute_rdp(
                q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(ORDERS)
            ),
            dtype=np.float64,
        )
        rdp = np.where(rdp >= 0, rdp, np.inf)
    rdp.flags.writeable = False
    return rdp


def epsilons_of_rdp(rdp: Floats, delta: float) -> Floats:
    """Epsilon by each order of :data:`ORDERS` (Balle et al. 2020, Theorem 21); not below 0."""
    return np.maximum(rdp + conversion(delta), 0.0)


def conversion(delta: float) -> Floats:
    """What is added to the Renyi DP of :data:`ORDERS` to get epsilon at ``delta``."""
    orders = np.asarray(ORDERS)
    added: Floats = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return added


def check_opacus() -> None:
    """Refuses with :class:`DefenseError` where Opacus is missing."""
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise DefenseError(
            "accounting for DP-SGD needs Opacus: pip install 'lightning-fedleak[dp]'"
        ) from error
