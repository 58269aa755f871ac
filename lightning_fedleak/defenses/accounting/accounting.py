"""The epsilon of DP-SGD's releases at a delta, by Opacus' accountants.

The unit of privacy is one training example, added or removed. A release is a sum of per-sample
gradients of norm at most C, of a batch that holds every example of the client independently with
chance ``sample_rate`` (Poisson sampling), plus Gaussian noise of standard deviation
``noise_multiplier * C``. Only releases are covered, not leakage logs, validation metrics, and
decisions that depend on the data.

- ``"rdp"``: Renyi DP of the sampled Gaussian mechanism (Mironov, Talwar & Zhang 2019), added up for
  each order and converted by Balle et al. 2020, Theorem 21. Microseconds a step.
- ``"prv"``: numerical composition of privacy loss random variables (Gopi, Lee & Wutschitz 2021).
  Tighter and slower. The upper end of its error interval counts, and never more than RDP's
  epsilon, which is an upper bound too. Where delta is so small that float64's rounding matters
  (below ``4e-15`` times the number of releases) RDP's epsilon is reported.

Both also cover batches of a fixed number, drawn without replacement
(``sampling="without_replacement"``): Zhu, Dong & Wang 2022, as ``renyi`` says. The number
of examples is public then, and neighbours differ by one example put in another's place.

Below a noise multiplier of :data:`LEAST_NOISE`, and from :data:`LARGEST_EPSILON` on, epsilon is
reported as infinite and PRV is not called: its mesh covers the whole range of the privacy loss,
which grows with ``1 / noise_multiplier ** 2`` (at 1e-3 it needs terabytes), and ``exp`` of a loss
above 709 is no float64. Such an epsilon means no protection: one full-batch step at a noise
multiplier of 0.05 has an epsilon of 284 at delta 1e-5.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from scipy.fft import next_fast_len
from scipy.optimize import brentq

from lightning_fedleak.defenses.accounting import ledger
from lightning_fedleak.defenses.accounting.renyi import (
    Floats,
    SamplingScheme,
    WithoutReplacementPRV,
    deltas_of_rdp,
    epsilons_of_rdp,
    rdp_of,
)
from lightning_fedleak.defenses.base import Curve, DefenseError
from lightning_fedleak.defenses.checks import check_choice, check_number

PRV_POINTS = 2**21  # points of PRV's mesh, about; more take longer and make the error smaller
PRV_ERROR = 0.002  # error of PRV's answer over the scale that it is called with. Not tuned
PRV_LARGEST_LOSS = 650.0  # privacy loss; exp of one above 709 is no float64

AccountantKind = Literal["prv", "rdp"]
Trust = Literal["local", "central"]
History = tuple[tuple[float, float, int], ...]
Releases = Sequence[tuple[float, float, int]]
"""Noise multiplier, sample rate and count of every kind of release."""

LEAST_NOISE = 0.05  # noise multiplier below which epsilon is infinite; see the module's docstring
LARGEST_EPSILON = 200.0  # above it epsilon is infinite, because it means no protection
MOST_NOISE = 1e6  # largest noise multiplier that noise_multiplier_for tries. Not tuned
CURVE_POINTS = 64  # pairs of a curve; at 32 the TPR that one allows is .6% larger (sigma 1)
LEAST_DELTA = 1e-9  # of a curve; larger: events of a smaller chance than it refute nothing


def prv_epsilon(
    history: Releases, delta: float, epsilon: float, rdp: Floats, sampling: SamplingScheme
) -> float:
    """Return PRV's upper bound with an error below 0.6% of itself, where its mesh allows.

    The error is a share (``PRV_ERROR``) of the scale that PRV is called with. Where RDP's bound is
    many times the answer, as at a small sample rate, PRV is called again with the answer for scale.

    Args:
        history: as for :func:`read_prv`.
        delta: as there.
        epsilon: RDP's bound, which is returned where PRV has none that is smaller.
        rdp: as there.
        sampling: as there.
    """

    def read(composed: Any, delta_error: float, error: float) -> Floats:
        return np.array([composed.compute_epsilon(delta, delta_error, error)[2]])

    scale = epsilon
    while True:
        bound = read_prv(history, delta, scale, rdp, read, sampling)
        if bound is not None and math.isfinite(bound[0]):
            epsilon = min(epsilon, max(float(bound[0]), 0.0))
        if not 0 < epsilon < scale / 3:
            return epsilon
        scale = 2 * epsilon


def read_prv(
    history: Releases,
    delta: float,
    epsilon: float,
    rdp: Floats,
    read: Callable[[Any, float, float], Floats],
    sampling: SamplingScheme = "poisson",
) -> Floats | None:
    """Return what is read off the composition of all releases; None where PRV has none.

    It uses the parts of ``opacus.accountants.PRVAccountant`` with three differences. Renyi
    divergences, which take most of the time there, are stored. The mesh is as fine as ``PRV_ERROR``
    of the answer needs, and not larger than about ``PRV_POINTS``. And rounding is allowed for: the
    T-th power of a Fourier transform in float64 shifts delta by up to about ``0.3 T eps`` (measured
    against the Gaussian mechanism), by which Opacus understates epsilon at a tiny delta (3.6% at
    delta 1e-13 after 10,000 releases). Six times that is added.

    Args:
        history: noise multiplier, sample rate and count of every kind of release.
        delta: of the answer.
        epsilon: about as large as the answer, or larger.
        rdp: of all releases together, at ``ORDERS``.
        read: takes the composition, the error of a delta, and that of an epsilon.
        sampling: of all releases.
    """
    from opacus.accountants.analysis import prv

    steps = sum(row[2] for row in history)
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
    if loss > PRV_LARGEST_LOSS:
        return None
    root = math.sqrt(steps * math.log(12 / delta_error) / 2)
    error = max(PRV_ERROR * epsilon, 2 * (loss + 3) * root / PRV_POINTS)
    half = max(loss, error) + 3

    def loss_of(sigma: float, rate: float) -> Any:
        fixed = sampling == "without_replacement"
        return (WithoutReplacementPRV if fixed else prv.PoissonSubsampledGaussianPRV)(rate, sigma)

    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = error / root
            points = _fast_length(2 * math.ceil(half / width) + 4)
            half = (points / 2 - 1.5) * width  # create_aligned rounds it up to `points` points
            mesh = prv.Domain.create_aligned(-half, half, width)
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
            return read(composed, delta_error, error)
    except (RuntimeError, ValueError) as reason:
        warnings.warn(
            f"PRV has no answer at delta {delta:g} ({reason}): epsilon is that of RDP, an upper "
            "bound too",
            stacklevel=2,
        )
        return None


def _fast_length(least: int) -> int:
    """Return the next even length of a fast FFT; others take several times as long."""
    length = int(next_fast_len(least, real=True))
    while length % 2:
        length = int(next_fast_len(length + 1, real=True))
    return length


def epsilon_of(
    history: Releases, delta: float, kind: AccountantKind, sampling: SamplingScheme = "poisson"
) -> float:
    """Return the epsilon of releases with fixed noise, at ``delta``: an upper bound.

    Args:
        history: noise multiplier, sample rate and count of every kind of release, in any order.
        delta: in (0, 1).
        kind: ``"prv"`` or ``"rdp"``.
        sampling: of all of them.

    Returns:
        0 for no releases; ``inf`` as the module's docstring says.

    Raises:
        DefenseError: a value out of range, or Opacus is missing.
    """
    check_kind(kind, sampling)
    check_probability(delta)
    for row in history:
        ledger.check_release(*row)
    if not history:
        return 0.0
    if min(row[0] for row in history) < LEAST_NOISE:
        return math.inf
    rdp = composed_rdp(history, sampling)
    epsilon = float(epsilons_of_rdp(rdp, delta).min())
    if kind == "prv" and 0 < epsilon < math.inf:
        epsilon = prv_epsilon(history, delta, epsilon, rdp, sampling)
    return epsilon if epsilon <= LARGEST_EPSILON else math.inf


def composed_rdp(history: Releases, sampling: SamplingScheme) -> Floats:
    """Return (len(ORDERS),) Renyi DP of all releases together."""
    terms = (count * rdp_of(sigma, rate, sampling) for sigma, rate, count in history)
    return sum(terms, np.zeros(1))


def curve_of(
    history: Releases, kind: AccountantKind, sampling: SamplingScheme = "poisson"
) -> Curve:
    """Return pairs (epsilon, delta) that all hold for releases with fixed noise.

    Together they limit every test by more than the pair at one delta does. Epsilons lie evenly
    from 0 to that of :data:`LEAST_DELTA`.

    Args:
        history: as for ``epsilon_of``.
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


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    kind: AccountantKind = "prv",
    sampling: SamplingScheme = "poisson",
) -> float:
    """Return the noise multiplier at which ``steps`` releases cost at most ``target_epsilon``.

    It is right to 1e-4 and rounded up: its epsilon never exceeds the target.

    Args:
        target_epsilon: in (0, LARGEST_EPSILON].
        target_delta: in (0, 1).
        sample_rate: in (0, 1].
        steps: number of releases.
        kind: ``"prv"`` or ``"rdp"``.
        sampling: of the releases.

    Raises:
        DefenseError: a value out of range, or a target that needs more noise than
            :data:`MOST_NOISE` or less than :data:`LEAST_NOISE`.
    """
    check_kind(kind, sampling)
    check_probability(target_delta, "target_delta")
    ledger.check_release(1.0, sample_rate)
    ledger.check_count(steps, "steps")
    name, hint = "target_epsilon", "usual values are 1 to 10"
    check_number(name, target_epsilon, above=0, at_most=LARGEST_EPSILON, hint=hint)

    @functools.cache
    def excess(log_noise: float, accountant: AccountantKind) -> float:
        events = [(math.exp(log_noise), sample_rate, steps)]
        epsilon = epsilon_of(events, target_delta, accountant, sampling)
        return math.log(max(epsilon, 1e-12) / target_epsilon) if epsilon < math.inf else 100.0

    lowest, highest = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if excess(highest, "rdp") > 0:
        raise DefenseError(
            f"target_epsilon={target_epsilon!r} needs a noise multiplier above {MOST_NOISE:g} in "
            f"{steps} steps at sample_rate={sample_rate!r}. Raise it or "
            "target_delta, or lower steps or sample_rate."
        )
    if excess(lowest, "rdp") <= 0:
        raise DefenseError(
            f"target_epsilon={target_epsilon!r} needs a noise multiplier below {LEAST_NOISE}, "
            f"which is accounted as no noise: lower target_epsilon, or pass noise_multiplier="
            f"{LEAST_NOISE}"
        )
    high = _find_root(functools.partial(excess, accountant="rdp"), lowest, highest)
    if kind == "prv":
        low = high - 0.2
        while low > lowest and excess(low, accountant="prv") <= 0:
            low, high = 3 * low - 2 * high, low
        high = _find_root(functools.partial(excess, accountant="prv"), max(lowest, low), high)
    return math.exp(high)


