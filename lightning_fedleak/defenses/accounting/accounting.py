"""The epsilon of DP-SGD's releases at a delta, by Opacus' accountants.

The unit of privacy is one training example, added or removed. A release is a sum of per-sample
gradients of norm at most C, plus Gaussian noise of standard deviation ``noise_multiplier * C``. Its
batch holds every example of the client independently with probability ``sample_rate`` (Poisson
sampling). Epsilon covers releases only. It does not cover leakage logs, validation metrics and
decisions that depend on the data.

- ``"rdp"``: Renyi DP of the sampled Gaussian mechanism (Mironov, Talwar & Zhang 2019), added up for
  each order and converted by Balle et al. 2020, Theorem 21. It takes microseconds per step.
- ``"prv"``: numerical composition of privacy loss random variables (Gopi, Lee & Wutschitz 2021).
  It is tighter and slower. The reported epsilon is the upper end of its error interval, or RDP's
  epsilon if that is smaller: both are upper bounds. If delta is so small that float64's rounding
  matters (below ``4.4e-15`` times the number of releases), RDP's epsilon is reported.

Both also cover batches of a fixed size, drawn without replacement
(``sampling="without_replacement"``): see Zhu, Dong & Wang 2022 and the end of this text. The number
of examples is public then, and neighbouring data sets differ in one example that is replaced.

Epsilon is reported as infinite if it exceeds :data:`MAX_EPSILON`, or if a noise multiplier is
below :data:`MIN_NOISE`. In the second case PRV is not called: its mesh covers the whole range of
the privacy loss, which grows with ``1 / noise_multiplier ** 2`` (at 1e-3 it needs terabytes), and
``exp`` of a loss above 709 overflows float64. Such an epsilon means no protection: one full-batch
step at a noise multiplier of 0.05 has an epsilon of 284 at delta 1e-5.

**Without replacement.** Neighbouring datasets differ in one example that is replaced. Zhu, Dong &
Wang 2022, Theorem 11, bounds one release by two pairs of distributions. Let P and Q be two
Gaussians whose means differ by the sensitivity, and q the share of the examples in a batch. The
first pair is ``(1 - q) Q + q P`` against Q, for likelihood ratios of at least 1. The second is P
against ``(1 - q) P + q Q``, for ratios below 1. Over several releases neither pair dominates the
other. Together they are the privacy curve of one pair (A, B), which composes: its privacy losses
above 0 are of the first pair, its losses below 0 of the second, and the rest of the mass is at 0.

By symmetry one function gives all losses. With sigma the noise multiplier, for x above the mid
1/2 of the two means::

    g(x) = log(1 - q + q exp((x - 1/2) / sigma^2)),  x > 1/2

Under A a loss g(x) has the density ``phi(x) exp(g(x))``, and a loss -g(x) the density ``phi(x)`` of
N(0, sigma^2). Only one of the two pairs, composed with itself, would be a lower bound.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.fft import next_fast_len
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr

from lightning_fedleak.defenses.accounting import ledger
from lightning_fedleak.defenses.base import Curve, DefenseError, check_choice, check_number
from lightning_fedleak.extras import require_package

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""The Renyi orders at which divergences are computed."""

MAX_NODES = 1 << 17  # limit of an integral's nodes; above it the RDP without sampling is used
NODES = 8  # Gauss-Legendre nodes in a panel, which is at most sigma wide. Not tuned
TAIL = 12  # standard deviations after the last peak where the integral ends; the rest is 1e-32


SamplingScheme = Literal["poisson", "without_replacement"]


def rdp_of(
    noise_multiplier: float, sample_rate: float, sampling: SamplingScheme = "poisson"
) -> Floats:
    """Return (len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only.

    Args:
        noise_multiplier: The standard deviation of the noise over the largest distance between the
            sums of two neighbouring datasets.
        sample_rate: The share of the examples in a batch: on average, or of a fixed-size batch.
        sampling: The sampling scheme.
    """
    if sampling == "without_replacement" and sample_rate < 1:
        return rdp_without_replacement(noise_multiplier, sample_rate, ORDERS)
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
    """Return the Renyi DP (len(ORDERS),) of one release under Poisson sampling; read-only."""
    rdp = np.array([_rdp_at(order, noise_multiplier, sample_rate) for order in ORDERS])
    rdp.flags.writeable = False
    return rdp


@functools.lru_cache(maxsize=1 << 16)
def _rdp_at(order: float, noise_multiplier: float, sample_rate: float) -> float:
    """Return the Renyi DP of one release under Poisson sampling at one order."""
    check_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp = float(
        compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=order)
    )
    return rdp if rdp >= 0 else math.inf


