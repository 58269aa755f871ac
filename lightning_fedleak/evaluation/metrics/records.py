"""Lists of the training texts that a trained model leaks, with p-values and a lower bound.

A text's score is compared with those of texts that a random draw left out. Its p-value is over that
draw: how often a text that was not trained on would score as high. It is no p-value of this text
alone, since some texts score high whether they were trained on or not.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln
from scipy.stats import false_discovery_control
from torch import Tensor

from lightning_fedleak.evaluation.metrics.released import _pool

BARS = 256  # places in the order of others that count; more: slower, and the bound hardly rises
HALVINGS = 24  # of the search for the level of each bar; more: the bound hardly rises

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def record_p_values(scores: Tensor, members: Tensor) -> Floats:
    """Return the p-value of each of n members, ``(1 + others that score as high) / (m + 1)``.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.

    Raises:
        ValueError: no members, no others, or a score that is NaN.
    """
    score, member = _pool(scores, members)
    others = np.sort(score[~member])
    above = len(others) - np.searchsorted(others, score[member], "left")
    p_values: Floats = (1 + above) / (len(others) + 1)
    return p_values


def listed(p_values: Floats, rate: float) -> NDArray[np.bool_]:
    """Return which records a list with a false-discovery rate holds (Benjamini-Hochberg).

    P-values that share their others keep the rate (Bates et al. 2023, arXiv 2104.08279, section 2).

    Args:
        p_values: of all members.
        rate: expected share of records in the list that chance explains.
    """
    chosen: NDArray[np.bool_] = false_discovery_control(p_values, method="bh") <= rate
    return chosen


def smallest_list(n_members: int, n_others: int, rate: float) -> int:
    """Return how many records a list holds at least, if it holds any.

    A p-value is at least ``1 / (m + 1)``, so that fewer others make only longer lists.

    Args:
        n_members: that are tested.
        n_others: m, that they are compared with.
        rate: of the list's false discoveries.

    Examples:
        >>> from lightning_fedleak.evaluation.metrics.records import smallest_list
        >>> smallest_list(1000, 999, 0.1)
        10
    """
    return math.ceil(n_members / (rate * (n_others + 1)) - 1e-9)


def at_least(scores: Tensor, members: Tensor, alpha: float) -> int:
    """Return how many members score higher than chance explains, but for a probability alpha.

    If n exchangeable texts were put among m others, at most V_j of them would lie above the j-th
    highest other, at all j at once, with probability 1 - alpha. V is a level of the exact law of
    each place (negative hypergeometric); that it holds at all of them at once is counted over all
    orders. Members above the j-th other beyond V_j were recognised by what training did to them.
    The bound is the highest over j. Ties are counted against the members.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
        alpha: probability that the bound is too high.

    Raises:
        ValueError: as :func:`record_p_values` does.
    """
    score, member = _pool(scores, members)
    inside, others = np.sort(score[member]), np.sort(score[~member])[::-1]
    bars, limits = _envelope(len(inside), len(others), alpha)
    hits = len(inside) - np.searchsorted(inside, others[bars - 1], "right")
    return max(0, int((hits - limits).max()))


def most_provable(n_members: int, n_others: int, alpha: float) -> int:
    """Return what :func:`at_least` says where every member scores above all others.

    Args:
        n_members: of the pool.
        n_others: of the pool.
        alpha: probability that the bound is too high.
    """
    return max(0, n_members - int(_envelope(n_members, n_others, alpha)[1].min()))


@lru_cache(maxsize=64)
def _envelope(n: int, m: int, alpha: float) -> tuple[Ints, Ints]:
    """Return places in the order of m others, from 1, and how many of n may lie above each."""
    bars = np.unique(np.geomspace(1, m, min(m, BARS)).round().astype(np.int64))
    tails = np.stack([_tail(n, m, int(j)) for j in bars])
    low, high = math.log(alpha / len(bars)), math.log(alpha)  # the first holds by the union bound
    limits = (tails > math.exp(low)).sum(1)
    for _ in range(HALVINGS):
        level = (low + high) / 2
        tried = (tails > math.exp(level)).sum(1)
        if _stays_below(n, m, bars, tried) >= 1 - alpha:
            low, limits = level, tried
        else:
            high = level
    return bars, limits


def _tail(n: int, m: int, j: int) -> Floats:
    """Return (n,) the probability that at least 1, 2, ... n lie above the j-th of m others."""
    h = np.arange(n + 1)

    def choices(total: int | Ints, part: int | Ints) -> Floats:
        value: Floats = gammaln(total + 1) - gammaln(part + 1) - gammaln(total - part + 1)
        return value

    logs = choices(h + j - 1, h) + choices(n - h + m - j, n - h) - choices(n + m, n)
    tail: Floats = np.exp(logs)[::-1].cumsum()[::-1][1:]
    return tail


def _stays_below(n: int, m: int, bars: Ints, limits: Ints) -> float:
    """Return the share of all orders of n and m texts in which no bar has more of n above it.

    Orders are counted by their begin, up to the j-th of the m, by how many of n it holds.
    """
    caps = np.full(m + 1, n)
    caps[bars] = limits
    counts, scale = np.zeros(n + 1), 0.0
    counts[0] = 1
    for cap in caps[1:]:
        counts = counts.cumsum()
        counts[cap + 1 :] = 0
        largest = counts.max()
        counts /= largest
        scale += math.log(largest)
    orders = gammaln(n + m + 1) - gammaln(n + 1) - gammaln(m + 1)
    return math.exp(scale + math.log(counts.sum()) - float(orders))
