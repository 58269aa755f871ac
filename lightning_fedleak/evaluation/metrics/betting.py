"""Tests of a mean by betting, whose evidence may be read after every value.

A gambler who doubts that the values of a process in [0, 1] have a mean of at most m bets on each
value before it comes: the capital is multiplied by ``1 + lambda (x - m)``. If the doubt is wrong no
bet is favourable, and the capital ever reaches ``1 / alpha`` with probability at most ``alpha``
(Ville's inequality), however many values follow, and whatever is decided from them. The capital
is the evidence, an *e-process* (Waudby-Smith & Ramdas 2023, "Estimating means of bounded random
variables by betting").

"Mean" is the conditional one: the expectation of the next value, given all before. Values need
neither be independent nor have one law.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BETS: Floats = np.array([0.95, 0.7, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015])
"""Stakes of eight gamblers, as shares of the stake that could lose everything; not tuned."""

LOG_SHARE: Floats = np.log(np.array([0.5] + [0.5 / 7] * 7))
"""Shares of the first capital: half for the boldest, which is best where values vary little."""

SLACK = 1e-6  # share of the span by which rounding may move a value outside; not tuned


def start(shape: tuple[int, ...] = ()) -> Floats:
    """Return (8, *shape) log capital of each gambler before the first value: nothing is staked."""
    return np.full((BETS.size, *shape), -math.inf)


def bet(
    capital: Floats,
    looks: int,
    value: Floats | float,
    threshold: float,
    *,
    trials: int = 1,
) -> Floats:
    """Return the log capital after one more value.

    Each gambler stakes a constant share ("diversified Kelly" in the paper). Not all capital is
    staked from the first value: ``1 / (j (j + 1))`` of it joins at value j. So a mean that rises
    late is detected about as fast as one that is high from the start: earlier losses need not be
    won back first.

    A value that is a mean of several trials is bet on trial by trial. For the AUC of n members and
    n others, ``trials=n``, the product of the bets is expected to be at most 1 where each pair of a
    member and another is right with probability at most m: the AUC is the mean over all ways to
    make n disjoint pairs, of n independent coins each (Hoeffding 1963, section 5). Where guessing
    alone is doubted (m = 1/2) that holds however the scores depend on each other.

    Args:
        capital: (8, ...) log capital so far, from :func:`start`.
        looks: number of values before this one.
        value: (...) in [0, 1].
        threshold: m in (0, 1).
        trials: independent trials that the value is the mean of.
    """
    j = looks + 1
    capital = np.logaddexp(capital, -math.log(j) - math.log(j + 1))
    stakes = (BETS / threshold).reshape(-1, *[1] * (capital.ndim - 1))
    x = np.asarray(value)
    if trials == 1:
        gain = np.log1p(stakes * (x - threshold))
    else:
        won, lost = np.log1p(stakes * (1 - threshold)), np.log1p(-stakes * threshold)
        gain = trials * (x * won + (1 - x) * lost)
    log_capital: Floats = capital + gain
    return log_capital


def log_evidence(capital: Floats, looks: int) -> Floats:
    """Return (...) log of the e-process: all gamblers' capital and what has not been staked yet."""
    share = LOG_SHARE.reshape(-1, *[1] * (capital.ndim - 1))
    total: Floats = np.logaddexp.reduce(capital + share, axis=0)
    evidence: Floats = np.logaddexp(total, -math.log(looks + 1))
    return evidence


class MeanTest:
    """Evidence that the mean of bounded values lies above a threshold.

    It tests "every value has a conditional mean of at most ``threshold``". The e-process starts at
    1; if what it tests is true, it ever reaches 1 / alpha with probability at most alpha.

    Half of the capital bets on each value as one number, half on the trials that it is the mean of
    where they are known (:func:`bet`). The first half finds a small excess that is steady over
    many looks, the second an excess that one look shows by itself.

    Args:
        threshold: strictly inside ``span``.
        span: lowest and highest possible value.

    Attributes:
        threshold: as given.
        looks: number of values so far.
        mean: their mean; NaN before the first.
        highest: the largest log evidence so far.

    Raises:
        ValueError: a threshold outside the span.
    """

    def __init__(self, threshold: float, *, span: tuple[float, float] = (0.0, 1.0)) -> None:
        if not span[0] < threshold < span[1]:
            raise ValueError(
                f"a mean can be tested against a threshold strictly between {span[0]:g} and "
                f"{span[1]:g}, the ends of its span; got {threshold!r}"
            )
        self.span = span
        self.threshold = threshold
        self._threshold = self._scaled(threshold)
        self._capital = start((2,))
        self._total = 0.0
        self.looks = 0
        self.highest = 0.0

    def _scaled(self, value: float) -> float:
        """Return the value in [0, 1]."""
        low, high = self.span
        x = (value - low) / (high - low)
        if not -SLACK <= x <= 1 + SLACK:
            raise ValueError(f"{value!r} lies outside the span, {low:g} to {high:g}")
        return min(max(x, 0.0), 1.0)

    @property
    def mean(self) -> float:
        """Return the mean of the values; NaN before the first."""
        return self._total / self.looks if self.looks else math.nan

    @property
    def log_evidence(self) -> float:
        """Return the log of the e-process after the values so far."""
        halves = log_evidence(self._capital, self.looks)
        return float(np.logaddexp(*halves) - math.log(2))

    def update(self, value: float, trials: tuple[float, float, int] | None = None) -> None:
        """Add one more value.

        Args:
            value: the value.
            trials: the mean of the trials that it comes from, what this is at the threshold, and
                how many there are; None where they are not known.

        Raises:
            ValueError: the value is NaN or outside the span.
        """
        x = self._scaled(value)
        mean, threshold, n = trials or (value, self.threshold, 1)
        whole, parts = self._capital.T
        self._capital = np.stack(
            [
                bet(whole, self.looks, x, self._threshold),
                bet(
                    parts,
                    self.looks,
                    self._scaled(mean),
                    self._scaled(threshold),
                    trials=n,
                ),
            ],
            axis=1,
        )
        self._total += value
        self.looks += 1
        self.highest = max(self.highest, self.log_evidence)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers from which the test can continue."""
        return {
            "capital": self._capital.tolist(),
            "total": self._total,
            "looks": self.looks,
            "highest": self.highest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the arguments must be the same."""
        self._capital = np.array(state["capital"], dtype=np.float64)
        self._total = state["total"]
        self.looks = state["looks"]
        self.highest = state["highest"]
