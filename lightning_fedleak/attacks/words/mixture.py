"""A two-component Gaussian mixture in one dimension, fitted in time that does not grow with EM.

In one dimension the data enters EM only through ``n``, ``sum x`` and ``sum x**2`` weighted by the
responsibilities. Values are therefore collected once into bins that keep those three sums, and EM
runs on the bins: with one responsibility per bin it is a variational EM whose objective is a lower
bound on the log-likelihood, tight as the bins get narrow. The values themselves are read only for
the start and for the bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedleak.attacks.base import UnusableObservation

_Array = NDArray[np.float64]
_Step = Callable[[_Array], _Array | None]
"""A step from parameters to the next ones; None if a component is empty. The parameters are the log
odds w1 / w0, both means, and both log variances."""

_RESOLUTION = 128  # bins in one deviation of the narrow component and in each doubling beyond
_TOLERANCE = 1e-7  # change in a step, of numbers of _distance, below which EM ends; not tuned
_MAX_STEPS = 3000  # EM steps of a fit; real row sums take some ten
_START_VALUES = 8192  # values that a start is computed from; more cost time, not tuned
_VARIANCE_FLOOR = 1e-20  # smallest variance of a component over the total: float64's rounding
_REBINNINGS = 12  # times that finer bins are made at most; not tuned
_MIN_SHRINKAGE = 0.3  # shrinkage of the narrow deviation below which finer bins are made; not tuned


@dataclass(frozen=True)
class Mixture:
    """Two Gaussians, the narrow one first.

    Attributes:
        weights: (2,) float64 on the CPU, positive, summing to 1.
        means: (2,) float64 on the CPU, in the unit of the values.
        variances: (2,) float64 on the CPU, in that unit squared; ``variances[0] <= variances[1]``.
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    @property
    def variance_ratio(self) -> float:
        """Return the variance of the wide component over that of the narrow one, at least 1."""
        return float(self.variances[1] / self.variances[0])


