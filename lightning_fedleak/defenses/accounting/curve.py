"""The whole privacy curve of DP-SGD's releases: many pairs (epsilon, delta) that all hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_fedleak.defenses.accounting.accounting import (
    AccountantKind,
    composed_rdp,
    epsilon_of,
    read_prv,
)
from lightning_fedleak.defenses.accounting.renyi import Floats, SamplingScheme, deltas_of_rdp
from lightning_fedleak.defenses.base import Curve

CURVE_POINTS = 64  # pairs of a curve; at 32 the TPR that one allows is .6% larger (sigma 1)
LEAST_DELTA = 1e-9  # of a curve; larger: events of a smaller chance than it refute nothing


def curve_of(
    history: Sequence[tuple[float, float, int]],
    kind: AccountantKind,
    sampling: SamplingScheme = "poisson",
) -> Curve:
    """Return pairs (epsilon, delta) that all hold for releases with fixed noise.

    Together they limit every test by more than the pair at one delta does. Epsilons lie evenly
    from 0 to that of :data:`LEAST_DELTA`.

    Args:
        history: as for :func:`epsilon_of`.
        kind: ``"prv"`` or ``"rdp"``.
        sampling: of all releases.

    Returns:
        ``(0, 0)`` alone for no releases; no pair where epsilon is infinite.

    Raises:
        DefenseError: a value out of range, or Opacus is missing.
    """
    largest = epsilon_of(history, LEAST_DELTA, kind, sampling)
    if not history:
        return ((0.0, 0.0),)
    if math.isinf(largest):
        return ()
    epsilons = np.linspace(0.0, largest, CURVE_POINTS)
    rdp = composed_rdp(history, sampling)
    deltas = deltas_of_rdp(rdp, epsilons)
    if kind == "prv" and largest > 0:

        def read(composed: Any, delta_error: float, error: float) -> Floats:
            estimates = [composed.compute_delta_estimate(e - error) for e in epsilons]
            return np.maximum(estimates, 0.0) + delta_error

        bounds = read_prv(history, LEAST_DELTA, largest, rdp, read, sampling)
        deltas = deltas if bounds is None else np.fmin(deltas, bounds)
    deltas[-1] = min(deltas[-1], LEAST_DELTA)
    return tuple(zip(epsilons.tolist(), deltas.tolist(), strict=True))
