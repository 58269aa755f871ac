"""Tests of a claim of DP-SGD, and the smallest fault that each test detects.

A *look* interrupts the training. Its *probes* run the training's own step on copies of one example
whose gradients are scaled: to almost nothing (*silent*), far above the clip norm (*planted*), or
close to it (*near*, *opposed*); :mod:`lightning_fedleak.evaluation.auditing.private_training` has a
table of them. They fill :class:`Observations`. At the end :func:`judge` tests them against a
:class:`PrivacyClaim`, and returns a :class:`PrivacyVerdict`.

Each of the eight tests below refutes a sound training with a probability of at most ``ERROR / 8``
(Bonferroni). The comparisons within a test share that probability. All tests together therefore
raise a false alarm in at most ``ERROR`` of sound trainings. The checks of the account, side
effects, repeated examples and learning rates are not statistical.

=================== =============================================================================
test                statistic, and its distribution in a sound training
=================== =============================================================================
noise               sum of squares of the noise, for each look and for each parameter:
                    chi-squared. In planted probes only the noise orthogonal to the planted gradient
                    counts. Only less noise than claimed refutes
fresh noise         cosine between the noises of two looks, two parameters, two processes, or two
                    steps in a row that are not equal: normal, with variance 1 / dimension. The
                    p-value of the largest cosine is multiplied by the number of pairs
clipping            length of the release along the planted gradient, for each look and summed over
                    looks: normal, with a mean of at most one clip norm for each row
near the norm       the same for gradients of one to two clip norms
opposed rows        the same for the difference between two probes, whose variances add up
rate                total number of examples: binomial, both tails
sizes               variance of the batch sizes, both tails: a gamma distribution with the mean and
                    variance that binomial numbers give
inclusion           the same for the number of steps that each example is in
=================== =============================================================================

*Visible* is the smallest fault that a test refutes with probability 95%, by the same distributions.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.stats import binom, chi2, gamma, norm
from torch import Tensor

from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.validate import check_number

ERROR = 0.01  # probability of a false alarm in a sound training; half of the promised 2%
TESTS = 8  # statistical tests, which share ERROR (Bonferroni)
SLACK = 0.02  # share by which a shown epsilon may be too low; accountants differ by less
POWER = float(norm.ppf(0.95))  # deviations of a fault above a threshold that detect it in 95%
KINDS = 4  # kinds of pairs of noises: of looks, parameters, processes, and steps in a row
MIN_NUMBERS = 16  # numbers of a noise; the cosine of a smaller one would vary too much
PREFIX = 4096  # first numbers of a parameter's noise, which are kept; a cosine of .07 is visible
Result = Literal["refuted", "not refuted", "unknown"]


@dataclass(frozen=True)
class PrivacyClaim:
    """The differential privacy that a training claims.

    Examples:
        >>> from lightning_fedleak import PrivacyClaim
        >>> claim = PrivacyClaim(
        ...     noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.01, divisor=64, delta=1e-5
        ... )
        >>> claim.client
        'world'

    Args:
        noise_multiplier: standard deviation of the noise over the clip norm.
        max_grad_norm: clip norm of an example's whole gradient.
        sample_rate: probability that an example is in a batch, by Poisson sampling.
        divisor: the number by which the noisy sum is divided before the optimizer's step: the
            expected batch size if the loss is a mean (Opacus' ``expected_batch_size``), 1 if it is
            a sum.
        delta: The delta of epsilon.
        epsilon: a function that returns the epsilon of the training's accountant at the end; None:
            the account is not checked.
        client: ``"rank"``: each process adds its own noise to what it releases; ``"world"``: all
            processes together release one sum.

    Raises:
        ValueError: a number out of range.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    divisor: float
    delta: float
    epsilon: Callable[[], float] | None = None
    client: Literal["rank", "world"] = "world"

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "max_grad_norm", "divisor"):
            check_number(f"PrivacyClaim: {name}", getattr(self, name), above=0)
        for name in ("sample_rate", "delta"):
            check_number(f"PrivacyClaim: {name}", getattr(self, name), above=0, below=1)