def check_delta_for(delta: float, examples: int) -> None:
    """Raise an error for a delta that would allow the release of a random example.

    Args:
        delta: of the guarantee.
        examples: number of examples of the client.

    Raises:
        DefenseError: outside (0, 1), or not below ``1 / examples``.
    """
    check_probability(delta, "target_delta")
    ledger.check_count(examples, "examples")
    if delta >= 1 / examples:
        raise DefenseError(
            f"target_delta={delta!r} must be below 1 / {examples} = {1 / examples:.3g}: else "
            "publishing one of the examples at random would count as private"
        )


def _find_root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function crosses 0, from the side where it is not positive."""
    if excess(low) <= 0:
        return low
    root = float(brentq(excess, low, high, xtol=5e-5, rtol=1e-12))
    step = 2e-5
    while excess(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root


def check_kind(kind: str, sampling: object = "poisson") -> None:
    """Raise an error for an unknown accountant or sampling."""
    hint = "'prv' is tight, 'rdp' is fast"
    check_choice("accountant", kind, ("prv", "rdp"), hint=hint)
    check_choice("sampling", sampling, ("poisson", "without_replacement"))


def check_probability(delta: float, name: str = "delta") -> None:
    """Raise an error for a delta outside (0, 1)."""
    hint = "well below one over the number of examples"
    check_number(name, delta, above=0, below=1, hint=hint)