def tail_start(x: _Array, tail: float, floor: float = 0.0) -> Mixture:
    """Return a start for the fit without randomness: the tails and the centre.

    The wide component gets the share ``tail`` of the values that are farthest from the median, the
    narrow one the rest. Each has the mean of its values, and their mean square about the *narrow*
    mean, so that a few far values on one side do not start as a component of no width.

    Args:
        x: (n,) finite values, not all equal.
        tail: share of the values that starts in the wide component, between 0 and 1.
        floor: smallest variance of a component.
    """
    if len(x) > 2 * _START_VALUES:  # a start needs no more
        thinned = x[:: len(x) // _START_VALUES]
        if thinned.min() < thinned.max():
            x = thinned
    middle = (len(x) - 1) // 2
    distance = np.abs(x - np.partition(x, middle)[middle])
    n_near = len(x) - min(max(round(tail * len(x)), 1), len(x) - 1)
    threshold = np.partition(distance, n_near - 1)[n_near - 1]
    far = distance > threshold
    if not far.any():  # more than the share ``tail`` have the largest distance
        far = distance == threshold
    parts = [x[~far], x[far]]
    means = [float(p.mean()) for p in parts]
    variances = [max(float(np.square(p - means[0]).mean()), floor) for p in parts]
    return Mixture(_tensor([len(p) / len(x) for p in parts]), _tensor(means), _tensor(variances))


def _tensor(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def fit_two_gaussians(
    values: Tensor, *, start: float = 0.01, regularization: float = 0.0
) -> Mixture:
    """Return the fit of ``w0 N(m0, v0) + w1 N(m1, v1)`` by maximum likelihood.

    EM runs on bins that are narrow at the centre and grow logarithmically into the tails. It starts
    again on finer bins if the narrow component shrinks to their scale. The likelihood of a mixture
    has several optima: the result is the one that exact EM reaches from the start.

    It runs in float64 on the CPU whatever the device of ``values``: one copy of n numbers, no
    synchronisation per step, and the same result everywhere.

    Args:
        values: (n,) finite values, n >= 2, not all equal.
        start: the share of the values that :func:`tail_start` puts in the wide component.
        regularization: added to both variances in every step, in the unit of the values squared:
            scikit-learn's ``reg_covar`` (1e-6 there). With it EM ends near, not at, a maximum of
            the likelihood.

    Raises:
        UnusableObservation: all values are equal.
    """
    x: _Array = values.detach().cpu().double().contiguous().numpy()
    if x.min() == x.max():
        raise UnusableObservation("all values are equal: two Gaussians do not separate them")
    scaled = x - x.mean()
    floor = float(scaled @ scaled) / len(x) * _VARIANCE_FLOOR
    mixture, steps_left = tail_start(x, start, floor), _MAX_STEPS
    for _ in range(_REBINNINGS):
        # Centre and unit of the narrow component keep x and x**2 of the bulk near one.
        centre = float(mixture.means[0])
        unit = math.sqrt(max(float(mixture.variances[0]), floor))
        np.subtract(x, centre, out=scaled)
        scaled *= 1 / unit
        step = _em_step(*_bin(scaled), floor / unit**2, regularization / unit**2)
        theta, steps, converged = _converge(step, _pack(mixture, centre, unit), steps_left)
        steps_left -= steps
        mixture = _unpack(theta, centre, unit)
        if not converged or float(mixture.variances[0]) >= (_MIN_SHRINKAGE * unit) ** 2:
            break
    return mixture


def _bin(x: _Array) -> tuple[_Array, _Array]:
    """Return features (3, b) = 1, mean x, mean x**2 of each non-empty bin, and the counts (b,).

    A bin holds the values whose ``1 + |x|`` has the same exponent and leading digits of the
    fraction; negative values have bins of their own.
    """
    folded = np.abs(x)
    folded += 1
    index = folded.view(np.int64)
    index -= np.float64(1).view(np.int64)
    index >>= 53 - _RESOLUTION.bit_length()
    buffer = x.view(np.int64) >> 63  # all ones where x is negative
    index ^= buffer
    index -= index.min()
    counts = np.bincount(index)
    bins = counts.nonzero()[0]
    count = counts[bins].astype(np.float64)
    first = np.bincount(index, x)[bins] / count
    squares = np.multiply(x, x, out=buffer.view(np.float64))
    second = np.bincount(index, squares)[bins] / count
    return np.stack([np.ones_like(count), first, second]), count


def _log_odds(theta: _Array) -> _Array:
    """Return coefficients of 1, x and x**2 in the posterior log odds of the two components."""
    log_odds, m0, m1, log_v0, log_v1 = theta.tolist()
    v0, v1 = math.exp(log_v0), math.exp(log_v1)
    constant = log_odds - 0.5 * (log_v1 - log_v0 + m1 * m1 / v1 - m0 * m0 / v0)
    return np.array([constant, m1 / v1 - m0 / v0, 0.5 / v0 - 0.5 / v1])


def _em_step(features: _Array, count: _Array, floor: float, added: float) -> _Step:
    """Return the EM step on (3, b) features with counts (b,).

    The posterior log odds of the two components are a quadratic in x, so that a step is one
    product for the odds, one exponential, and one product for the moments of each component.
    """
    weighted = features * count

    def step(theta: _Array) -> _Array | None:
        odds = _log_odds(theta) @ features
        smaller = np.exp(-np.abs(odds))
        both = 1 + smaller
        likelier, other = 1 / both, smaller / both
        wide = odds >= 0
        n1, first_1, second_1 = (weighted @ np.where(wide, likelier, other)).tolist()
        n0, first_0, second_0 = (weighted @ np.where(wide, other, likelier)).tolist()
        if not (n0 > 1e-9 and n1 > 1e-9):
            return None
        m0, m1 = first_0 / n0, first_1 / n1
        v0 = max(second_0 / n0 - m0 * m0, floor) + added
        v1 = max(second_1 / n1 - m1 * m1, floor) + added
        return np.array([math.log(n1 / n0), m0, m1, math.log(v0), math.log(v1)])

    return step


def _converge(step: _Step, theta: _Array, max_steps: int) -> tuple[_Array, int, bool]:
    """Return parameters, steps and convergence of EM."""
    for n in range(max_steps):
        latest = step(theta)
        if latest is None:
            return theta, n, False
        change, theta = _distance(theta, latest), latest
        if change <= _TOLERANCE:
            return theta, n + 1, True
    return theta, max_steps, False


def _distance(before: _Array, after: _Array) -> float:
    """Return the largest change of log odds, means in standard deviations, and log variances."""
    means, log_variances = slice(1, 3), slice(3, 5)
    change = np.abs(after - before)
    change[means] *= np.exp(-0.5 * before[log_variances])
    return float(change.max())


def _pack(mixture: Mixture, centre: float, unit: float) -> _Array:
    w0, w1 = mixture.weights.tolist()
    m0, m1 = ((mixture.means - centre) / unit).tolist()
    v0, v1 = (mixture.variances / unit**2).tolist()
    return np.array([math.log(w1 / w0), m0, m1, math.log(v0), math.log(v1)])


def _unpack(theta: _Array, centre: float, unit: float) -> Mixture:
    log_odds, m0, m1, log_v0, log_v1 = theta.tolist()
    weights = _tensor([-log_odds, log_odds]).sigmoid()
    means = _tensor([m0, m1]) * unit + centre
    variances = _tensor([log_v0, log_v1]).exp() * unit**2
    order = [0, 1] if log_v0 <= log_v1 else [1, 0]
    return Mixture(weights[order], means[order], variances[order])