@dataclass(frozen=True)
class _Check:
    """The result of one test.

    Attributes:
        name: The name of the test.
        result: *refuted*, *not refuted* or *unknown*.
        evidence: the measured value, or the reason why there is none.
        visible: the smallest fault that the test would have refuted with probability 95%.
    """

    name: str
    result: Result
    evidence: str
    visible: str = ""


@dataclass(frozen=True)
class PrivacyVerdict:
    """The results of all tests; ``print(verdict)`` prints them as a table.

    Attributes:
        checks: the result of each test.
        steps: the number of steps of the training.
        looks: the number of times that the probes ran.
    """

    checks: tuple[_Check, ...]
    steps: int
    looks: int

    @property
    def result(self) -> Result:
        """Return *refuted* if any test refutes, *unknown* if none does and one is unknown."""
        results = {check.result for check in self.checks}
        order: tuple[Result, ...] = ("refuted", "unknown", "not refuted")
        return next(result for result in order if result in results)

    @property
    def in_short(self) -> str:
        """Return one line: the result, and its evidence or the smallest visible faults."""
        result, decisive = self.result, [c for c in self.checks if c.result == self.result]
        if result == "not refuted":
            visible = [f"{c.name}: {c.visible}" for c in decisive if c.visible]
            return f"{result}; smallest fault that could have been seen: {'; '.join(visible)}"
        # Checks with the same evidence, such as one obstacle, are named together.
        names = {
            c.evidence: ", ".join(o.name for o in decisive if o.evidence == c.evidence)
            for c in decisive
        }
        return f"{result}: {'; '.join(f'{name}: {reason}' for reason, name in names.items())}"

    def __str__(self) -> str:
        lines = [f"{self.result}, by {self.looks} looks in {self.steps} steps"]
        for check in self.checks:
            visible = f" (visible: {check.visible})" if check.visible else ""
            lines.append(f"{check.result:>11}  {check.name}: {check.evidence}{visible}")
        return "\n".join(lines)


