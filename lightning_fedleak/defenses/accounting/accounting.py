"""What releases of DP-SGD have cost: epsilon at a delta, on Opacus' accountants.

The unit of privacy is one training example, added or removed. A release is a sum of per-sample
gradients of norm at most C, of a batch into which every example of the client came independently
with chance ``sample_rate`` (Poisson sampling), plus Gaussian noise of standard deviation
``noise_multiplier * C``. What is not a release is not covered: leakage logs, validation metrics,
and decisions taken in sight of the data.

- ``"rdp"``: Renyi DP of the sampled Gaussian mechanism (Mironov, Talwar & Zhang 2019), added up
  order by order and converted after Balle et al. 2020, Theorem 21. Microseconds a step.
- ``"prv"``: numerical composition of privacy loss random variables (Gopi, Lee & Wutschitz 2021).
  Tighter and slower. The upper end of its error interval counts, and never more than RDP's
  epsilon, which is an upper bound too. Where delta is so small that float64's rounding matters
  (below ``4e-15`` times the number of releases) RDP's epsilon is reported.

- ``"rdp"`` also covers batches of a fixed number, drawn without replacement
  (``sampling="without_replacement"``): Wang, Balle & Kasiviswanathan 2019, Theorem 27. The number
  of examples is public then, and neighbours differ by one example put in another's place. PRV has
  no such release.

Below a noise multiplier of :data:`LEAST_NOISE`, and from :data:`LARGEST_EPSILON` on, epsilon is
reported as infinite and PRV is not called: its mesh covers the whole range of the privacy loss,
which grows with ``1 / noise_multiplier ** 2`` (at 1e-3 it asks for terabytes), and ``exp`` of a
loss beyond 709 is no float64. Nothing is lost by it: one full-batch step at a noise multiplier of
0.05 has an epsilon of 284 at delta 1e-5, and (200, delta)-DP rules out nothing that anybody could
observe.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.fft import next_fast_len
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from torch import Tensor

from lightning_fedleak.defenses.accounting.ledger import (
    Ledger,
    check_count,
    check_noise_multiplier,
    check_sample_rate,
)
from lightning_fedleak.defenses.base import DefenseError, State
from lightning_fedleak.extras import install
from lightning_fedleak.validate import check_choice, check_integer, check_number

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in (*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)),
)
"""Renyi orders that are tried."""

PRV_POINTS = 2**21
PRV_ERROR = 0.002
PRV_LARGEST_LOSS = 650.0

Kind = Literal["prv", "rdp"]
Trust = Literal["local", "central"]
Sampling = Literal["poisson", "without_replacement"]
History = tuple[tuple[float, float, int], ...]
"""Noise multiplier, sample rate and count of every kind of release."""

LEAST_NOISE = 0.05
"""Below this noise multiplier epsilon is infinite."""
LARGEST_EPSILON = 200.0
"""Above this epsilon is infinite."""
MOST_NOISE = 1e6
"""Largest noise multiplier that :func:`noise_multiplier_for` considers."""
KEPT = 64
_MOST_WHOLE = 128
_HUGE = 700.0


def rdp_of(noise_multiplier: float, sample_rate: float, sampling: Sampling = "poisson") -> Floats:
    """(len(ORDERS),) Renyi DP of one release at :data:`ORDERS`; read-only.

    Args:
        noise_multiplier: standard deviation of the noise over how far two neighbours' sums may be
            apart.
        sample_rate: share of the examples in a batch, by chance or of a fixed number.
        sampling: which.
    """
    if sampling == "without_replacement" and sample_rate < 1:
        return _rdp_without_replacement(noise_multiplier, sample_rate)
    return _rdp_of_poisson(noise_multiplier, sample_rate)


@functools.lru_cache(maxsize=256)
def _rdp_without_replacement(noise_multiplier: float, sample_rate: float) -> Floats:
    """Theorem 27 of Wang et al. 2019 at whole orders, between them by convexity.

    No order costs more than without sampling; orders above 128 cost as much.
    """
    if noise_multiplier == 0:
        rdp = np.full(len(ORDERS), np.inf)
    else:
        most = int(max(order for order in ORDERS if order <= _MOST_WHOLE))
        sums = _log_moments(noise_multiplier, sample_rate, most)
        rdp = np.asarray(ORDERS) / 2 / noise_multiplier**2
        for i, order in enumerate(ORDERS):
            if order <= most:
                low, part = int(order), order - int(order)
                high = sums[low + 1] if part else 0.0
                rdp[i] = min(rdp[i], ((1 - part) * sums[low] + part * high) / (order - 1))
    rdp.flags.writeable = False
    return rdp


def _log_moments(noise_multiplier: float, sample_rate: float, most: int) -> list[float]:
    """The log of the bound on the moment of each whole order up to ``most``; 0 at 0 and 1."""
    logs = _log_differences(noise_multiplier, most + 1)
    ratio = 1 / noise_multiplier**2
    second = ratio + math.log(-math.expm1(-ratio)) if ratio < _HUGE else ratio
    terms = [min(math.log(4) + second, math.log(2) + ratio)]
    for j in range(3, most + 1):
        mean = (logs[2 * (j // 2)] + logs[2 * ((j + 1) // 2)]) / 2
        terms.append(min(math.log(4) + mean, math.log(2) + j * (j - 1) / 2 * ratio))
    js = np.arange(2, most + 1)
    bounds = np.asarray(terms) + js * math.log(sample_rate) - gammaln(js + 1)
    sums = [0.0, 0.0]
    for order in range(2, most + 1):
        n = order - 1
        chosen = math.lgamma(order + 1) - gammaln(order - js[:n] + 1)
        found = float(logsumexp(np.append(bounds[:n] + chosen, 0.0)))
        # Sampling never costs more than none.
        sums.append(min(found, order * (order - 1) / 2 * ratio))
    return sums


def _log_differences(noise_multiplier: float, most: int) -> dict[int, float]:
    """The log of ``E_P[(Q / P - 1)^l]`` of two Gaussians one apart, for even l up to ``most + 1``.

    An alternating sum that cancels: in decimal numbers of as many digits as that takes.
    """
    largest = most + most % 2
    digits = 60 + math.ceil(largest * (0.61 + math.log10(max(noise_multiplier, 1.0))))
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = digits, MAX_EMAX, MIN_EMIN
        ratio = 1 / Decimal(noise_multiplier) ** 2
        moments = [(ratio * (i * (i - 1)) / 2).exp() for i in range(largest + 1)]
        found = {}
        for order in range(2, largest + 1, 2):
            signed = (
                (-1) ** i * math.comb(order, i) * m for i, m in enumerate(moments[: order + 1])
            )
            found[order] = float(sum(signed, Decimal(0)).ln())
    return found


@functools.lru_cache(maxsize=1024)
def _rdp_of_poisson(noise_multiplier: float, sample_rate: float) -> Floats:
    check_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp: Floats
    if noise_multiplier == 0:
        rdp = np.full(len(ORDERS), np.inf)
    else:
        rdp = np.asarray(
            compute_rdp(
                q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(ORDERS)
            ),
            dtype=np.float64,
        )
        rdp = np.where(rdp >= 0, rdp, np.inf)
    rdp.flags.writeable = False
    return rdp


def epsilons_of_rdp(rdp: Floats, delta: float) -> Floats:
    """Epsilon by each order of :data:`ORDERS` (Balle et al. 2020, Theorem 21); not below 0."""
    return np.maximum(rdp + conversion(delta), 0.0)


def conversion(delta: float) -> Floats:
    """What is added to the Renyi DP of :data:`ORDERS` to get epsilon at ``delta``."""
    orders = np.asarray(ORDERS)
    added: Floats = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return added


def check_opacus() -> None:
    """Refuses with :class:`DefenseError` where Opacus is missing."""
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise DefenseError(f"accounting for DP-SGD needs Opacus: {install('dp')}") from error


def tightened(epsilon: float, prv: Callable[[float], float]) -> float:
    """The bound that PRV gives with an error below 0.6% of itself, where its mesh allows.

    The error is a share (``PRV_ERROR``) of the scale that PRV is called with. RDP's bound may be
    many times the answer, at a small sample rate most of all; then the answer sets the scale.
    """
    scale = epsilon
    while True:
        epsilon = min(epsilon, prv(scale))
        if not 0 < epsilon < scale / 3:
            return epsilon
        scale = 2 * epsilon


def prv_epsilon(
    history: Sequence[tuple[float, float, int]], delta: float, epsilon: float, rdp: Floats
) -> float:
    """Upper bound by PRV with a mesh as fine as the answer asks for, ``inf`` where it has none.

    As ``opacus.accountants.PRVAccountant``, of the same parts, but with stored Renyi divergences
    (which take most of the time there), a mesh that is neither finer than ``PRV_ERROR`` of the
    answer asks for nor larger than about ``PRV_POINTS``, and an allowance for rounding: the T-th
    power of a Fourier transform in float64 shifts delta by up to about ``0.3 T eps`` (measured
    against the Gaussian mechanism), by which Opacus understates epsilon at a tiny delta (3.6% at
    delta 1e-13 after 10,000 releases). Six times that is allowed for.

    Args:
        history: of releases.
        delta: of the answer.
        epsilon: about as large as the answer, or larger.
        rdp: of all releases together, at ``ORDERS``.
    """
    from opacus.accountants.analysis import prv

    steps = sum(row[2] for row in history)
    rounding = 2 * steps * float(np.finfo(np.float64).eps)
    if rounding > delta / 10:
        return math.inf
    delta_error = max(delta / 1000, rounding)
    loss = max(
        float(epsilons_of_rdp(rdp, delta_error / 4).min()),
        *(
            float(epsilons_of_rdp(rdp_of(sigma, rate), delta_error / (8 * steps)).min())
            for sigma, rate, _ in history
        ),
    )
    if loss > PRV_LARGEST_LOSS:
        return math.inf
    root = math.sqrt(steps * math.log(12 / delta_error) / 2)
    error = max(PRV_ERROR * epsilon, 2 * (loss + 3) * root / PRV_POINTS)
    half = max(loss, error) + 3
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = error / root
            points = _fast_length(2 * math.ceil(half / width) + 4)
            half = (points / 2 - 1.5) * width  # create_aligned rounds it up to `points` in all
            mesh = prv.Domain.create_aligned(-half, half, width)
            single = [
                prv.discretize(
                    prv.TruncatedPrivacyRandomVariable(
                        prv.PoissonSubsampledGaussianPRV(rate, sigma), mesh.t_min, mesh.t_max
                    ),
                    mesh,
                )
                for sigma, rate, _ in history
            ]
            whole = prv.compose_heterogeneous(
                dprvs=single, num_self_compositions=[row[2] for row in history]
            )
            found = float(whole.compute_epsilon(delta, delta_error, error)[2])
    except (RuntimeError, ValueError) as reason:
        warnings.warn(
            f"PRV has no answer for {list(history)} at delta {delta:g} ({reason}); the epsilon of "
            "RDP, an upper bound too, is reported instead",
            stacklevel=2,
        )
        return math.inf
    return max(found, 0.0) if math.isfinite(found) else math.inf


def _fast_length(least: int) -> int:
    """The next even number that an FFT takes quickly: others cost several times as much."""
    length = int(next_fast_len(least, real=True))
    while length % 2:
        length = int(next_fast_len(length + 1, real=True))
    return length


class Accountant:
    """Counts releases and says what they have cost.

    :meth:`step` comes before the release. The noise must not have been chosen in sight of earlier
    releases: for that there is :class:`~lightning_fedleak.defenses.RenyiFilter`.
    Hence a second noise multiplier or sample rate is refused unless ``planned``.

    Args:
        kind: ``"prv"`` (tight) or ``"rdp"`` (fast).
        ledger: file that remembers every release through a crash, one for each client, see
            :class:`~lightning_fedleak.defenses.accounting.ledger.Ledger`. None: what was released
            after the last checkpoint is forgotten in a crash.
        sampling: how batches are drawn. ``"without_replacement"`` is accounted by ``"rdp"`` alone.

    Raises:
        DefenseError: an unknown kind, one that does not cover the sampling, Opacus is missing, or
            the ledger's file cannot be used.
    """

    def __init__(
        self,
        kind: Kind = "prv",
        ledger: str | os.PathLike[str] | None = None,
        *,
        sampling: Sampling = "poisson",
    ) -> None:
        _check_kind(kind, sampling)
        check_opacus()
        self.kind: Kind = kind
        self.sampling: Sampling = sampling
        self._ledger = Ledger(ledger)
        self._known: dict[tuple[float, History], float] = {}
        self._search: tuple[object, _Search] | None = None

    @property
    def steps(self) -> int:
        """Number of releases."""
        return len(self._ledger)

    @property
    def history(self) -> History:
        """Noise multiplier, sample rate and count of every kind of release."""
        return self._ledger.rows

    def step(
        self,
        noise_multiplier: float,
        sample_rate: float,
        count: int = 1,
        *,
        planned: bool = False,
    ) -> None:
        """Counts releases that are about to happen.

        Args:
            noise_multiplier: standard deviation of the noise over the clip norm.
            sample_rate: chance of each example to be in the batch.
            count: how many such releases.
            planned: another noise multiplier or rate than before, but settled before the run began.

        Raises:
            DefenseError: a value out of range, or one that changed without being ``planned``.
        """
        kinds = self._ledger.kinds
        if kinds and not planned and (noise_multiplier, sample_rate) not in kinds:
            raise DefenseError(
                f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} differ from "
                f"those of earlier releases, {sorted(kinds)}. If they were settled before the run, "
                "pass planned=True. If they were chosen in the run (a gate that turns noise up), "
                f"accountant='{self.kind}' does not hold: use a RenyiFilter."
            )
        self._ledger.record(noise_multiplier, sample_rate, count)

    def epsilon(self, delta: float, *, slack: float = 0.0) -> float:
        """The epsilon of all releases so far, at ``delta``: an upper bound.

        RDP takes microseconds. PRV takes a tenth of a second to a second where the history is new;
        with ``slack`` it looks ahead instead: the epsilon of up to ``1 + slack`` times as many
        releases of the latest kind bounds every count until then and is computed once.

        Args:
            delta: in (0, 1).
            slack: of PRV only. For logs 0.02 is a good choice: about ``100 + 55 log(T / 100)``
                calls in T steps, and an epsilon that is at most about 1% too large.

        Returns:
            0 where nothing was released; ``inf`` as the module's docstring says.

        Raises:
            DefenseError: delta or slack out of range.
        """
        _check_delta(delta)
        check_number("slack", slack, at_least=0, below=1, error=DefenseError)
        history = self.history
        if self.kind == "rdp" or not history:
            return epsilon_of(history, delta, self.kind, self.sampling)
        *before, (noise_multiplier, sample_rate, count) = history
        ahead: History = (*before, (noise_multiplier, sample_rate, _milestone(count, slack)))
        if (delta, ahead) not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[delta, ahead] = epsilon_of(ahead, delta, self.kind, self.sampling)
        return self._known[delta, ahead]

    def allows(
        self,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        count: int = 1,
    ) -> bool:
        """Whether ``count`` more releases keep the whole within (epsilon, delta). Counts nothing.

        Exact for both kinds. PRV is called about ``2 log2(T)`` times in T steps: what allows more
        releases allows fewer.

        Raises:
            DefenseError: a value out of range.
        """
        _check_delta(delta)
        check_noise_multiplier(noise_multiplier)
        check_sample_rate(sample_rate)
        check_count(count, "count")
        event = noise_multiplier, sample_rate
        others = tuple(row for row in self.history if row[:2] != event)
        wanted = count + sum(row[2] for row in self.history if row[:2] == event)
        question = epsilon, delta, event, others
        if self._search is None or self._search[0] != question:
            self._search = question, _Search()

        def fits(total: int) -> bool:
            history = (*others, (*event, total))
            return epsilon_of(history, delta, self.kind, self.sampling) <= epsilon

        return self._search[1].answer(wanted, fits)

    def state_dict(self) -> dict[str, Tensor]:
        """For the checkpoint: ``releases``, (K, 3) float64."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Goes on counting: of every kind of release the larger count stays."""
        self._ledger.load_state_dict(state)


