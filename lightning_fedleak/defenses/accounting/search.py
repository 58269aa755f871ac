"""A search for settings, accounted: a random number of tries, of which the best counts.

Settings that were chosen by what several runs showed of private data tell of these data. Each try
is drawn at random from candidates that were fixed before, and the number K of tries too. Whoever
sees the best try alone learns at most what :meth:`Tries.rdp` says (Papernot & Steinke 2022,
Theorem 2), with the Renyi curve of one try the largest of any candidate. K must not be cut short,
and a try that fails must count as one: else the data decide how many there were.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq

from lightning_fedleak.defenses.accounting.accounting import composed_rdp
from lightning_fedleak.defenses.accounting.ledger import check_release
from lightning_fedleak.defenses.accounting.renyi import (
    ORDERS,
    Floats,
    SamplingScheme,
    epsilons_of_rdp,
)
from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.validate import check_number

Releases = Sequence[tuple[float, float, int, SamplingScheme]]
"""Noise multiplier, sample rate, count and sampling of every kind of release."""


@dataclass(frozen=True)
class Tries:
    """A truncated negative binomial number of tries.

    Attributes:
        mean: tries on average; above 1.
        shape: 1 for the geometric law, 0 for the logarithmic. Smaller costs less, and more often
            means one try alone.

    Raises:
        DefenseError: a value out of range.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check_number("Tries: mean", self.mean, above=1, error=DefenseError)
        check_number("Tries: shape", self.shape, at_least=0, error=DefenseError)

    @property
    def stop(self) -> float:
        """Return the parameter gamma of the law, which the mean decides."""

        def excess(log_stop: float) -> float:
            more = math.expm1(-log_stop)  # 1 / gamma - 1
            if self.shape == 0:
                return more / -log_stop - self.mean
            return self.shape * more / -math.expm1(self.shape * log_stop) - self.mean

        least = math.log(2 * (self.shape + 1) / self.mean) - 50
        return math.exp(float(brentq(excess, least, -1e-12, xtol=1e-14)))

    def draw(self) -> int:
        """Return a number of tries, from the system's own randomness."""
        generator = np.random.default_rng(secrets.randbits(256))
        if self.shape == 0:
            return int(generator.logseries(1 - self.stop))
        number, stop = 0, self.stop
        while not number:
            number = int(generator.negative_binomial(self.shape, stop))
        return number

    def rdp(self, one: Floats) -> Floats:
        """Return (len(ORDERS),) Renyi DP of the best of all tries.

        Args:
            one: of one try, at ``ORDERS``.
        """
        orders = np.asarray(ORDERS)
        constant = (1 + self.shape) * np.min((1 - 1 / orders) * one - math.log(self.stop) / orders)
        every = one + math.log(self.mean) / (orders - 1) + constant
        smallest: Floats = np.minimum.accumulate(every[::-1])[::-1]  # it grows with the order
        return smallest


@dataclass(frozen=True)
class Candidate:
    """Settings that a try may have.

    Attributes:
        settings: what ``train`` gets.
        releases: noise multiplier, sample rate, count and sampling of every kind of release that a
            try makes at most, that of its score on private data included. Those of a finished run
            are ``defense.accountant.releases``.
    """

    settings: Any
    releases: Releases


@dataclass(frozen=True)
class TryResult:
    """What one try returns.

    Attributes:
        score: the higher the better, on public data, or released under the account of ``releases``.
        releases: that were made, as :attr:`Candidate.releases` has them.
        result: of any kind, such as the path of the weights.
    """

    score: float
    releases: Releases
    result: Any = None


@dataclass(frozen=True)
class BestTry:
    """The best try, and what it tells of the data.

    Attributes:
        settings: of the best try.
        trial: what it returned; None where every try failed.
        rdp: (len(ORDERS),) Renyi DP of the whole search.
    """

    settings: Any
    trial: TryResult | None
    rdp: Floats

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the search, its result included."""
        check_number("delta", delta, above=0, below=1, error=DefenseError)
        return float(epsilons_of_rdp(self.rdp, delta).min())


def private_search(
    candidates: Sequence[Candidate], train: Callable[[Any], TryResult], tries: Tries
) -> BestTry:
    """Return the best of a random number of tries, each of a candidate drawn at random.

    A try that raises an error, or whose score is no number, counts as the worst. Nothing else of
    the tries may leave: not their number, and no score but that of the best.

    Args:
        candidates: fixed before any private data were seen.
        train: trains by a candidate's settings, under DPSGD.
        tries: law of their number.

    Raises:
        DefenseError: no candidates; releases that do not say how they were drawn, or whose epsilons
            are of different neighbours; or a try released more than its candidate says.
    """
    if not candidates:
        raise DefenseError("private_search: give at least one Candidate")
    curves = [_rdp_of(candidate.releases) for candidate in candidates]
    _check_neighbours([row for candidate in candidates for row in candidate.releases])
    rdp = tries.rdp(np.max(curves, axis=0))
    best, trial, score = candidates[0], None, -math.inf
    for _ in range(tries.draw()):
        number = secrets.randbelow(len(candidates))
        candidate = candidates[number]
        try:
            result = train(candidate.settings)
            value = float(result.score)
        except Exception:  # which the data may have provoked
            continue
        rdp_of_try = _rdp_of(result.releases)
        _check_neighbours([*candidate.releases, *result.releases])
        if not np.all(rdp_of_try <= curves[number] * (1 + 1e-9)):
            raise DefenseError(
                f"private_search: a try made the releases {list(result.releases)}, which cost more "
                f"than its candidate's, {list(candidate.releases)}: no epsilon holds for the search"
            )
        if value > score or (trial is None and value == score):
            best, trial, score = candidate, result, value
    return BestTry(best.settings, trial, rdp)


def _rdp_of(releases: Releases) -> Floats:
    """Return (len(ORDERS),) Renyi DP of releases, each kind by its own sampling.

    Raises:
        DefenseError: a kind that is drawn at random does not say how, or a value is out of range.
    """
    total: Floats = np.zeros(len(ORDERS))
    for row in releases:
        sigma, rate, count, *sampling = row
        check_release(sigma, rate, count)
        if not sampling and rate < 1:
            raise DefenseError(
                f"private_search: the releases {tuple(row)} do not say how they were drawn, which "
                "decides what they cost. Pass defense.accountant.releases of such a run, or add "
                "the sampling to each row: 'poisson', 'without_replacement' (ClientDP(sampling="
                "'fixed', trust='central')), or defenses.accounting.TruncatedPoisson(examples + 1, "
                "truncated_batch_size)"
            )
        total = total + composed_rdp([(sigma, rate, count)], *(sampling or ["poisson"]))
    return total


def _check_neighbours(releases: Releases) -> None:
    """Refuse samples of a fixed size beside samples by chance.

    One epsilon is of an example put in another's place, the other of one added or removed.
    """
    if len({row[3] == "without_replacement" for row in releases if row[1] < 1}) > 1:
        raise DefenseError(
            "private_search: releases drawn without replacement count an example put in another's "
            "place, Poisson samples one added or removed, and no epsilon holds for both: let all "
            "candidates draw alike"
        )
