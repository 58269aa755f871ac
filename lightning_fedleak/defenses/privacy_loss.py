"""Epsilon by numerical composition of privacy loss random variables (PRV), of Opacus' parts.

Gopi, Lee & Wutschitz 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from scipy.fft import next_fast_len

from lightning_fedleak.defenses.renyi import Floats, epsilons_of_rdp, rdp_of

PRV_POINTS = 2**21
PRV_ERROR = 0.002
PRV_LARGEST_LOSS = 650.0


def tightened(epsilon: float, prv: Callable[[float], float]) -> float:
    """The bound that PRV gives with an error below 0.6% of itself, where its mesh allows.

    The error is a share (``PRV_ERROR``) of the scale that PRV is called with. RDP's bound may be
    many times the answer, at a small sample rate most of all; then the answer sets the scale.
    """
    scale = epsilon
    while True:
        epsilon = min(epsilon, prv(scale))
        if not 0 < epsilon < scale / 3:
            return epsilon
        scale = 2 * epsilon


def prv_epsilon(
    history: Sequence[tuple[float, float, int]], delta: float, epsilon: float, rdp: Floats
) -> float:
    """Upper bound by PRV with a mesh as fine as the answer asks for, ``inf`` where it has none.

    As ``opacus.accountants.PRVAccountant``, of the same parts, but with stored Renyi divergences
    (which take most of the time there), a mesh that is neither finer than ``PRV_ERROR`` of the
    answer asks for nor larger than about ``PRV_POINTS``, and an allowance for rounding: the T-th
    power of a Fourier transform in float64 shifts delta by up to about ``0.3 T eps`` (measured
    against the Gaussian mechanism), by which Opacus understates epsilon at a tiny delta (3.6% at
    delta 1e-13 after 10,000 releases). Six times that is allowed for.

    Args:
        history: of releases.
        delta: of the answer.
        epsilon: about as large as the answer, or larger.
        rdp: of all releases together, at ``ORDERS``.
    """
    from opacus.accountants.analysis import prv

    steps = sum(row[2] for row in history)
    rounding = 2 * steps * float(np.finfo(np.float64).eps)
    if rounding > delta / 10:
        return math.inf
    delta_error = max(delta / 1000, rounding)
    loss = max(
        float(epsilons_of_rdp(rdp, delta_error / 4).min()),
        *(
            float(epsilons_of_rdp(rdp_of(sigma, rate), delta_error / (8 * steps)).min())
            for sigma, rate, _ in history
        ),
    )
    if loss > PRV_LARGEST_LOSS:
        return math.inf
    root = math.sqrt(steps * math.log(12 / delta_error) / 2)
    error = max(PRV_ERROR * epsilon, 2 * (loss + 3) * root / PRV_POINTS)
    half = max(loss, error) + 3
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = error / root
            points = _fast_length(2 * math.ceil(half / width) + 4)
            half = (points / 2 - 1.5) * width  # create_aligned rounds it up to `points` in all
            mesh = prv.Domain.create_aligned(-half, half, width)
            single = [
                prv.discretize(
                    prv.TruncatedPrivacyRandomVariable(
                        prv.PoissonSubsampledGaussianPRV(rate, sigma), mesh.t_min, mesh.t_max
                    ),
                    mesh,
                )
                for sigma, rate, _ in history
            ]
            whole = prv.compose_heterogeneous(
                dprvs=single, num_self_compositions=[row[2] for row in history]
            )
            found = float(whole.compute_epsilon(delta, delta_error, error)[2])
    except (RuntimeError, ValueError) as reason:
        warnings.warn(
            f"PRV has no answer for {list(history)} at delta {delta:g} ({reason}); the epsilon of "
            "RDP, an upper bound too, is reported instead",
            stacklevel=2,
        )
        return math.inf
    return max(found, 0.0) if math.isfinite(found) else math.inf


def _fast_length(least: int) -> int:
    """The next even number that an FFT takes quickly: others cost several times as much."""
    length = int(next_fast_len(least, real=True))
    while length % 2:
        length = int(next_fast_len(length + 1, real=True))
    return length