def epsilon_of(
    history: Sequence[tuple[float, float, int]],
    delta: float,
    kind: Kind,
    sampling: Sampling = "poisson",
) -> float:
    """Epsilon of releases whose noise was settled beforehand, at ``delta``: an upper bound.

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
    _check_kind(kind, sampling)
    _check_delta(delta)
    for noise_multiplier, sample_rate, count in history:
        check_noise_multiplier(noise_multiplier)
        check_sample_rate(sample_rate)
        check_count(count, "count")
    if not history:
        return 0.0
    if min(row[0] for row in history) < LEAST_NOISE:
        return math.inf
    each = (count * rdp_of(sigma, rate, sampling) for sigma, rate, count in history)
    rdp = sum(each, np.zeros(1))
    epsilon = float(epsilons_of_rdp(rdp, delta).min())
    if kind == "prv" and 0 < epsilon < math.inf:
        epsilon = tightened(epsilon, lambda bound: prv_epsilon(history, delta, bound, rdp))
    return epsilon if epsilon <= LARGEST_EPSILON else math.inf


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    kind: Kind = "prv",
    sampling: Sampling = "poisson",
) -> float:
    """The noise multiplier at which ``steps`` releases cost at most ``target_epsilon``.

    Found to within 1e-4, rounded up: the epsilon of what is returned never exceeds the target.

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
    _check_kind(kind, sampling)
    _check_delta(target_delta, "target_delta")
    check_sample_rate(sample_rate)
    check_count(steps, "steps")
    check_number(
        "target_epsilon",
        target_epsilon,
        above=0,
        at_most=LARGEST_EPSILON,
        hint="usual values are 1 to 10",
        error=DefenseError,
    )

    @functools.cache
    def excess(log_noise: float, which: Kind) -> float:
        event = math.exp(log_noise), sample_rate, steps
        epsilon = epsilon_of([event], target_delta, which, sampling)
        return math.log(max(epsilon, 1e-12) / target_epsilon) if epsilon < math.inf else 100.0

    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if excess(most, "rdp") > 0:
        raise DefenseError(
            f"target_epsilon={target_epsilon!r} cannot be reached in {steps} steps at sample_rate="
            f"{sample_rate!r} with a noise multiplier below {MOST_NOISE:g}. Raise target_epsilon "
            "or target_delta, or lower the number of steps or the sample rate."
        )
    if excess(least, "rdp") <= 0:
        raise DefenseError(
            f"target_epsilon={target_epsilon!r} asks for a noise multiplier below {LEAST_NOISE}, "
            f"which is accounted as no noise. Lower target_epsilon, or pass noise_multiplier="
            f"{LEAST_NOISE}."
        )
    high = _first_below(functools.partial(excess, which="rdp"), least, most)
    if kind == "prv":
        low = high - 0.2
        while low > least and excess(low, which="prv") <= 0:
            low, high = 3 * low - 2 * high, low
        high = _first_below(functools.partial(excess, which="prv"), max(least, low), high)
    return math.exp(high)


