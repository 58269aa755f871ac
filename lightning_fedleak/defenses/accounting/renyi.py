"""Renyi differential privacy of one release of the sampled Gaussian mechanism.

- Poisson sampling: Mironov, Talwar & Zhang 2019, as Opacus computes it.
- Batches of a fixed number without replacement (Zhu, Dong & Wang 2022), and truncated Poisson
  samples (Ganesh 2025), as ``fixed_batches`` says.

Orders are converted to (epsilon, delta) by Balle et al. 2020, Theorem 21.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
from scipy.special import logsumexp

from lightning_fedleak.defenses.accounting.fixed_batches import Floats as Floats  # handed on
from lightning_fedleak.defenses.accounting.fixed_batches import TruncatedPoisson as TruncatedPoisson
from lightning_fedleak.defenses.accounting.fixed_batches import rdp_without_replacement
from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.extras import install

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""

SamplingScheme = Literal["poisson", "without_replacement"] | TruncatedPoisson


def rdp_of(
    noise_multiplier: float, sample_rate: float, sampling: SamplingScheme = "poisson"
) -> Floats:
    """Return (len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only.

    Args:
        noise_multiplier: standard deviation of the noise over the largest distance between the sums
            of two neighbouring datasets.
        sample_rate: share of the examples in a batch, by chance or of a fixed number.
        sampling: how batches are drawn.
    """
    if sampling == "without_replacement" and sample_rate < 1:
        return rdp_without_replacement(noise_multiplier, sample_rate, ORDERS)
    if isinstance(sampling, TruncatedPoisson):
        less_one = np.asarray(ORDERS) - 1
        moments = [
            math.log(weight) + less_one * _rdp_of_poisson(sigma, sample_rate)
            for weight, sigma in sampling.parts(noise_multiplier, sample_rate)
        ]
        rdp: Floats = logsumexp(moments, axis=0) / less_one
        return rdp
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
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
