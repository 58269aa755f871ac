"""Lemma 2 for tokens of a known law: Fig. 5 of Vu et al. 2024."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, stdtrit

from benchmarks.papers import lemma
from lightning_fedleak.evaluation.metrics.rates import Rate, proportion

Law = Literal["one_hot", "spherical", "gaussian"]
"""The distribution of a token. One-hot: a random basis vector, no two alike, as the lemma asks of
data that the target is not in (i.i.d. ones would collide, and then Delta is 0). Spherical: uniform
on the unit sphere. Gaussian: independent standard normal components."""
LAWS: tuple[Law, ...] = ("one_hot", "spherical", "gaussian")
LENGTHS = (5, 10, 15)  # tokens of a sentence in Fig. 5


def beta_of(law: Law, d: int) -> float:
    """Return the beta of Table 6."""
    return 10 / d if law == "gaussian" else 10.0


_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class SimulatedBound:
    """Lemma 2 for tokens of a known law, over simulated data sets.

    Attributes:
        condition_holds: share of data sets in which (4) holds; in the others (5) is no bound.
        p_box: the probability in (5).
        bound: (5), Fig. 5 left; not clipped at 0.
        random_direction: (5) with the second head's direction u uniform on the sphere, as
            Algorithm 1 draws it.
    """

    condition_holds: Rate
    p_box: lemma.Estimate
    bound: lemma.Estimate
    random_direction: lemma.Estimate


def projection_probability(law: Law, dim: int, radius: ArrayLike) -> lemma.Floats:
    """``P_proj``: P(|<x, v>| / |v| <= radius) for independent x, v, in closed form.

    One-hot: 1, as different basis vectors are orthogonal. Gaussian: the component is standard
    normal. Spherical: its square is Beta(1/2, (d - 1)/2) distributed, whatever the law of v.
    """
    r = np.maximum(lemma.floats(radius), 0.0)
    if law == "one_hot":
        return np.ones_like(r)
    if law == "gaussian":
        return lemma.floats(erf(r / math.sqrt(2)))
    return lemma.direction_probability(dim, r)


def box_probability(
    law: Law, dim: int, half_width: float, *, draws: int = 10_000, seed: int = 0
) -> Rate:
    """``P_box``: P(every component of a token is within ``half_width`` of the law's mean).

    Exact (low = high) for one-hot and Gaussian tokens. For spherical ones by Monte Carlo with a
    Clopper-Pearson interval, but where that cannot matter: 0 below ``1/sqrt(d)``, as the largest
    component is not smaller; 1 from 1 on; and where the product of the components' own
    probabilities is below 1e-6, that product. It bounds ``P_box`` from above, since the squares of
    the components, Dirichlet distributed, are negatively associated (Joag-Dev and Proschan 1983).
    """
    if law == "one_hot":
        exact = float(half_width >= 1 - 1 / dim)
    elif law == "gaussian":
        exact = float(max(erf(half_width / math.sqrt(2)), 0.0) ** dim)
    elif half_width >= 1 or half_width < 1 / math.sqrt(dim):
        exact = float(half_width >= 1)
    else:
        above = float(lemma.direction_probability(dim, half_width) ** dim)
        if above < _NEGLIGIBLE:
            return Rate(above, 0.0, above)
        inside = _largest_components(dim, draws, np.random.default_rng(seed)) <= half_width
        return proportion(int(inside.sum()), draws, lemma.CONFIDENCE)
    return Rate(exact, exact, exact)


def simulate_bound(
    law: Law, dim: int, tokens: int, beta: float, *, runs: int = 200, box_draws: int = 100,
    seed: int = 0,
) -> SimulatedBound:  # fmt: skip
    """(5) for data of a known law, averaged over simulated data sets of one sentence.

    Delta and M of each data set come from its tokens' products. Those of Gaussian tokens are drawn
    as such (Bartlett's decomposition of a Wishart matrix), which is exact and costs the same for
    every d. ``P_proj`` is in closed form, ``P_box`` as :func:`box_probability` has it, with
    ``box_draws`` tokens of its own for each run.

    Args:
        law: of a token.
        dim: d_X, at least 2; for one-hot at least ``tokens``.
        tokens: l_X, at least 2.
        beta: what multiplies the products; Fig. 5 has 10 (one-hot, spherical), 10 / d (Gaussian).
        runs: data sets, at least 2.
        box_draws: tokens drawn in a run for ``P_box``.
        seed: of an own generator.

    Returns:
        Means over the runs with Student's t intervals.
    """
    rng = np.random.default_rng(seed)
    sample = [_separation_and_norm(law, dim, tokens, rng) for _ in range(runs)]
    delta, norm = (np.array(column) for column in zip(*sample, strict=True))
    needed = lemma.condition(beta, tokens, norm)
    error = lemma.retrieval_error(beta, tokens, delta, norm)
    radius = lemma.projection_radius(beta, tokens, norm)
    p_proj = projection_probability(law, dim, radius)
    p_direction = p_proj if law != "one_hot" else lemma.direction_probability(dim, radius)
    widths = [(3 * float(e), int(rng.integers(2**63))) for e in error]
    boxes = (box_probability(law, dim, w, draws=box_draws, seed=s) for w, s in widths)
    p_box = np.array([box.value for box in boxes])
    holds = int((delta >= needed).sum())
    return SimulatedBound(
        condition_holds=proportion(holds, runs, lemma.CONFIDENCE),
        p_box=_within_unit(_mean(p_box)),
        bound=_mean(lemma.advantage_bound(p_proj, p_box, tokens, p_proj)),
        random_direction=_mean(lemma.advantage_bound(p_proj, p_box, tokens, p_direction)),
    )


def _separation_and_norm(
    law: Law, dim: int, tokens: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Delta and M of one data set."""
    if law == "one_hot":
        return 1.0, 1.0
    width = min(tokens, dim)
    factor = np.tril(rng.standard_normal((tokens, width)))
    diagonal = np.arange(width)
    freedom = dim - diagonal
    factor[diagonal, diagonal] = np.sqrt(rng.chisquare(freedom))
    if law == "spherical":
        factor /= np.linalg.norm(factor, axis=1, keepdims=True)
    products = factor @ factor.T
    squared_norms = np.diagonal(products).copy()
    np.fill_diagonal(products, -np.inf)
    return float((squared_norms - products.max(1)).min()), float(np.sqrt(squared_norms.max()))


def _largest_components(dim: int, draws: int, rng: np.random.Generator) -> lemma.Floats:
    """(draws,) the largest absolute component of points that are uniform on the sphere."""
    results = np.empty(draws)
    step = max(1, 2**22 // dim)
    for start in range(0, draws, step):
        x = rng.standard_normal((min(step, draws - start), dim))
        results[start : start + step] = np.abs(x).max(1) / np.linalg.norm(x, axis=1)
    return results


def _mean(values: lemma.Floats) -> lemma.Estimate:
    """Mean over runs with Student's t interval."""
    n = len(values)
    value = float(values.mean())
    if not math.isfinite(value):
        return lemma.Estimate(value, math.nan, math.nan, math.nan)
    if values.min() == values.max():
        return lemma.Estimate(float(values[0]), 0.0, float(values[0]), float(values[0]))
    error = float(values.std(ddof=1)) / math.sqrt(n)
    reach = float(stdtrit(n - 1, 1 - (1 - lemma.CONFIDENCE) / 2)) * error
    return lemma.Estimate(value, error, value - reach, value + reach)


def _within_unit(estimate: lemma.Estimate) -> lemma.Estimate:
    return replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))
