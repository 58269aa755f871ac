"""The cost of releases to a group of examples, as all rows of a person.

A Poisson batch holds j of a group's k examples, j binomial, and they move a clipped sum by at most
j C. So a release reveals at most what a mixture of Gaussians at 0, 1, ..., k clip norms, weighed by
the binomial law, reveals beside one at 0 (Ganesh 2024, arXiv 2401.10294, Theorem 3.1). Its Renyi
divergences, in both directions, are integrals over one number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

from lightning_fedleak.defenses.accounting import accounting
from lightning_fedleak.defenses.accounting.ledger import check_count, check_release
from lightning_fedleak.defenses.accounting.renyi import ORDERS, Floats, epsilons_of_rdp

MOST_TERMS = 1 << 26  # terms of a release's divergences; orders that need more are not computed
STEPS = 4  # of the integral in a standard deviation; more take longer. Not tuned
TAIL = 12  # standard deviations beyond the last peak where the integral ends; the rest is 1e-32


def group_epsilon(history: Sequence[tuple[float, float, int]], delta: float, rows: int) -> float:
    """Return an upper bound, by RDP, on the epsilon of examples added or removed together.

    Args:
        history: noise multiplier, sample rate and count of every kind of release, fixed before the
            run, as :attr:`Accountant.history
            <lightning_fedleak.defenses.accounting.Accountant.history>` gives it.
        delta: in (0, 1).
        rows: k, examples of the group.

    Returns:
        0 for no releases; infinite from ``LARGEST_EPSILON`` on.

    Raises:
        DefenseError: a value out of range.
    """
    check_count(rows, "rows")
    accounting.check_delta_for(delta, 1)
    for row in history:
        check_release(*row)
    if not history:
        return 0.0
    if min(row[0] for row in history) < accounting.LEAST_NOISE:
        return math.inf
    both = np.zeros((2, len(ORDERS)))
    for sigma, rate, count in history:
        both = both + count * group_rdp(sigma, rate, rows)
    epsilon = max(float(epsilons_of_rdp(rdp, delta).min()) for rdp in both)
    return epsilon if epsilon <= accounting.LARGEST_EPSILON else math.inf


@functools.lru_cache(maxsize=64)
def group_rdp(noise_multiplier: float, sample_rate: float, rows: int) -> Floats:
    """Return (2, len(ORDERS)) Renyi DP of a release, of a group removed and one added; read-only.

    Args:
        noise_multiplier: sigma.
        sample_rate: chance of each example to be in the batch.
        rows: k.
    """
    orders, width = np.asarray(ORDERS), noise_multiplier / STEPS
    rdp = np.full((2, len(orders)), np.inf)
    ends = np.ceil((orders * rows / noise_multiplier + TAIL) * STEPS)
    usable = np.flatnonzero(ends * 2 * (rows + 1) <= MOST_TERMS)
    if sample_rate == 1:
        rdp[:] = orders * (rows / noise_multiplier) ** 2 / 2
    elif len(usable):
        x = np.arange(-ends[usable[-1]], ends[usable[-1]] + 1) * width
        loss = np.full(len(x), -np.inf)
        for j, chance in enumerate(binom.logpmf(np.arange(rows + 1), rows, sample_rate)):
            np.logaddexp(loss, chance + j * (x - j / 2) / noise_multiplier**2, out=loss)
        base = -((x / noise_multiplier) ** 2) / 2 - math.log(STEPS * math.sqrt(2 * math.pi))
        for i in usable:
            order = orders[i]
            rdp[0, i] = logsumexp(base + order * loss) / (order - 1)
            rdp[1, i] = logsumexp(base - (order - 1) * loss) / (order - 1)
    np.maximum(rdp, 0.0, out=rdp)
    rdp.flags.writeable = False
    return rdp