def min_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return the minimum of :func:`epsilons_of_rdp` for releases under Poisson sampling.

    A bisection computes about a tenth of the orders, because epsilon falls and then rises with the
    order: (order - 1) epsilon is convex in the order. For the Renyi DP this is Corollary 2 of van
    Erven & Harremoes 2014; for the conversion it follows from the second derivative,
    1 / (order - 1) - 1 / order. If an epsilon is infinite, all orders are computed.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release.
        delta: The delta, in (0, 1).
    """
    events, terms = list(history), conversion_terms(delta)

    @functools.cache
    def epsilon_at(index: int) -> float:
        rdp = sum(count * _rdp_at(ORDERS[index], sigma, q) for sigma, q, count in events)
        return float(rdp + terms[index])

    low, high = 0, len(ORDERS) - 1
    while low < high:
        mid = (low + high) // 2
        if not math.isfinite(epsilon_at(mid)) or not math.isfinite(epsilon_at(mid + 1)):
            return max(0.0, min(map(epsilon_at, range(len(ORDERS)))))
        low, high = (low, mid) if epsilon_at(mid) <= epsilon_at(mid + 1) else (mid + 1, high)
    return max(0.0, epsilon_at(low))


def epsilons_of_rdp(rdp: Floats, delta: float) -> Floats:
    """Return the epsilon (len(ORDERS),) of each order, by Balle et al. 2020, Theorem 21."""
    return np.maximum(rdp + conversion_terms(delta), 0.0)


def deltas_of_rdp(rdp: Floats, epsilons: Floats) -> Floats:
    """Return the smallest delta over all orders for each epsilon, by the same theorem."""
    orders = np.asarray(ORDERS)
    logs = (orders - 1) * (rdp + np.log1p(-1 / orders) - epsilons[:, None]) - np.log(orders)
    deltas: Floats = np.exp(np.minimum(logs.min(1), 0.0))
    return deltas


def conversion_terms(delta: float) -> Floats:
    """Return the terms (len(ORDERS),) that are added to the Renyi DP for epsilon at ``delta``."""
    orders = np.asarray(ORDERS)
    terms: Floats = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return terms


def check_opacus() -> None:
    """Raise a :class:`DefenseError` if Opacus is missing."""
    with require_package("dp", "accounting for DP-SGD needs Opacus", DefenseError):
        import opacus.accountants  # noqa: F401


@functools.lru_cache(maxsize=256)
def rdp_without_replacement(
    noise_multiplier: float, sample_rate: float, renyi_orders: tuple[float, ...]
) -> Floats:
    """Return the Renyi DP (K,) of one release, of A against B, at K orders; read-only.

    The integral is computed by Gauss-Legendre quadrature in panels. The RDP without sampling is an
    upper bound too.

    Args:
        noise_multiplier: Sigma: the standard deviation of the noise over the largest distance
            between the sums of two neighbouring datasets.
        sample_rate: The sample rate q, below 1.
        renyi_orders: The orders, above 1, in ascending order.
    """
    orders = np.asarray(renyi_orders)
    rdp = orders / 2 / noise_multiplier**2 if noise_multiplier else np.full(len(orders), np.inf)
    width = min(noise_multiplier, noise_multiplier**2)
    ends = NODES * np.ceil((orders + TAIL * noise_multiplier) / width) if width else orders * np.inf
    usable = np.flatnonzero(ends <= MAX_NODES)
    if len(usable):
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        panels = int(ends[usable[-1]]) // NODES
        x = 0.5 + width * np.add.outer(np.arange(panels), (nodes + 1) / 2).ravel()
        scale = width / 2 / noise_multiplier / math.sqrt(2 * math.pi)
        base = np.log(np.tile(weights, panels) * scale) - (x / noise_multiplier) ** 2 / 2
        tilt = (x - 0.5) / noise_multiplier**2
        loss = np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + tilt)
        for i in usable:
            order, domain = orders[i], slice(int(ends[i]))
            # Integrate the moment minus 1, because all its terms are positive:
            # phi (exp(order g) + exp((1 - order) g) - exp(g) - 1).
            terms = base[domain] + order * loss[domain]
            for power in (order - 1, order):
                terms = terms + np.log(-np.expm1(-power * loss[domain]))
            rdp[i] = min(rdp[i], np.logaddexp(0, logsumexp(terms)) / (order - 1))
    rdp.flags.writeable = False
    return rdp


PRV_POINTS = 2**21  # approximate limit of the points of PRV's mesh; more: slower, a smaller error
PRV_ERROR = 0.002  # allowed error of PRV's epsilon, as a share of the scale passed. Not tuned
PRV_MAX_LOSS = 650.0  # largest privacy loss for which PRV is called; exp(709) overflows float64

AccountantKind = Literal["prv", "rdp"]
Trust = Literal["local", "central"]  # in the server: it sees each update, or only their sum
History = tuple[tuple[float, float, int], ...]
Releases = Sequence[tuple[float, float, int]]
"""Noise multiplier, sample rate and count of every kind of release."""

MIN_NOISE = 0.05  # noise multiplier below which epsilon is infinite; see the module's docstring
MAX_EPSILON = 200.0  # above it epsilon is infinite, because it means no protection
MAX_NOISE = 1e6  # largest noise multiplier that noise_multiplier_for tries. Not tuned
CURVE_POINTS = 64  # pairs of a curve; at 32 the TPR that a curve allows is .6% larger (sigma 1)
MIN_DELTA = 1e-9  # smallest delta of a curve; events rarer than delta refute nothing


class _WithoutReplacementPRV:
    """The privacy loss of sampling without replacement, in the form that Opacus' PRV code takes.

    It is the loss of A against B under A, for the pair (A, B) of the module ``renyi``.

    Args:
        sample_rate: The sample rate q, below 1.
        noise_multiplier: Sigma: the standard deviation of the noise over the largest distance
            between the sums of two neighbouring datasets.
    """

    def __init__(self, sample_rate: float, noise_multiplier: float) -> None:
        self._rate = sample_rate
        self._sigma = noise_multiplier

    def cdf(self, t: Floats | float) -> Floats:
        """Return the probability that the loss is at most t."""
        q, sigma = self._rate, self._sigma
        x = 0.5 + sigma**2 * np.log1p(np.expm1(np.abs(t)) / q)
        tail = ndtr(-x / sigma)
        cdf: Floats = np.where(
            np.asarray(t) < 0, tail, 1 - (1 - q) * tail - q * ndtr((1 - x) / sigma)
        )
        return cdf


def prv_epsilon(
    history: Releases, delta: float, epsilon: float, rdp: Floats, sampling: SamplingScheme
) -> float:
    """Return PRV's upper bound with an error below 0.6% of itself, if its mesh allows.

    The error is a share (``PRV_ERROR``) of the scale that PRV is called with. If RDP's bound is
    many times the result, as at a small sample rate, PRV is called again at twice the result.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release.
        delta: The delta of the result.
        epsilon: RDP's bound, which is returned if PRV has no smaller one.
        rdp: The Renyi DP of all releases together, at ``ORDERS``.
        sampling: The sampling scheme of all releases.
    """

    def evaluate(composed: Any, delta_error: float, error: float) -> Floats:
        # [2] is the upper end of Opacus' interval of epsilon.
        return np.array([composed.compute_epsilon(delta, delta_error, error)[2]])

    scale = epsilon
    while True:
        bound = evaluate_prv(history, delta, scale, rdp, evaluate, sampling)
        if bound is not None and math.isfinite(bound[0]):
            epsilon = min(epsilon, max(float(bound[0]), 0.0))
        if not 0 < epsilon < scale / 3:
            return epsilon
        scale = 2 * epsilon


def evaluate_prv(
    history: Releases,
    delta: float,
    epsilon: float,
    rdp: Floats,
    evaluate: Callable[[Any, float, float], Floats],
    sampling: SamplingScheme = "poisson",
) -> Floats | None:
    """Return values that ``evaluate`` computes from PRV's composition of all releases.

    It uses the parts of ``opacus.accountants.PRVAccountant`` with three differences. Renyi
    divergences, which take most of Opacus' time, are cached. The mesh is as fine as an error of
    ``PRV_ERROR * epsilon`` needs, and not larger than about ``PRV_POINTS``. And rounding is allowed
    for: the T-th power of a Fourier transform in float64 shifts delta by up to about ``0.3 T eps``
    (measured against the Gaussian mechanism), by which Opacus understates epsilon at a tiny delta
    (3.6% at delta 1e-13 after 10,000 releases). More than six times that shift is added.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release.
        delta: The delta of the result.
        epsilon: A scale that is about as large as the resulting epsilon, or larger.
        rdp: The Renyi DP of all releases together, at ``ORDERS``.
        evaluate: A function of the composition, the error of a delta, and the error of an epsilon.
        sampling: The sampling scheme of all releases.

    Returns:
        The values; None if PRV cannot compute them: delta is within rounding, or the privacy loss
        is above :data:`PRV_MAX_LOSS`, or Opacus fails, which is warned of.
    """
    from opacus.accountants.analysis import prv

    steps = sum(row[2] for row in history)
    # At most 2 T eps, more than six times the measured shift of 0.3 T eps.
    rounding = 2 * steps * float(np.finfo(np.float64).eps)
    if rounding > delta / 10:
        return None
    delta_error = max(delta / 1000, rounding)
    loss = max(
        float(epsilons_of_rdp(rdp, delta_error / 4).min()),
        *(
            float(epsilons_of_rdp(rdp_of(sigma, rate, sampling), delta_error / (8 * steps)).min())
            for sigma, rate, _ in history
        ),
    )
    if loss > PRV_MAX_LOSS:
        return None
    # The width of the mesh's intervals is error / root, and 3 is added to the largest loss, as in
    # Opacus' accountant.
    root = math.sqrt(steps * math.log(12 / delta_error) / 2)
    error = max(PRV_ERROR * epsilon, 2 * (loss + 3) * root / PRV_POINTS)
    half_width = max(loss, error) + 3  # of the mesh

    def loss_of(sigma: float, rate: float) -> Any:
        fixed = sampling == "without_replacement"  # batches of a fixed size
        return (_WithoutReplacementPRV if fixed else prv.PoissonSubsampledGaussianPRV)(rate, sigma)

    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = error / root
            points = _fast_length(2 * math.ceil(half_width / width) + 4)
            half_width = (points / 2 - 1.5) * width  # create_aligned then makes `points` points
            mesh = prv.Domain.create_aligned(-half_width, half_width, width)
            releases = [
                prv.discretize(
                    prv.TruncatedPrivacyRandomVariable(
                        loss_of(sigma, rate), mesh.t_min, mesh.t_max
                    ),
                    mesh,
                )
                for sigma, rate, _ in history
            ]
            composed = prv.compose_heterogeneous(
                dprvs=releases, num_self_compositions=[row[2] for row in history]
            )
            return evaluate(composed, delta_error, error)
    except (RuntimeError, ValueError) as reason:
        warnings.warn(
            f"PRV has no result at delta {delta:g} ({reason}): RDP's epsilon is reported, which "
            "is an upper bound too",
            stacklevel=2,
        )
        return None


def _fast_length(points: int) -> int:
    """Return the next even length of a fast FFT; other lengths take several times as long."""
    length = int(next_fast_len(points, real=True))
    while length % 2:
        length = int(next_fast_len(length + 1, real=True))
    return length


def epsilon_of(
    history: Releases, delta: float, kind: AccountantKind, sampling: SamplingScheme = "poisson"
) -> float:
    """Return the epsilon of releases with fixed noise, at ``delta``: an upper bound.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release, in any order.
        delta: The delta, in (0, 1).
        kind: The accountant, ``"prv"`` or ``"rdp"``.
        sampling: The sampling scheme of all releases.

    Returns:
        The epsilon; 0 for no releases, and ``inf`` above :data:`MAX_EPSILON` or with a noise
        multiplier below :data:`MIN_NOISE`.

    Raises:
        DefenseError: A value is out of range, or Opacus is missing.
    """
    check_choice("accountant", kind, ("prv", "rdp"))
    check_choice("sampling", sampling, ("poisson", "without_replacement"))
    check_number("delta", delta, above=0, below=1)
    for row in history:
        ledger.check_release(*row)
    if not history:
        return 0.0
    if min(row[0] for row in history) < MIN_NOISE:
        return math.inf
    if kind == "rdp" and sampling == "poisson":
        epsilon = min_epsilon(history, delta)
    else:
        rdp = composed_rdp(history, sampling)
        epsilon = float(epsilons_of_rdp(rdp, delta).min())
        if kind == "prv" and 0 < epsilon < math.inf:
            epsilon = prv_epsilon(history, delta, epsilon, rdp, sampling)
    return epsilon if epsilon <= MAX_EPSILON else math.inf


def composed_rdp(history: Releases, sampling: SamplingScheme) -> Floats:
    """Return the Renyi DP (len(ORDERS),) of all releases together."""
    terms = (count * rdp_of(sigma, rate, sampling) for sigma, rate, count in history)
    return sum(terms, np.zeros(len(ORDERS)))


def curve_of(
    history: Releases, kind: AccountantKind, sampling: SamplingScheme = "poisson"
) -> Curve:
    """Return pairs (epsilon, delta) that all hold for releases with fixed noise.

    Together the pairs bound every attack more tightly than the pair at one delta does. Epsilons are
    evenly spaced from 0 to the epsilon at :data:`MIN_DELTA`.

    Args:
        history: The noise multiplier, sample rate and count of every kind of release, in any order.
        kind: The accountant, ``"prv"`` or ``"rdp"``.
        sampling: The sampling scheme of all releases.

    Returns:
        The pairs; only ``(0, 0)`` for no releases, and none if epsilon is infinite.

    Raises:
        DefenseError: A value is out of range, or Opacus is missing.
    """
    max_epsilon = epsilon_of(history, MIN_DELTA, kind, sampling)
    if not history:
        return ((0.0, 0.0),)
    if math.isinf(max_epsilon):
        return ()
    epsilons = np.linspace(0.0, max_epsilon, CURVE_POINTS)
    rdp = composed_rdp(history, sampling)
    deltas = deltas_of_rdp(rdp, epsilons)
    if kind == "prv" and max_epsilon > 0:

        def evaluate(composed: Any, delta_error: float, error: float) -> Floats:
            estimates = [composed.compute_delta_estimate(e - error) for e in epsilons]
            return np.maximum(estimates, 0.0) + delta_error

        bounds = evaluate_prv(history, MIN_DELTA, max_epsilon, rdp, evaluate, sampling)
        deltas = deltas if bounds is None else np.fmin(deltas, bounds)
    deltas[-1] = min(deltas[-1], MIN_DELTA)
    return tuple(zip(epsilons.tolist(), deltas.tolist(), strict=True))


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    kind: AccountantKind = "prv",
    sampling: SamplingScheme = "poisson",
) -> float:
    """Return the noise multiplier at which ``steps`` releases cost at most ``target_epsilon``.

    Its relative error is about 1e-4, and it is rounded up: its epsilon never exceeds the target.

    Args:
        target_epsilon: The epsilon to stay within, in (0, MAX_EPSILON].
        target_delta: The delta of that epsilon, in (0, 1).
        sample_rate: The sample rate of every release, in (0, 1].
        steps: The number of releases.
        kind: The accountant, ``"prv"`` or ``"rdp"``.
        sampling: The sampling scheme of the releases.

    Raises:
        DefenseError: A value is out of range, or the target needs more noise than
            :data:`MAX_NOISE` or less than :data:`MIN_NOISE`.
    """
    check_number("target_epsilon", target_epsilon, above=0, at_most=MAX_EPSILON)

    @functools.cache
    def excess(log_noise: float, accountant: AccountantKind) -> float:
        """Return the log of epsilon over the target, which falls with the noise."""
        events = [(math.exp(log_noise), sample_rate, steps)]
        epsilon = epsilon_of(events, target_delta, accountant, sampling)
        # Finite values stand for epsilons 0 and infinity, as brentq needs.
        return math.log(max(epsilon, 1e-12) / target_epsilon) if epsilon < math.inf else 100.0

    lowest, highest = math.log(MIN_NOISE), math.log(MAX_NOISE)
    if excess(highest, "rdp") > 0:
        raise DefenseError(f"{target_epsilon=} needs too much noise: raise it, or lower steps")
    if excess(lowest, "rdp") <= 0:
        raise DefenseError(f"{target_epsilon=} needs less noise than {MIN_NOISE}: lower it")
    high = _find_root(functools.partial(excess, accountant="rdp"), lowest, highest)
    if kind == "prv":
        low = high - 0.2  # PRV needs less noise than RDP: the first step down, in logs
        while low > lowest and excess(low, accountant="prv") <= 0:
            low, high = low - 2 * (high - low), low
        high = _find_root(functools.partial(excess, accountant="prv"), max(lowest, low), high)
    return math.exp(high)


def check_delta_for(delta: float, examples: int) -> None:
    """Raise an error for a delta that would allow the release of a random example.

    Args:
        delta: The delta of the guarantee.
        examples: The number of examples of the client.

    Raises:
        DefenseError: ``delta`` is not above 0 and below ``1 / examples``.
    """
    check_number("target_delta", delta, above=0, below=1 / examples, hint="1 / examples")


def _find_root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return a point just after a falling function crosses 0, so that it is not positive there."""
    if excess(low) <= 0:
        return low
    root = float(brentq(excess, low, high, xtol=5e-5, rtol=1e-12))
    step = 2e-5  # in the log of the noise multiplier, as is the error xtol
    while excess(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root
