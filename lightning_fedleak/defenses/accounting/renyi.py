"""Renyi differential privacy (RDP) of one release of the sampled Gaussian mechanism.

- Poisson sampling: Mironov, Talwar & Zhang 2019, computed by Opacus.
- Batches of a fixed size, drawn without replacement: Zhu, Dong & Wang 2022, see below.

The RDP of an order is converted to (epsilon, delta) by Balle et al. 2020, Theorem 21.

**Without replacement.** Neighbouring datasets differ in one example that is replaced. Zhu, Dong &
Wang 2022, Theorem 11, bounds one release by two pairs of distributions. Let P and Q be two
Gaussians whose means differ by the sensitivity, and q the share of the examples in a batch. The
first pair is ``(1 - q) Q + q P`` against Q, for likelihood ratios of at least 1. The second is P
against ``(1 - q) P + q Q``, for ratios below 1. Over several releases neither pair dominates the
other. Together they are the privacy curve of one pair (A, B), which composes: its privacy losses
above 0 are of the first pair, its losses below 0 of the second, and the rest of the mass is at 0.

By symmetry one function gives all losses. With sigma the noise multiplier, for x above the mid
1/2 of the two means::

    g(x) = log(1 - q + q exp((x - 1/2) / sigma^2)),  x > 1/2

Under A a loss g(x) has the density ``phi(x) exp(g(x))``, and a loss -g(x) the density ``phi(x)`` of
N(0, sigma^2). Only one of the two pairs, composed with itself, would be a lower bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.extras import require_package

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""The Renyi orders at which divergences are computed."""

MAX_NODES = 1 << 17  # limit of an integral's nodes; above it the RDP without sampling is used
NODES = 8  # Gauss-Legendre nodes in a panel, which is at most sigma wide. Not tuned
TAIL = 12  # standard deviations after the last peak where the integral ends; the rest is 1e-32


SamplingScheme = Literal["poisson", "without_replacement"]


def rdp_of(
    noise_multiplier: float, sample_rate: float, sampling: SamplingScheme = "poisson"
) -> Floats:
    """Return (len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only.

    Args:
        noise_multiplier: The standard deviation of the noise over the largest distance between the
            sums of two neighbouring datasets.
        sample_rate: The share of the examples in a batch: on average, or of a fixed-size batch.
        sampling: The sampling scheme.
    """
    if sampling == "without_replacement" and sample_rate < 1:
        return rdp_without_replacement(noise_multiplier, sample_rate, ORDERS)
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
    """Return the Renyi DP (len(ORDERS),) of one release under Poisson sampling; read-only."""
    rdp = np.array([_rdp_at(order, noise_multiplier, sample_rate) for order in ORDERS])
    rdp.flags.writeable = False
    return rdp


@functools.lru_cache(maxsize=1 << 16)
def _rdp_at(order: float, noise_multiplier: float, sample_rate: float) -> float:
    """Return the Renyi DP of one release under Poisson sampling at one order."""
    check_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp = float(
        compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=order)
    )
    return rdp if rdp >= 0 else math.inf


def min_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return the minimum of :func:`epsilons_of_rdp` for releases under Poisson sampling.

    A bisection computes about a tenth of the orders, because epsilon falls and then rises with the
    order: (order - 1) epsilon is convex in the order. For the Renyi DP this is Corollary 2 of van
    Erven & Harremoes 2014; for the conversion it follows from the second derivative,
    1 / (order - 1) - 1 / order. If an epsilon is infinite, all orders are computed.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release.
        delta: The delta, in (0, 1).
    """
    events, terms = list(history), conversion_terms(delta)

    @functools.cache
    def epsilon_at(index: int) -> float:
        rdp = sum(count * _rdp_at(ORDERS[index], sigma, q) for sigma, q, count in events)
        return float(rdp + terms[index])

    low, high = 0, len(ORDERS) - 1
    while low < high:
        mid = (low + high) // 2
        if not math.isfinite(epsilon_at(mid)) or not math.isfinite(epsilon_at(mid + 1)):
            return max(0.0, min(map(epsilon_at, range(len(ORDERS)))))
        low, high = (low, mid) if epsilon_at(mid) <= epsilon_at(mid + 1) else (mid + 1, high)
    return max(0.0, epsilon_at(low))


def epsilons_of_rdp(rdp: Floats, delta: float) -> Floats:
    """Return the epsilon (len(ORDERS),) of each order, by Balle et al. 2020, Theorem 21."""
    return np.maximum(rdp + conversion_terms(delta), 0.0)


def deltas_of_rdp(rdp: Floats, epsilons: Floats) -> Floats:
    """Return the smallest delta over all orders for each epsilon, by the same theorem."""
    orders = np.asarray(ORDERS)
    logs = (orders - 1) * (rdp + np.log1p(-1 / orders) - epsilons[:, None]) - np.log(orders)
    deltas: Floats = np.exp(np.minimum(logs.min(1), 0.0))
    return deltas


def conversion_terms(delta: float) -> Floats:
    """Return the terms (len(ORDERS),) that are added to the Renyi DP for epsilon at ``delta``."""
    orders = np.asarray(ORDERS)
    terms: Floats = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return terms


def check_opacus() -> None:
    """Raise a :class:`DefenseError` if Opacus is missing."""
    with require_package("dp", "accounting for DP-SGD needs Opacus", DefenseError):
        import opacus.accountants  # noqa: F401


@functools.lru_cache(maxsize=256)
def rdp_without_replacement(
    noise_multiplier: float, sample_rate: float, renyi_orders: tuple[float, ...]
) -> Floats:
    """Return the Renyi DP (K,) of one release, of A against B, at K orders; read-only.

    The integral is computed by Gauss-Legendre quadrature in panels. The RDP without sampling is an
    upper bound too.

    Args:
        noise_multiplier: Sigma: the standard deviation of the noise over the largest distance
            between the sums of two neighbouring datasets.
        sample_rate: The sample rate q, below 1.
        renyi_orders: The orders, above 1, in ascending order.
    """
    orders = np.asarray(renyi_orders)
    rdp = orders / 2 / noise_multiplier**2 if noise_multiplier else np.full(len(orders), np.inf)
    width = min(noise_multiplier, noise_multiplier**2)
    ends = NODES * np.ceil((orders + TAIL * noise_multiplier) / width) if width else orders * np.inf
    usable = np.flatnonzero(ends <= MAX_NODES)
    if len(usable):
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        panels = int(ends[usable[-1]]) // NODES
        x = 0.5 + width * np.add.outer(np.arange(panels), (nodes + 1) / 2).ravel()
        scale = width / 2 / noise_multiplier / math.sqrt(2 * math.pi)
        base = np.log(np.tile(weights, panels) * scale) - (x / noise_multiplier) ** 2 / 2
        tilt = (x - 0.5) / noise_multiplier**2
        loss = np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + tilt)
        for i in usable:
            order, domain = orders[i], slice(int(ends[i]))
            # Integrate the moment minus 1, because all its terms are positive:
            # phi (exp(order g) + exp((1 - order) g) - exp(g) - 1).
            terms = base[domain] + order * loss[domain]
            for power in (order - 1, order):
                terms = terms + np.log(-np.expm1(-power * loss[domain]))
            rdp[i] = min(rdp[i], np.logaddexp(0, logsumexp(terms)) / (order - 1))
    rdp.flags.writeable = False
    return rdp
