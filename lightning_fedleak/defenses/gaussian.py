"""What the Gaussian mechanism guarantees, exactly."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The smallest epsilon of ``x + N(0, s^2 I)`` at ``delta`` (Balle and Wang 2018, Theorem 8).

    k such releases in a row, also where each depends on those before, are one of
    ``sqrt(k) * ratio`` (Dong et al. 2019, Corollary 3.3).

    Args:
        ratio: how far two neighbouring inputs' ``x`` may be apart in 2-norm, divided by ``s``.
        delta: in (0, 1).

    Returns:
        Epsilon; 0 where the ratio is so small that delta alone covers it, infinity at an infinite
        ratio.

    Raises:
        ValueError: an argument out of range.
    """
    if not ratio >= 0:
        raise ValueError(f"ratio must be a number of at least 0, got {ratio!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta!r}")
    if ratio == 0 or math.isinf(ratio):
        return ratio
    goal = math.log(delta)
    if _log_delta(0.0, ratio) <= goal:
        return 0.0
    low, high = 0.0, 1.0
    while _log_delta(high, ratio) > goal:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _log_delta(middle, ratio) > goal else (low, middle)
    return high


def _log_delta(epsilon: float, ratio: float) -> float:
    """The log of Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r), where both may be tiny or huge."""
    first = float(log_ndtr(ratio / 2 - epsilon / ratio))
    second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    if second >= first:
        return -math.inf
    return first + float(np.log1p(-np.exp(second - first)))


__all__ = ["gaussian_epsilon"]
