"""The privacy loss of batches of a fixed number: without replacement, and truncated samples.

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

**Truncated** (Ganesh 2025, arXiv 2508.15089). Neighbours differ by one example, there or not. Each
is drawn with chance q; where more than N are drawn, a random subset of N is the batch. Of the n - 1
others k are drawn, whatever the example does:

- k < N: the example joins the batch with chance q, as in a Poisson sample.
- k >= N: the batch is full of others, a uniform subset of them. The example takes the place of one
  of them with chance ``q N / (k + 1)``, at most q, and moves the sum by up to two clip norms.

To say which of the two it was can only tell more. So a release costs at most a mixture of two
Poisson samples at the rate q, of noise sigma and sigma / 2. The second tells more, and has more
weight where n is larger: an upper bound on the number of examples is enough. With the mean of
``q N / (k + 1)`` for the second rate epsilon would be smaller, but not the same for smaller n.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr
from scipy.stats import binom

Floats = NDArray[np.float64]

MOST_NODES = 1 << 17  # of the integral; orders that need more cost as much as without sampling
NODES = 8  # of Gauss and Legendre in a panel, which is at most sigma wide. Not tuned
TAIL = 12  # standard deviations beyond the last peak where the integral ends; the rest is 1e-32


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
    usable = np.flatnonzero(ends <= MOST_NODES)
    if len(usable):
        places, weights = np.polynomial.legendre.leggauss(NODES)
        panels = int(ends[usable[-1]]) // NODES
        x = 0.5 + width * np.add.outer(np.arange(panels), (places + 1) / 2).ravel()
        scale = width / 2 / noise_multiplier / math.sqrt(2 * math.pi)
        base = np.log(np.tile(weights, panels) * scale) - (x / noise_multiplier) ** 2 / 2
        tilt = (x - 0.5) / noise_multiplier**2
        loss = np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + tilt)
        for i in usable:
            order, part = orders[i], slice(int(ends[i]))
            # The moment less 1, all of whose terms are positive:
            # phi (exp(order g) + exp((1 - order) g) - exp(g) - 1).
            terms = base[part] + order * loss[part]
            for power in (order - 1, order):
                terms = terms + np.log(-np.expm1(-power * loss[part]))
            rdp[i] = min(rdp[i], np.logaddexp(0, logsumexp(terms)) / (order - 1))
    rdp.flags.writeable = False
    return rdp


class WithoutReplacementPRV:
    """The privacy loss of A against B under A, as Opacus' parts of PRV take it.

    Args:
        sample_rate: q, below 1.
        noise_multiplier: sigma, over the largest distance between the sums of two neighbours.
    """

    def __init__(self, sample_rate: float, noise_multiplier: float) -> None:
        self._rate = sample_rate
        self._sigma = noise_multiplier

    def cdf(self, t: Floats | float) -> Floats:
        """Return the chance of a loss of at most t."""
        q, sigma = self._rate, self._sigma
        x = 0.5 + sigma**2 * np.log1p(np.expm1(np.abs(t)) / q)
        tail = ndtr(-x / sigma)
        cdf: Floats = np.where(
            np.asarray(t) < 0, tail, 1 - (1 - q) * tail - q * ndtr((1 - x) / sigma)
        )
        return cdf


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson samples of at most N examples, a random subset where more are drawn.

    Attributes:
        examples: n, the most that the larger of two neighbours has.
        most: N, in a batch.
    """

    examples: int
    most: int

    @property
    def unit(self) -> str:
        """Return what stands behind the name of a ledger."""
        return f"at-most-{self.most}-of-{self.examples}"

    def parts(self, noise_multiplier: float, sample_rate: float) -> list[tuple[float, float]]:
        """Return weight and noise multiplier of the Poisson samples whose mixture a release is.

        Args:
            noise_multiplier: sigma.
            sample_rate: q, in (0, 1].
        """
        full = float(binom.sf(self.most - 1, self.examples - 1, sample_rate))
        parts = [(1 - full, noise_multiplier), (full, noise_multiplier / 2)]
        return [part for part in parts if part[0]]


class MixturePRV:
    """The privacy loss of a mixture of Poisson samples, as Opacus' parts of PRV take it.

    Args:
        sample_rate: q.
        parts: weight and noise multiplier of each.
    """

    def __init__(self, sample_rate: float, parts: list[tuple[float, float]]) -> None:
        from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV as Loss

        self._parts: list[tuple[float, Any]] = [
            (weight, Loss(sample_rate, sigma)) for weight, sigma in parts
        ]

    def cdf(self, t: Floats | float) -> Floats:
        """Return the chance of a loss of at most t."""
        return np.asarray(sum(weight * loss.cdf(t) for weight, loss in self._parts))
