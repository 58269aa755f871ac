"""The Gaussian mechanism in closed form."""

import math

from scipy.special import log_ndtr


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Return the smallest delta of the mechanism (Balle & Wang 2018, Theorem 8)."""
    first = float(log_ndtr(1 / (2 * sigma) - epsilon * sigma))
    second = epsilon + float(log_ndtr(-1 / (2 * sigma) - epsilon * sigma))
    return math.exp(first) * -math.expm1(min(0.0, second - first))