def effective_noise_multiplier(
    noise_multiplier: float, clients: int, trust: Trust, *, colluding: int = 0
) -> float:
    """The noise multiplier to account, given what the server sees.

    Each of ``clients`` clients clips the gradients of its own examples to C, adds noise of standard
    deviation ``noise_multiplier * C`` of its own to their sum and sends the result.

    - ``"local"``: the server sees each client's update. An example is in one of them, and nothing
      but that client's own noise hides it: ``noise_multiplier``.
    - ``"central"``: the server sees *only the sum* of all updates, by secure aggregation or a
      trusted aggregator. Independent noises add up to a standard deviation of
      ``noise_multiplier * sqrt(clients) * C`` while one example still changes the sum by C:
      ``noise_multiplier * sqrt(clients)``. Plain averaging by the server, as in DDP's all-reduce
      where any rank or the server can see what each rank sends, is *not* central. Clients that
      collude with the server know their own noise and can take it out, and clients that drop out
      send none: ``noise_multiplier * sqrt(clients - colluding)``.

    The sample rate is the same in both: the chance of an example to be in its own client's batch.

    Args:
        noise_multiplier: of each client's noise.
        clients: how many add noise.
        trust: ``"local"`` or ``"central"``.
        colluding: how many of them may collude or drop out; fewer than all.

    Raises:
        DefenseError: a value out of range.
    """
    check_noise_multiplier(noise_multiplier)
    check_count(clients, "clients")
    hint = "the server sees each client's update, or only their sum by secure aggregation"
    check_choice("trust", trust, ("local", "central"), hint=hint, error=DefenseError)
    check_integer(
        "colluding",
        colluding,
        at_least=0,
        at_most=clients - 1,
        hint="the clients that may collude with the server or drop out",
        error=DefenseError,
    )
    if trust == "local":
        return noise_multiplier
    return noise_multiplier * math.sqrt(clients - colluding)


