"""Renyi differential privacy of one release of the sampled Gaussian mechanism.

- Poisson sampling: Mironov, Talwar & Zhang 2019, as Opacus computes it.
- Batches of a fixed number without replacement: Zhu, Dong & Wang 2022, as said below.

Orders are converted to (epsilon, delta) by Balle et al. 2020, Theorem 21.

**Without replacement.** Neighbours differ by one example put in another's place. Zhu, Dong & Wang
2022, Theorem 11, bounds one release by two pairs of distributions. With P and Q two Gaussians one
sensitivity apart, and q the share of the examples in a batch, they are ``(1 - q) Q + q P`` against
Q for a likelihood ratio of at least 1, and P against ``(1 - q) P + q Q`` below. Neither dominates
the other over several releases. Both together are the privacy curve of one pair (A, B), which
composes: the losses above 0 are of the first pair, those below 0 of the second, and the rest of the
mass is at 0.

By symmetry one function gives all of it, for x beyond the middle of the two Gaussians::

    g(x) = log(1 - q + q exp((x - 1/2) / sigma^2)),  x > 1/2

Under A a loss g(x) has the density ``phi(x) exp(g(x))``, and a loss -g(x) the density ``phi(x)`` of
N(0, sigma^2). One pair alone, composed with itself, is a lower bound of the whole.
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
from lightning_fedleak.extras import install

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""

MAX_NODES = 1 << 17  # nodes of an integral; an order that needs more costs as without sampling
NODES = 8  # of Gauss and Legendre in a panel, which is at most sigma wide. Not tuned
TAIL = 12  # standard deviations beyond the last peak where the integral ends; the rest is 1e-32


SamplingScheme = Literal["poisson", "without_replacement"]


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
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
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


def least_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return the least of :func:`epsilons_of_rdp` for releases under Poisson sampling.

    It reads a tenth of the orders. Epsilons fall and then rise with the order: times (order - 1)
    they are convex in it, the Renyi DP by Corollary 2 of van Erven & Harremoes 2014, and the
    conversion by its second derivative, 1 / (order - 1) - 1 / order. All orders are read where
    one that is asked about is infinite.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release.
        delta: The delta, in (0, 1).
    """
    events, terms = list(history), conversion(delta)

    @functools.cache
    def read(place: int) -> float:
        rdp = sum(count * _rdp_at(ORDERS[place], sigma, q) for sigma, q, count in events)
        return float(rdp + terms[place])

    low, high = 0, len(ORDERS) - 1
    while low < high:
        middle = (low + high) // 2
        if not math.isfinite(read(middle)) or not math.isfinite(read(middle + 1)):
            return max(0.0, min(map(read, range(len(ORDERS)))))
        low, high = (low, middle) if read(middle) <= read(middle + 1) else (middle + 1, high)
    return max(0.0, read(low))


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


@functools.lru_cache(maxsize=256)
def rdp_without_replacement(
    noise_multiplier: float, sample_rate: float, renyi_orders: tuple[float, ...]
) -> Floats:
    """Return (K,) Renyi DP of one release, that of A against B, at K orders; read-only.

    Args:
        noise_multiplier: sigma, over the largest distance between the sums of two neighbours.
        sample_rate: q, below 1.
        renyi_orders: above 1, the smallest first.
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
            # The moment less 1, all of whose terms are positive:
            # phi (exp(order g) + exp((1 - order) g) - exp(g) - 1).
            terms = base[domain] + order * loss[domain]
            for power in (order - 1, order):
                terms = terms + np.log(-np.expm1(-power * loss[domain]))
            rdp[i] = min(rdp[i], np.logaddexp(0, logsumexp(terms)) / (order - 1))
    rdp.flags.writeable = False
    return rdp
