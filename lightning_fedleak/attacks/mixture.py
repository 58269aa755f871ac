"""A two-component Gaussian mixture in one dimension, fitted in time that does not grow with EM.

In one dimension the data enters EM only through ``n``, ``sum x`` and ``sum x**2`` weighted by the
responsibilities. Values are therefore collected once into bins that keep those three sums, and EM
runs on the bins: with one responsibility per bin it is a variational EM whose objective is a lower
bound on the log-likelihood, tight as the bins get narrow. The values themselves are read only for
the start and for a few exact EM steps at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_Parameters = tuple[float, float, float, float, float]
_Step = Callable[[_Parameters], "tuple[_Parameters, float] | None"]

_LOG_2PI = math.log(2 * math.pi)
_START_VALUES = 8192
_VARIANCE_FLOOR = 1e-20
_LOGARITHMS = (0, 3, 4)
_REBINNINGS = 12
_FINEST = 0.3


@dataclass(frozen=True)
class Mixture:
    """Two Gaussians, the narrow one first.

    Attributes:
        weights: (2,) float64 on the CPU, positive, summing to 1.
        means: (2,) float64 on the CPU, in the unit of the values.
        variances: (2,) float64 on the CPU, in that unit squared; ``variances[0] <= variances[1]``.
        log_likelihood: mean log density of the values in nats; NaN for a start that was not fitted.
        iterations: EM steps taken, on bins and on values together.
        converged: whether the last steps on the bins moved no parameter by more than the
            tolerance. False also where a component died out.
    """

    weights: Tensor
    means: Tensor
    variances: Tensor
    log_likelihood: float = math.nan
    iterations: int = 0
    converged: bool = False

    @property
    def variance_ratio(self) -> float:
        """Variance of the wide component over that of the narrow one, at least 1."""
        return float(self.variances[1] / self.variances[0])

    def log_density(self, values: Tensor) -> Tensor:
        """Log density of each value in nats: (n,) in, (n,) float64 on the CPU out."""
        x = values.detach().cpu().double()[..., None]
        distance = (x - self.means) ** 2 / self.variances
        each = self.weights.log() - 0.5 * (_LOG_2PI + self.variances.log() + distance)
        return torch.logsumexp(each, dim=-1)


def tail_start(values: Tensor, tail: float = 0.01) -> Mixture:
    """A start for the fit that uses no randomness: the tails against the centre.

    The wide component gets the share ``tail`` of the values that lie farthest from the median,
    the narrow one the rest: each the mean of its values and their mean square about the *narrow*
    mean, so that a few far values on one side do not start as a component of no width.

    Args:
        values: (n,) finite values, not all alike.
        tail: share of the values that starts in the wide component, between 0 and 1.
    """
    return _tail_start(_checked(values), tail)


def _tail_start(x: Tensor, tail: float) -> Mixture:
    if not 0 < tail < 1:
        raise ValueError(f"tail must lie between 0 and 1, got {tail}")
    total_variance = float(x.var(correction=0))
    if x.numel() > 2 * _START_VALUES:  # a start needs no more
        thinned = x[:: x.numel() // _START_VALUES]
        if not bool((thinned == thinned[0]).all()):
            x = thinned
    distance = (x - x.median()).abs()
    n_far = min(max(round(tail * x.numel()), 1), x.numel() - 1)
    threshold = distance.kthvalue(x.numel() - n_far).values
    far = distance > threshold
    if not far.any():  # more than the share ``tail`` are tied for the largest distance
        far = distance == threshold
    parts = [x[~far], x[far]]
    weights = torch.tensor([p.numel() / x.numel() for p in parts], dtype=torch.float64)
    means = torch.stack([p.mean() for p in parts])
    variances = torch.stack([(p - means[0]).square().mean() for p in parts])
    return Mixture(weights, means, variances.clamp_min(total_variance * _VARIANCE_FLOOR))


def fit_two_gaussians(
    values: Tensor,
    *,
    start: Mixture | float = 0.01,
    bins: int = 2048,
    tolerance: float = 1e-7,
    max_iterations: int = 3000,
    polish: int = 1,
    regularization: float = 0.0,
) -> Mixture:
    """Fits ``w0 N(m0, v0) + w1 N(m1, v1)`` by maximum likelihood.

    EM, accelerated by squared extrapolation (SQUAREM, Varadhan and Roland 2008) that is taken only
    where it does not lower the objective, on bins that are narrow at the centre and grow
    logarithmically into the tails (and anew on finer ones where the narrow component has shrunk to
    their scale); then ``polish`` plain EM steps on the values. The likelihood
    of a mixture has several optima: what is reached is the one EM leads to from ``start``, the
    same as any exact EM from that start. Variances are kept above 1e-20 of the total variance
    (values that are mostly one and the same number would shrink a component to that point).

    Runs in float64 on the CPU whatever the device of ``values``: one copy of n numbers, no
    synchronisation per step, and the same result everywhere.

    Args:
        values: (n,) finite values, n >= 2, not all alike.
        start: where EM starts, or the share of the values that ``tail_start`` puts in the wide
            component.
        bins: number of bins.
        tolerance: EM on the bins ends when a step moves neither the log odds of the weights, nor
            a mean in its own standard deviation, nor a log variance by more than this.
        max_iterations: EM steps on the bins at most.
        polish: EM steps on the values themselves.
        regularization: added to both variances in every step, in the unit of the values squared:
            what scikit-learn calls ``reg_covar`` (1e-6 there). With it EM ends near, not at, a
            maximum of the likelihood.

    Raises:
        ValueError: too few values, non-finite ones, or all alike.
    """
    values = _checked(values)
    if not isinstance(start, Mixture):
        start = _tail_start(values, start)
    total_variance = float(values.var(correction=0))
    mixture, iterations, converged = start, 0, False
    for _ in range(_REBINNINGS):
        # Centre and unit of the narrow component keep x and x**2 of the bulk near one.
        centre = float(mixture.means[0])
        unit = math.sqrt(max(float(mixture.variances[0]), total_variance * _VARIANCE_FLOOR))
        x = (values - centre) / unit
        floor, added = total_variance * _VARIANCE_FLOOR / unit**2, regularization / unit**2
        theta = _pack(mixture, centre, unit)
        step = _em_step(*_binned(x, bins), floor, added)
        theta, steps, converged = _accelerate(step, theta, tolerance, max_iterations - iterations)
        iterations += steps
        mixture = _unpack(theta, centre, unit, math.nan, iterations, converged)
        if not converged or float(mixture.variances[0]) >= (_FINEST * unit) ** 2:
            break
    exact = _em_step(torch.stack([torch.ones_like(x), x, x * x]), None, floor, added)
    log_likelihood = math.nan
    for polished in range(polish + 1):
        moved = exact(theta)
        if moved is None:
            converged = False
            break
        log_likelihood = moved[1]
        if polished < polish:
            theta = moved[0]
            iterations += 1
    return _unpack(theta, centre, unit, log_likelihood - math.log(unit), iterations, converged)


def _checked(values: Tensor) -> Tensor:
    if values.ndim != 1 or values.numel() < 2:
        raise ValueError(f"values must be (n,) with n >= 2, got shape {tuple(values.shape)}")
    x = values.detach().cpu().double()
    if not bool(x.isfinite().all()):
        raise ValueError("values hold NaN or infinity; a mixture has no fit to them")
    if bool((x == x[0]).all()):
        raise ValueError("all values are alike; two Gaussians cannot be told apart in them")
    return x


def _binned(x: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Features (3, b) = 1, mean x, mean x**2 of each non-empty bin, and the counts (b,)."""
    folded = x.float()
    folded = folded.sign() * folded.abs().log1p()
    low, high = folded.min(), folded.max()
    index = ((folded - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
    count = torch.bincount(index, minlength=bins).double()
    first = torch.bincount(index, weights=x, minlength=bins)
    second = torch.bincount(index, weights=x * x, minlength=bins)
    filled = count > 0
    count = count[filled]
    return torch.stack(
        [torch.ones_like(count), first[filled] / count, second[filled] / count]
    ), count


def _em_step(features: Tensor, count: Tensor | None, floor: float, added: float) -> _Step:
    """EM on (3, b) features with counts (None: all one).

    The posterior log odds of the two components are a quadratic in x, so that a step is one
    product for the odds, one sigmoid, and one product for the moments.
    """
    weighted = features if count is None else features * count
    total, total_1, total_2 = weighted.sum(dim=1).tolist()

    def step(theta: _Parameters) -> tuple[_Parameters, float] | None:
        log_odds, m0, m1, log_v0, log_v1 = theta
        v0, v1 = math.exp(log_v0), math.exp(log_v1)
        constant = log_odds - 0.5 * (log_v1 - log_v0 + m1 * m1 / v1 - m0 * m0 / v0)
        quadratic = torch.tensor(
            [constant, m1 / v1 - m0 / v0, 0.5 / v0 - 0.5 / v1], dtype=torch.float64
        )
        odds = quadratic @ features
        posterior = torch.sigmoid(odds)
        # log(w0 N0 + w1 N1) = log(w1 N1) - log(posterior of 1): no cancellation in the tails.
        certainty = logsigmoid(odds)
        wide_distance = total_2 - 2 * m1 * total_1 + m1 * m1 * total
        log_w1 = -math.log1p(math.exp(-log_odds)) if log_odds > -700 else log_odds
        objective = (
            log_w1
            - 0.5 * (_LOG_2PI + log_v1 + wide_distance / (v1 * total))
            - float(certainty.sum() if count is None else certainty @ count) / total
        )
        n1, first_1, second_1 = (weighted @ posterior).tolist()
        n0, first_0, second_0 = (weighted @ (1 - posterior)).tolist()
        if not (n0 > 1e-9 and n1 > 1e-9 and math.isfinite(objective)):
            return None
        m0, m1 = first_0 / n0, first_1 / n1
        v0 = max(second_0 / n0 - m0 * m0, floor) + added
        v1 = max(second_1 / n1 - m1 * m1, floor) + added
        return (math.log(n1 / n0), m0, m1, math.log(v0), math.log(v1)), objective

    return step


def _accelerate(
    step: _Step, theta: _Parameters, tolerance: float, max_iterations: int
) -> tuple[_Parameters, int, bool]:
    """SQUAREM with a monotone safeguard. Returns the parameters, the steps, and convergence."""
    steps = 0
    while steps < max_iterations:
        first = step(theta)
        if first is None:
            return theta, steps, False
        once, _ = first
        second = step(once)
        steps += 2
        if second is None:
            return once, steps, False
        twice, reached = second
        if _moved(once, twice) <= tolerance:
            return twice, steps, True
        change = [b - a for a, b in zip(theta, once, strict=True)]
        bend = [c - 2 * b + a for a, b, c in zip(theta, once, twice, strict=True)]
        length = math.sqrt(sum(d * d for d in change) / max(sum(d * d for d in bend), 1e-300))
        if length > 1:
            jump = [
                p + 2 * length * c + length * length * b
                for p, c, b in zip(theta, change, bend, strict=True)
            ]
            theta = twice
            if max(abs(jump[i]) for i in _LOGARITHMS) < 300:
                landed = step((jump[0], jump[1], jump[2], jump[3], jump[4]))
                steps += 1
                if landed is not None and landed[1] >= reached:
                    theta = landed[0]
        else:
            theta = twice
    return theta, steps, False


def _moved(before: _Parameters, after: _Parameters) -> float:
    """The largest move: log odds, means in standard deviations, log variances."""
    return max(
        abs(after[0] - before[0]),
        abs(after[1] - before[1]) * math.exp(-0.5 * after[3]),
        abs(after[2] - before[2]) * math.exp(-0.5 * after[4]),
        abs(after[3] - before[3]),
        abs(after[4] - before[4]),
    )


def _pack(mixture: Mixture, centre: float, unit: float) -> _Parameters:
    w0, w1 = mixture.weights.tolist()
    m0, m1 = mixture.means.tolist()
    v0, v1 = mixture.variances.tolist()
    if not min(w0, w1, v0, v1) > 0:
        raise ValueError("start: weights and variances must be positive")
    return (
        math.log(w1 / w0),
        (m0 - centre) / unit,
        (m1 - centre) / unit,
        math.log(v0 / unit**2),
        math.log(v1 / unit**2),
    )


def _unpack(
    theta: _Parameters,
    centre: float,
    unit: float,
    log_likelihood: float,
    iterations: int,
    converged: bool,
) -> Mixture:
    log_odds, m0, m1, log_v0, log_v1 = theta
    weights = torch.tensor([-log_odds, log_odds], dtype=torch.float64).sigmoid()
    means = torch.tensor([m0, m1], dtype=torch.float64) * unit + centre
    variances = torch.tensor([log_v0, log_v1], dtype=torch.float64).exp() * unit**2
    order = [0, 1] if log_v0 <= log_v1 else [1, 0]
    return Mixture(
        weights[order], means[order], variances[order], log_likelihood, iterations, converged
    )