def joint_noise_multiplier(clips: Sequence[float], stds: Sequence[float]) -> float:
    """Noise multiplier of the one Gaussian mechanism that several, released together, are.

    Args:
        clips: C_l, how much of one sample is in the l-th.
        stds: standard deviation of the noise on each number of it.

    Returns:
        ``1 / sqrt(sum (C_l / s_l)^2)``; 0 where one of them has no noise.

    Raises:
        DefenseError: numbers out of range, or not as many of the one as of the other.
    """
    fits = len(clips) == len(stds) > 0 and all(0 < c < math.inf for c in clips)
    if not fits or not all(0 <= s < math.inf for s in stds):
        raise DefenseError(
            f"clips={list(clips)} must be positive, and stds={list(stds)} as many numbers of at "
            "least 0"
        )
    return 1 / math.hypot(*(c / s for c, s in zip(clips, stds, strict=True))) if all(stds) else 0.0


def check_delta_for(delta: float, examples: int) -> None:
    """Refuses a delta that would allow the release of a random example.

    Args:
        delta: of the guarantee.
        examples: number of examples of the client.

    Raises:
        DefenseError: outside (0, 1), or not below ``1 / examples``.
    """
    _check_delta(delta, "target_delta")
    check_count(examples, "examples")
    if delta >= 1 / examples:
        raise DefenseError(
            f"target_delta={delta!r} must be below 1 / {examples} = {1 / examples:.3g}, the number "
            "of examples: else publishing one of them at random would count as private"
        )