@dataclass
class Observations:
    """The measurements of a training that the tests need.

    Attributes:
        noise: noise of the silent probe of each look, by parameter, in claimed deviations: the sum
            of squares, the count of numbers, and the first :data:`PREFIX` numbers.
        noise_of_ranks: these first numbers in one vector for each process.
        is_explained: whether the recorded gradients explain all changes of weights.
        is_silent: whether the gradients of silent probes were negligible beside the noise.
        repeated: noise of the other probes, by kind of probe, look and parameter: the sum of
            squares and the count of numbers.
        pairs: cosine and dimension of the noises of two steps in a row that are not equal.
        leaks: how the side effect of a step depends on the rows, by the name of the tensor.
        unrepeated: whether a side effect differed between two probes whose noise differed too.
        smallest_leak: smallest visible share of a raw gradient in the weights, the largest over
            looks.
        runs: rows that the model runs for each example in a probe.
        obstacle: the reason why no more probes can run; empty if they can.
        planted: for each look the length of the release in clip norms, and its number of rows.
        near: the same for gradients near the clip norm.
        opposed: the same for the change by rows with opposed gradients.
        sizes: the number of examples in each step.
        twice: the number of steps that drew an example more than once.
        rates: the learning rates of the latest step; None before the first step.
        rate_changes: the number of steps at which learning rates changed.
        schedulers: whether the schedulers of each class take a metric in ``step``.
        evaluations: the number of forwards of the model without gradients.
        examples: The number of examples of the data set; None: unknown.
        draws: the number of steps that ran the examples that were drawn.
        inclusions: the number of draws of each example.
    """

    noise: list[dict[str, tuple[float, int, Tensor]]] = field(default_factory=list)
    noise_of_ranks: list[Tensor] = field(default_factory=list)
    is_explained: bool = True
    is_silent: bool = True
    obstacle: str = ""
    repeated: dict[str, list[dict[str, tuple[float, int]]]] = field(default_factory=dict)
    pairs: list[tuple[float, int]] = field(default_factory=list)
    leaks: dict[str, str] = field(default_factory=dict)
    unrepeated: bool = False
    smallest_leak: float = 0.0
    runs: int = 1
    near: list[tuple[float, int]] = field(default_factory=list)
    planted: list[tuple[float, int]] = field(default_factory=list)
    opposed: list[tuple[float, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    examples: int | None = None
    draws: int = 0
    twice: int = 0
    rates: list[float] | None = None
    rate_changes: int = 0
    schedulers: dict[str, bool] = field(default_factory=dict)
    evaluations: int = 0
    inclusions: Counter[int] = field(default_factory=Counter)

    def add_noise(self, released: Mapping[str, Tensor], claim: PrivacyClaim) -> None:
        """Add the noise that a silent probe of a new look released."""
        unit = claim.divisor / claim.noise_multiplier / claim.max_grad_norm
        levels = {name: (value * unit).flatten() for name, value in released.items()}
        self.noise.append(
            {
                name: (float(v.square().sum(dtype=torch.float64)), v.numel(), v[:PREFIX].cpu())
                for name, v in levels.items()
            }
        )

    def add_repeated(
        self,
        kind: str,
        released: Mapping[str, Tensor],
        claim: PrivacyClaim,
        raw: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add the noise of another probe, orthogonal to the planted gradients ``raw``."""
        unit, sums = claim.divisor / claim.noise_multiplier / claim.max_grad_norm, {}
        for name, value in released.items():
            square, count = float(value.square().sum(dtype=torch.float64)), value.numel()
            gradient = None if raw is None else raw.get(name)
            if gradient is not None and (size := float(gradient.norm())):
                direction = gradient / size
                orthogonal = value - direction * (direction * value).sum()
                square, count = float(orthogonal.square().sum(dtype=torch.float64)), count - 1
            if count:
                sums[name] = square * unit**2, count
        self.repeated.setdefault(kind, []).append(sums)

    def add_pair(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        """Add the cosine between the noises of two steps in a row, given by parameter."""
        vectors = [
            torch.cat([value.flatten()[:PREFIX].double() for value in noise.values()])
            for noise in (first, second)
        ]
        if len(vectors[0]) >= MIN_NUMBERS:
            units = [torch.nn.functional.normalize(v, dim=0) for v in vectors]
            cosine = float(units[0] @ units[1])
            self.pairs.append((cosine, len(vectors[0])))

    def add_step(self, rows: int, examples: Sequence[int] | None, rates: list[float]) -> None:
        """Add a step of the training.

        Args:
            rows: The number of rows that the model ran.
            examples: The numbers of the drawn examples; None: unknown.
            rates: The learning rates of the optimizers.
        """
        drawn = 0 if examples is None else len(examples)
        ran_all = examples is not None and (rows == drawn or (drawn > 0 and rows % drawn == 0))
        self.sizes.append(drawn if ran_all else rows)
        self.draws += ran_all
        self.inclusions.update(examples or ())
        self.twice += len({*(examples or ())}) < drawn
        self.rate_changes += self.rates not in (None, rates)
        self.rates = rates


def judge(claim: PrivacyClaim, observations: Observations) -> PrivacyVerdict:
    """Return the verdict on a claim.

    If gradients were not silent, or no more probes can run, a test of the probes is unknown unless
    it refutes anyway.
    """
    noise, silent = claim.noise_multiplier, observations.is_silent
    probes = [
        _noise(observations),
        _fresh_noise(observations),
        _clipping("clipping", observations, observations.planted, noise),
        _clipping("near the norm", observations, observations.near, noise),
        _clipping("opposed rows", observations, observations.opposed, noise * math.sqrt(2)),
        _side_effects(observations),
    ]
    # Gradients that are not silent only add to the noise, and move a release by at most one clip
    # norm for each row. So these tests refute in spite of them.
    robust = ("noise", "clipping", "side effects")
    sound = [c for c in probes if c.result == "refuted" and (silent or c.name in robust)]
    loud = "rows were not silent: a scaled loss, or gradients that bypass the logits or the hooks"
    if obstacle := observations.obstacle or ("" if silent else loud):
        probes = [c if c in sound else _Check(c.name, "unknown", obstacle) for c in probes]
    steps = (*_check_draws(claim, observations), _rates(observations))
    checks = (*probes, *steps, _account(claim, len(observations.sizes)))
    return PrivacyVerdict(checks, len(observations.sizes), len(observations.noise))


def _tested(name: str, p_value: float, evidence: str, visible: str) -> _Check:
    """Return the result of a statistical test by its p-value; unknown if that is NaN."""
    if math.isnan(p_value):
        return _Check(name, "unknown", "the gradient that a probe released is not finite")
    result: Result = "refuted" if p_value < ERROR / TESTS else "not refuted"
    return _Check(name, result, f"{evidence}, p {min(p_value, 1):.2g}", visible)


def _noise(observations: Observations) -> _Check:
    """Test whether any parameter or any look has less noise than claimed."""
    if not observations.noise or not observations.is_explained:
        hidden = "noise inside of step(), or an optimizer that was not passed"
        reason = f"weights changed by more than the optimizers were given: {hidden}"
        few = "no look: too few steps, or no 8 rows in tensors"
        return _Check("noise", "unknown", reason if observations.noise else few)
    silent = [{n: part[:2] for n, part in look.items()} for look in observations.noise]
    groups: dict[str, list[tuple[float, int]]] = {}
    for kind, looks in {"": silent, **observations.repeated}.items():
        end = f", {kind}" if kind else ""
        groups |= {f"look {n}{end}": [*look.values()] for n, look in enumerate(looks, 1) if look}
        for name in looks[0]:
            groups[name + end] = [look[name] for look in looks if name in look]
    totals = [[sum(v) for v in zip(*g, strict=True)] for g in groups.values()]
    squares, counts = np.array(totals).T
    p_values, ratios = chi2.cdf(squares, counts), np.sqrt(squares / counts)
    worst = np.lexsort((ratios, p_values))[0]
    sizes = np.array([counts.min(), counts.max()])
    min_ratios = np.sqrt(chi2.ppf(ERROR / TESTS / len(groups), sizes) / chi2.ppf(0.95, sizes))
    return _tested(
        "noise",
        p_values.min() * len(groups),
        f"{ratios[worst]:.3f} of the claimed deviation in {list(groups)[worst]}",
        f"below {min_ratios[1]:.3f} of it in the largest part, {min_ratios[0]:.2f} in the smallest",
    )


def _fresh_noise(observations: Observations) -> _Check:
    """Test whether noises of different looks, parameters, processes or steps are independent."""
    names = (
        [n for n in observations.noise[0] if all(n in look for look in observations.noise)]
        if observations.noise
        else []
    )
    looks = [torch.cat([look[name][2] for name in names]) for look in observations.noise if names]
    large = [name for name in names if observations.noise[0][name][1] >= MIN_NUMBERS]
    n_numbers = min((len(observations.noise[0][name][2]) for name in large), default=0)
    parameters = [
        torch.cat([look[name][2][:n_numbers] for look in observations.noise]) for name in large
    ]
    ranks, results = observations.noise_of_ranks, []
    for kind, vectors in (("looks", looks), ("parameters", parameters), ("processes", ranks)):
        if len(vectors) > 1:
            matrix = torch.nn.functional.normalize(torch.stack(vectors).double(), dim=1)
            cosine = float((matrix @ matrix.T).fill_diagonal_(0).abs().max())
            scale, pairs = math.sqrt(matrix.shape[1]), math.comb(len(vectors), 2)
            tail = 2 * pairs * float(norm.sf(cosine * scale))
            visible = (norm.isf(ERROR / TESTS / KINDS / pairs / 2) + POWER) / scale
            # Minus: of equal tails, min() below picks the largest visible cosine.
            results.append((tail, -visible, f"cosine {cosine:.3f} between two {kind}"))
    if steps := observations.pairs:
        tails = [2 * len(steps) * float(norm.sf(abs(c) * math.sqrt(n))) for c, n in steps]
        tail, (cosine, count) = min(zip(tails, steps, strict=True))
        visible = (norm.isf(ERROR / TESTS / KINDS / len(steps) / 2) + POWER) / math.sqrt(count)
        results.append((tail, -visible, f"cosine {cosine:.3f} between two steps in a row"))
    if not results:
        return _Check("fresh noise", "unknown", "two looks or two parameters are needed")
    p_value, _, evidence = min(results)
    visible = max(-result[1] for result in results)
    return _tested("fresh noise", KINDS * p_value, evidence, f"above {visible:.3f}")


def _clipping(
    name: str, observations: Observations, moves: Sequence[tuple[float, int]], noise: float
) -> _Check:
    """Test whether rows move a release by more than one clip norm each.

    Args:
        name: The name of the test.
        observations: The measurements.
        moves: The length of each release in clip norms, and its number of rows.
        noise: The claimed deviation of the noise in clip norms.
    """
    if not moves:
        reason = "no planted gradient reached the parameters where hooks read it"
        if name == "near the norm" and observations.opposed:
            reason = "the length of planted gradients could not be set near the clip norm"
        if observations.runs > 1 and name != "clipping":
            reason = f"step() runs {observations.runs} rows for each example"
        return _Check(name, "unknown", reason)
    parts = [part for look in observations.noise for part in look.values()]
    # More noise than claimed widens the test. Less does not narrow it: the noise test refutes that.
    noise *= max(1.0, math.sqrt(sum(part[0] for part in parts) / sum(part[1] for part in parts)))
    excess = np.array([distance - rows for distance, rows in moves]) / noise
    tails = norm.sf([excess.max(), excess.sum() / math.sqrt(len(moves))])
    p_value = 2 * np.min(tails * [len(moves), 1])
    rows = sum(count for _, count in moves)
    width = (norm.isf(ERROR / TESTS / 2) + POWER) * noise * math.sqrt(len(moves)) / rows
    mean = sum(distance for distance, _ in moves) / rows
    largest = max(distance / count for distance, count in moves)
    return _tested(
        name,
        p_value,
        f"an example moves a release by up to {largest:.2f} clip norms, {mean:.2f} in the mean",
        f"above {1 + width:.2f} in the mean",
    )


def _side_effects(observations: Observations) -> _Check:
    """Report side effects of steps that depend on the rows."""
    visible = f"{observations.smallest_leak:.1g} of a raw gradient in the weights"
    if leaks := observations.leaks:
        names = "; ".join(f"{name} {dependence}" for name, dependence in [*leaks.items()][:3])
        more = f", and {len(leaks) - 3} more" if len(leaks) > 3 else ""
        return _Check("side effects", "refuted", f"{names}{more}", visible)
    if "planted" not in observations.repeated:
        return _Check("side effects", "unknown", "no look whose probes could be compared")
    if observations.unrepeated:
        reason = "they differ, and so does noise that the random state of torch does not repeat"
        return _Check("side effects", "unknown", reason)
    evidence = "weights, buffers and optimizer states depend on rows only through the release"
    return _Check("side effects", "not refuted", evidence, visible)


def _rates(observations: Observations) -> _Check:
    """Check that learning rates do not depend on private data, by the kinds of schedulers."""
    changes, kinds = observations.rate_changes, observations.schedulers
    by_metric = [kind for kind, takes_metric in kinds.items() if takes_metric]
    visible = "one change of a rate"
    if observations.rates is None:
        return _Check("learning rates", "unknown", "no step")
    if not changes:
        return _Check("learning rates", "not refuted", "they did not change", visible)
    if not kinds:
        reason = f"they changed {changes} times, and no scheduler of torch was found"
        return _Check("learning rates", "unknown", reason)
    if not by_metric:
        evidence = f"they changed {changes} times, by {', '.join(kinds)}"
        return _Check("learning rates", "not refuted", evidence, visible)
    evidence = f"they changed {changes} times, by {by_metric[0]}, which takes a metric"
    if observations.evaluations:
        return _Check(
            "learning rates", "unknown", f"{evidence}: of private data, or of public ones"
        )
    evidence += ", and the model was never evaluated: the metric is computed on training rows"
    return _Check("learning rates", "refuted", evidence, visible)


def _check_draws(claim: PrivacyClaim, observations: Observations) -> list[_Check]:
    """Test whether the examples of steps are Poisson samples at the claimed rate."""
    rate, examples, steps = claim.sample_rate, observations.examples, len(observations.sizes)
    if examples is None or steps < 4:  # a variance of fewer sizes says nothing
        reason = "too few steps" if examples else "no batch sampler, or one of each process"
        return [
            _Check(name, "unknown", reason) for name in ("rate", "sizes", "inclusion", "repeats")
        ]
    rows, trials = sum(observations.sizes), examples * steps
    tails = binom.cdf(rows, trials, rate), binom.sf(rows - 1, trials, rate)
    width = norm.isf(ERROR / TESTS / 2) + POWER
    deviation = math.sqrt(trials * rate * (1 - rate))
    counts = [observations.inclusions[number] for number in range(examples)]
    return [
        _tested(
            "rate",
            2 * min(tails),
            f"{rows / steps:.2f} examples in a step, {examples * rate:.2f} claimed",
            f"off by {100 * width * deviation / trials / rate:.1f}%",
        ),
        _spread("sizes", "batch sizes", observations.sizes, examples, rate),
        _spread("inclusion", "examples' numbers of steps", counts, steps, rate)
        if observations.draws == steps
        else _Check(
            "inclusion", "unknown", f"{observations.draws} of {steps} steps ran the drawn examples"
        ),
        _Check(
            "repeats",
            "refuted" if observations.twice else "not refuted",
            f"{observations.twice} of {steps} steps drew an example more than once",
            "one repeat",
        ),
    ]


def _spread(name: str, subject: str, values: Sequence[int], trials: int, rate: float) -> _Check:
    """Test whether values have the variance of binomial numbers.

    Args:
        name: The name of the test.
        subject: The name of the values in the evidence.
        values: The values.
        trials: The number of trials of the binomial distribution.
        rate: The probability of its successes.
    """
    variance, count = trials * rate * (1 - rate), len(values) - 1
    ratio = float(np.var(values, ddof=1)) / variance
    tail = 2 + 1 / variance - 6 / trials  # variance of a squared standardised binomial number
    null = gamma(count / tail, scale=tail / count)
    width = (norm.isf(ERROR / TESTS / 2) + POWER) * math.sqrt(tail / count)
    return _tested(
        name,
        2 * min(null.cdf(ratio), null.sf(ratio)),
        f"{subject} have {ratio:.3f} of the claimed variance",
        f"off by {100 * width:.0f}%",
    )


def _account(claim: PrivacyClaim, steps: int) -> _Check:
    """Compare the epsilon that the training shows with the epsilon of the counted steps."""
    if claim.epsilon is None or not steps:
        return _Check("account", "unknown", "no epsilon was given")
    history = [(claim.noise_multiplier, claim.sample_rate, steps)]
    epsilon, min_epsilon = claim.epsilon(), epsilon_of(history, claim.delta, "prv") * (1 - SLACK)
    return _Check(
        "account",
        "refuted" if epsilon < min_epsilon else "not refuted",
        f"epsilon {epsilon:.3g} is shown, {min_epsilon:.3g} at least is spent by {steps} steps",
        f"{100 * SLACK:.0f}% too low",
    )
