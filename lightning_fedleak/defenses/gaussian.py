"""What the Gaussian mechanism guarantees, exactly."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

XTOL, RTOL = 1e-14, 1e-14
"""How exactly epsilon is found, absolute and relative."""


def gaussian_epsilon(*, sigma: float, delta: float) -> float:
    """The smallest epsilon of ``x + N(0, s^2 I)`` at ``delta`` (Balle and Wang 2018, Theorem 8).

    k such releases in a row, also where each depends on those before, are one of
    ``sigma / sqrt(k)`` (Dong et al. 2019, Corollary 3.3).

    Args:
        sigma: noise multiplier: ``s`` over how far two neighbouring inputs' ``x`` may be apart in
            2-norm; infinite where they are alike.
        delta: in (0, 1).

    Returns:
        Epsilon, rounded up; 0 where sigma is so large that delta alone covers it, infinite where it
        is beyond all numbers.

    Raises:
        ValueError: an argument out of range.
    """
    if not sigma > 0:
        raise ValueError(f"sigma must be positive, got {sigma!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta!r}")
    goal = math.log(delta)

    def excess(epsilon: float) -> float:
        return max(_log_delta(epsilon, 1 / sigma), 2 * goal - 1) - goal

    if math.isinf(sigma) or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if math.isinf(high):
            return high
    found = float(brentq(excess, 0.0, high, xtol=XTOL, rtol=RTOL))
    return found + XTOL + RTOL * found


def _log_delta(epsilon: float, ratio: float) -> float:
    """The log of Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r), where both may be tiny or huge."""
    first = float(log_ndtr(ratio / 2 - epsilon / ratio))
    second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    if second >= first:
        return -math.inf
    return first + float(np.log1p(-np.exp(second - first)))


__all__ = ["gaussian_epsilon"]