class _Search:
    """Answers whether n fits, for growing n, in few calls; what fits, fits for every smaller n."""

    def __init__(self) -> None:
        self._fits, self._too_many = 0, 0

    def answer(self, n: int, fits: Callable[[int], bool]) -> bool:
        while n > self._fits and not (self._too_many and n >= self._too_many):
            probe = 2 * n
            if self._too_many:
                probe = max(n, (n + self._too_many) // 2)
            if fits(probe):
                self._fits = probe
            else:
                self._too_many = probe
        return n <= self._fits


def _milestone(count: int, slack: float) -> int:
    """Smallest of a fixed sequence of growing numbers that is at least ``count``."""
    milestone = 1
    while milestone < count:
        milestone = max(milestone + 1, int(milestone * (1 + slack)))
    return milestone


def _first_below(excess: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses 0, from the side where it is not positive."""
    if excess(low) <= 0:
        return low
    root = float(brentq(excess, low, high, xtol=5e-5, rtol=1e-12))
    step = 2e-5
    while excess(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root


def _check_kind(kind: str, sampling: str = "poisson") -> None:
    hint = "'prv' is tight, 'rdp' is fast"
    check_choice("accountant", kind, ("prv", "rdp"), hint=hint, error=DefenseError)
    check_choice("sampling", sampling, ("poisson", "without_replacement"), error=DefenseError)
    if kind == "prv" and sampling == "without_replacement":
        raise DefenseError(
            "accountant='prv' does not cover batches of a fixed number drawn without replacement: "
            "use accountant='rdp', or draw by Poisson sampling"
        )


def _check_delta(delta: float, name: str = "delta") -> None:
    hint = "well below one over the number of examples"
    check_number(name, delta, above=0, below=1, hint=hint, error=DefenseError)
