"""Matrices by which noise is correlated over steps, see :mod:`~.correlated_noise`; in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtbtrs
from scipy.optimize import minimize
from scipy.signal import lfilter, unit_impulse

Floats = NDArray[np.float64]

LONG = 512  # steps up to which all columns of C are optimized, not one; more take longer
ITERATIONS = 2000  # at most, of L-BFGS; it usually converges earlier. Not tuned


@dataclass(frozen=True, eq=False)
class Factorization:
    """The matrices by which noise is correlated over n steps.

    Attributes:
        rows: (n, b) of row t of the banded matrix the entries at columns t, t - 1, ..., t - b + 1;
            0 where there is no such column. Of C for BandMF, of C^-1 for BISR.
        noise_norms: (n,) norms of the rows of C^-1: standard deviations of the noise that is added,
            for independent noise of 1.
        errors: (n,) squared norms of the rows of ``A C^-1``.
        sensitivity: how far one example moves ``C G`` in norm, for clip norm 1. For BandMF that is
            in one step: columns have norm 1, and no two share a row where an example takes part at
            most every b-th step. For BISR it is in all steps together.
    """

    rows: Floats
    noise_norms: Floats
    errors: Floats
    sensitivity: float


@functools.lru_cache(maxsize=16)
def banded(steps: int, bands: int) -> Factorization:
    """Return the C of least mean error with ``bands`` bands for the running sums of the steps.

    Args:
        steps: n.
        bands: b; 1 for independent noise.
    """
    bands = min(bands, steps)
    column = _best_column(steps, bands)
    columns = np.tile(column[:, None], (1, steps))
    for place in range(1, bands):
        columns[place, steps - place :] = 0.0
    if steps <= LONG and bands > 1:
        columns = _best_columns(columns)
    columns /= np.linalg.norm(columns, axis=0)
    if steps <= LONG:
        norms, errors = _column_errors(columns)
    else:
        norms, errors = _toeplitz_errors(column, columns)
    rows = np.zeros((steps, bands))
    for place in range(bands):
        rows[place:, place] = columns[place, : steps - place]
    return Factorization(rows, norms, errors, 1.0)


@functools.lru_cache(maxsize=16)
def banded_inverse(steps: int, bands: int, separation: int) -> Factorization:
    """Return the matrices of BISR: C^-1 has the first bands of the inverse square root of A.

    All numbers of C are positive, so an example moves ``C G`` most where all of its gradients are
    equal and it is in the first step and every ``separation``-th after it.

    Args:
        steps: n.
        bands: b of C^-1.
        separation: steps from one time to the next that an example takes part.
    """
    bands = min(bands, steps)
    places = np.arange(1, bands)
    inverse = np.concatenate([[1.0], np.cumprod((2 * places - 3) / (2 * places))])
    rows = np.zeros((steps, bands))
    for place in range(bands):
        rows[place:, place] = inverse[place]
    column = lfilter([1.0], inverse, unit_impulse(steps))
    joint = np.zeros(steps)
    for start in range(0, steps, separation):
        joint[start:] += column[: steps - start]
    padded = np.zeros(steps)
    padded[:bands] = inverse
    return Factorization(
        rows,
        np.sqrt(np.cumsum(padded**2)),
        np.cumsum(np.cumsum(padded) ** 2),
        float(np.linalg.norm(joint)),
    )


def _best_column(steps: int, bands: int) -> Floats:
    """Return (b,) the first column of the best Toeplitz C, of norm 1.

    It is optimized for few steps first and then for more, because for many steps the inverse of a
    column near the best may grow without bound.
    """
    places = np.arange(1, bands)
    free = np.cumprod((2 * places - 1) / (2 * places))
    lengths = [steps]
    while lengths[0] > 8 * max(bands, 8):
        lengths.insert(0, lengths[0] // 4)
    for length in lengths if bands > 1 else ():
        loss = functools.partial(_column_loss, steps=length)
        options = _options(bands)
        free = minimize(loss, free, jac=True, method="L-BFGS-B", options=options).x
    column: Floats = np.concatenate([[1.0], free])
    return column / np.linalg.norm(column)


def _column_loss(free: Floats, steps: int) -> tuple[float, Floats]:
    """Return the log of the error of (1, free) over its norm, and its slope; 10^10 if infinite."""
    share = 1 - np.arange(steps) / steps
    coefficients = np.concatenate([[1.0], free])
    with np.errstate(all="ignore"):
        sums = np.cumsum(lfilter([1.0], coefficients, unit_impulse(steps)))
        turned = lfilter([1.0], coefficients, sums)
        error = share @ sums**2
        weighted = -2 * share * sums
        slope = np.array([weighted[k:] @ turned[: steps - k] for k in range(1, len(free) + 1)])
        square = coefficients @ coefficients
        value = math.log(square) + math.log(error) if 0 < error < math.inf else math.inf
        slope = slope / error + 2 * free / square
    if not (math.isfinite(value) and np.isfinite(slope).all()):
        return 1e10, np.zeros_like(free)
    return value, slope


def _options(numbers: int) -> dict[str, float]:
    return {
        "maxiter": ITERATIONS,
        "maxfun": 2 * ITERATIONS,
        "maxcor": min(50, numbers),
        "ftol": 1e-13,
        "gtol": 1e-9,
    }


def _best_columns(start: Floats) -> Floats:
    """Return (b, n) the columns of the best C from the diagonal down; the loss normalizes them."""
    bands, steps = start.shape
    inside = np.arange(bands)[:, None] + np.arange(steps)[None] < steps

    def loss(flat: Floats) -> tuple[float, Floats]:
        free = np.zeros_like(start)
        free[inside] = flat
        norms = np.linalg.norm(free, axis=0)
        columns = free / norms
        sums = np.cumsum(_solved(columns, np.eye(steps)), axis=0)
        errors = np.square(sums).sum(1)
        top = errors.max()
        mean = np.mean(errors / top)
        value = top * mean
        weights = value / mean / steps * (errors / top) / errors
        turned = _solved(columns, (weights[:, None] * sums).T)
        sums = sums.T
        slope = np.zeros_like(start)
        for k in range(bands):
            slope[k, : steps - k] = -2 * np.einsum("jt,jt->j", sums[k:], turned[: steps - k])
        slope -= columns * (columns * slope).sum(0)
        return float(value), (slope / norms)[inside]

    flat, best = start[inside], np.zeros_like(start)
    options = _options(flat.size)
    best[inside] = minimize(loss, flat, jac=True, method="L-BFGS-B", options=options).x
    return best


def _solved(columns: Floats, right: Floats) -> Floats:
    """Return ``C^-1 right`` of a C by its columns from the diagonal down."""
    solution, info = dtbtrs(columns, right, uplo="L")
    assert info == 0
    solved: Floats = solution
    return solved


def _column_errors(columns: Floats) -> tuple[Floats, Floats]:
    """Return the noise norms and errors of a C by its columns."""
    inverse = _solved(columns, np.eye(columns.shape[1]))
    return np.linalg.norm(inverse, axis=1), np.square(np.cumsum(inverse, axis=0)).sum(1)


def _toeplitz_errors(column: Floats, columns: Floats) -> tuple[Floats, Floats]:
    """Return noise norms and errors where C is a Toeplitz matrix with normalized columns.

    Only the last ``b - 1`` columns are shorter. ``C = K N^-1``, N diagonal, so
    ``C^-1 = N K^-1``.
    """
    bands, steps = columns.shape
    inverse = lfilter([1.0], column, unit_impulse(steps))
    scale = column[0] / columns[0]
    norms = scale * np.sqrt(np.cumsum(inverse**2))
    sums = np.cumsum(inverse)
    errors = np.cumsum(sums**2)
    end = steps - bands + 1
    row = sums[:end][::-1]
    row = np.concatenate([row, np.zeros(steps - end)])
    for step in range(end, steps):
        row[: step + 1] += scale[step] * inverse[: step + 1][::-1]
        errors[step] = row @ row
    return norms, errors
