"""What is known in closed form: the attacker's best against a Gaussian mechanism and any DP.

A mechanism is run on one of two inputs, and a test that sees its output guesses on which. FPR and
TPR are the test's chances of saying "member" under the one and under the other. All rates below are
those of the best test.

*sigma* is the noise multiplier: noise of standard deviation ``sigma * sensitivity``, where the
sensitivity is how far the two inputs' results lie apart, the clip norm if one record is added or
removed, twice that if one is replaced (then halve sigma).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr, ndtri

from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.validate import check_number

FPRS = 300  # of the area under a curve, in each half; fewer: an error above 1e-4. Not tuned
LEAST_FPR = 1e-7  # smallest of them above 0; not tuned; the area below it is as small


def gaussian_tpr(fpr: float, sigma: float) -> float:
    """Return the TPR at an FPR: ``Phi(1 / sigma + Phi^-1(fpr))`` (Dong, Roth & Su 2022, Eq. 6)."""
    check_number("sigma", sigma, above=0)
    return float(ndtr(1 / sigma + ndtri(fpr)))


def gaussian_auc(sigma: float) -> float:
    """Return the AUC, ``Phi(1 / (sigma sqrt 2))``."""
    check_number("sigma", sigma, above=0)
    return float(ndtr(1 / (sigma * math.sqrt(2))))


def dp_tpr(fpr: float, epsilon: float, delta: float = 0.0) -> float:
    """Return the largest TPR that (epsilon, delta)-DP allows at an FPR (Kairouz, Oh & Viswanath
    2015).
    """
    direct = math.exp(epsilon) * fpr + delta
    mirrored = 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return max(0.0, min(1.0, direct, mirrored))


def dp_auc(epsilon: float, delta: float = 0.0) -> float:
    """Return the largest AUC that (epsilon, delta)-DP allows: the area under :func:`dp_tpr`."""
    corner = (1 - delta) / (1 + math.exp(epsilon))
    rising = corner * (delta + 1 - corner) / 2
    flat = (1 - delta - corner) * (2 - corner) / 2
    return rising + flat + delta


def curve_tpr(fpr: float, curve: Curve) -> float:
    """Return the largest TPR at an FPR that all pairs (epsilon, delta) of a curve allow."""
    return min((dp_tpr(fpr, *pair) for pair in curve), default=1.0)


def curve_auc(curve: Curve) -> float:
    """Return the largest AUC that all pairs (epsilon, delta) of a curve allow: the area under
    :func:`curve_tpr`.
    """
    near = np.geomspace(LEAST_FPR, 0.5, FPRS)
    fprs = np.concatenate([[0.0], near, 1 - near[-2::-1], [1.0]])
    return float(np.trapezoid([curve_tpr(fpr, curve) for fpr in fprs.tolist()], fprs))
