"""Renyi differential privacy of one release of the sampled Gaussian mechanism.

- Poisson sampling: Mironov, Talwar & Zhang 2019, as Opacus computes it.
- Batches of a fixed number without replacement: Wang, Balle & Kasiviswanathan 2019, Theorem 27.

Orders are converted to (epsilon, delta) by Balle et al. 2020, Theorem 21.
"""

from __future__ import annotations

import functools
import math
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.extras import install

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""

SamplingScheme = Literal["poisson", "without_replacement"]

LARGEST_ORDER = 128  # of the bound without replacement; larger orders take longer. Not tuned
LARGEST_EXPONENT = 700.0  # exp of more than 709 is no float64


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
        return _rdp_without_replacement(noise_multiplier, sample_rate)
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=256)
def _rdp_without_replacement(noise_multiplier: float, sample_rate: float) -> Floats:
    """Return the bound of Theorem 27 of Wang et al. 2019, between whole orders by convexity.

    No order costs more than without sampling; orders above :data:`LARGEST_ORDER` cost as much.
    """
    if noise_multiplier == 0:
        rdp = np.full(len(ORDERS), np.inf)
    else:
        largest = int(max(order for order in ORDERS if order <= LARGEST_ORDER))
        sums = _log_moments(noise_multiplier, sample_rate, largest)
        rdp = np.asarray(ORDERS) / 2 / noise_multiplier**2
        for i, order in enumerate(ORDERS):
            if order <= largest:
                low, part = int(order), order - int(order)
                high = sums[low + 1] if part else 0.0
                rdp[i] = min(rdp[i], ((1 - part) * sums[low] + part * high) / (order - 1))
    rdp.flags.writeable = False
    return rdp


def _log_moments(noise_multiplier: float, sample_rate: float, largest: int) -> list[float]:
    """Return the log of the bound on each whole order's moment up to the largest; 0 at 0 and 1."""
    logs = _log_differences(noise_multiplier, largest + 1)
    ratio = 1 / noise_multiplier**2
    second = ratio + math.log(-math.expm1(-ratio)) if ratio < LARGEST_EXPONENT else ratio
    terms = [min(math.log(4) + second, math.log(2) + ratio)]
    for j in range(3, largest + 1):
        mean = (logs[2 * (j // 2)] + logs[2 * ((j + 1) // 2)]) / 2
        terms.append(min(math.log(4) + mean, math.log(2) + j * (j - 1) / 2 * ratio))
    js = np.arange(2, largest + 1)
    bounds = np.asarray(terms) + js * math.log(sample_rate) - gammaln(js + 1)
    sums = [0.0, 0.0]
    for order in range(2, largest + 1):
        n = order - 1
        log_choose = math.lgamma(order + 1) - gammaln(order - js[:n] + 1)
        log_moment = float(logsumexp(np.append(bounds[:n] + log_choose, 0.0)))
        # Sampling never costs more than none.
        sums.append(min(log_moment, order * (order - 1) / 2 * ratio))
    return sums


def _log_differences(noise_multiplier: float, least: int) -> dict[int, float]:
    """Return the log of ``E_P[(Q / P - 1)^l]`` of two Gaussians one apart, for even l.

    The largest l is ``least`` or the next even number. The alternating sum cancels, so it is
    computed in decimal numbers with enough digits.
    """
    largest = least + least % 2
    digits = 60 + math.ceil(largest * (0.61 + math.log10(max(noise_multiplier, 1.0))))
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = digits, MAX_EMAX, MIN_EMIN
        ratio = 1 / Decimal(noise_multiplier) ** 2
        moments = [(ratio * (i * (i - 1)) / 2).exp() for i in range(largest + 1)]
        logs = {}
        for order in range(2, largest + 1, 2):
            signed = (
                (-1) ** i * math.comb(order, i) * m for i, m in enumerate(moments[: order + 1])
            )
            logs[order] = float(sum(signed, Decimal(0)).ln())
    return logs


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
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
