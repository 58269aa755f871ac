"""The FLATCHAT attack: word types from the row sums of the output head's gradient.

Each row belongs to a type, a distinct token of the vocabulary. The hidden state of a token enters
the row of its label with a weight near -1, and other rows with the small predicted probabilities.
So the row sums of used types vary much more than those of unused types.

:func:`flatchat` sums each row, fits a mixture of two Gaussians to the sums, and names the types
that fit the wide Gaussian best.

EM on the V row sums themselves would be slow. It needs the data only through ``n``, ``sum x`` and
``sum x**2``, weighted by the responsibilities. So the values are collected once into bins that keep
these three sums, and EM runs on the bins. With one responsibility per bin it is a variational EM:
its objective is a lower bound on the log-likelihood, which is tight for narrow bins.

"Algorithm", "Eq." and "Remark" refer to the FLATCHAT paper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedleak.attacks import base
from lightning_fedleak.attacks.public_text import PublicText, TextSource, each_gradient
from lightning_fedleak.attacks.words.aligned_rows import map_rows
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy, head_surface
from lightning_fedleak.model.snapshots import whole_tensor
from lightning_fedleak.validate import check_choice

_Array = NDArray[np.float64]
_RESOLUTION = 128  # bins in one standard deviation of the narrow component, and per octave beyond
_TOLERANCE = (
    1e-7  # largest change in a step (see _Mixture.distance) at which EM has converged; not tuned
)
_MAX_STEPS = 3000  # EM steps of a fit; real row sums take some ten
_START_VALUES = 8192  # values that the start is computed from; more cost time, not tuned
_VARIANCE_FLOOR = 1e-20  # smallest variance of a component over the total one: float64 rounding
_REBINNINGS = 12  # maximal number of fits, each on finer bins; not tuned
_MIN_SHRINKAGE = 0.3  # narrow deviation after over before EM, below which bins are refined


@dataclass(frozen=True)
class _Mixture:
    """Two Gaussians, the narrow one first.

    Attributes:
        weights: (2,) float64 on the CPU, positive, summing to 1.
        means: (2,) float64 on the CPU, in the unit of the values.
        variances: (2,) float64 on the CPU, in that unit squared; ``variances[0] <= variances[1]``.
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    @property
    def variance_ratio(self) -> float:
        """Return the variance of the wide component over that of the narrow one, at least 1."""
        return float(self.variances[1] / self.variances[0])

    def scaled(self, centre: float, unit: float) -> "_Mixture":
        """Return the mixture of ``(x - centre) / unit``, the narrow component first."""
        order = self.variances.argsort(stable=True)
        means, variances = (self.means - centre) / unit, self.variances / unit**2
        return _Mixture(self.weights[order], means[order], variances[order])

    def distance(self, before: "_Mixture") -> float:
        """Return the largest change of log odds, means in standard deviations, log variances."""
        odds = (self.weights / before.weights).log().diff()
        means = (self.means - before.means) / before.variances.sqrt()
        changes = torch.cat([odds, means, (self.variances / before.variances).log()])
        return float(changes.abs().max())


def tail_start(x: _Array, tail: float, floor: float = 0.0) -> _Mixture:
    """Return a deterministic initial mixture for the fit: the centre and the tails.

    The wide component gets the share ``tail`` of the values that are farthest from the median, the
    narrow one the remaining values. Each has the mean of its values. Each variance is the mean
    square about the *narrow* mean, so that a few far values on one side do not start as a component
    of no width.

    Args:
        x: (n,) finite values, not all equal.
        tail: share of the values that starts in the wide component, between 0 and 1.
        floor: smallest variance of a component.
    """
    if len(x) > 2 * _START_VALUES:  # a sample is accurate enough
        thinned = x[:: len(x) // _START_VALUES]
        if thinned.min() < thinned.max():
            x = thinned
    middle = (len(x) - 1) // 2
    distance = np.abs(x - np.partition(x, middle)[middle])
    n_near = len(x) - min(max(round(tail * len(x)), 1), len(x) - 1)
    threshold = np.partition(distance, n_near - 1)[n_near - 1]
    far = distance > threshold
    if not far.any():  # more than the share ``tail`` have the largest distance
        far = distance == threshold
    parts = [x[~far], x[far]]
    means = [float(p.mean()) for p in parts]
    variances = [max(float(np.square(p - means[0]).mean()), floor) for p in parts]
    return _Mixture(_tensor([len(p) / len(x) for p in parts]), _tensor(means), _tensor(variances))


def _tensor(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def fit_two_gaussians(
    values: Tensor, *, start: float = 0.01, regularization: float = 0.0
) -> _Mixture:
    """Return the maximum-likelihood fit of ``w0 N(m0, v0) + w1 N(m1, v1)``.

    EM runs on bins that are narrow at the centre and grow logarithmically into the tails. It
    continues on finer bins if the narrow component shrinks to their scale. The likelihood of a
    mixture has several optima; the result is the one that exact EM reaches from the initial
    mixture of :func:`tail_start`.

    It runs in float64 on the CPU, whatever the device of ``values``. This takes one copy of n
    numbers, no synchronisation per step, and gives the same result on every device.

    Args:
        values: (n,) finite values, n >= 2, not all equal.
        start: share of the values that :func:`tail_start` assigns to the wide component.
        regularization: added to both variances in every step, in the unit of the values squared:
            scikit-learn's ``reg_covar`` (1e-6 there). With it EM ends near, not at, a maximum of
            the likelihood.

    Raises:
        UnusableObservation: all values are equal.
    """
    x: _Array = values.detach().cpu().double().contiguous().numpy()
    if x.min() == x.max():
        raise base.UnusableObservation("all values are equal: two Gaussians do not separate them")
    scaled = x - x.mean()
    floor = float(scaled @ scaled) / len(x) * _VARIANCE_FLOOR
    mixture, steps_left = tail_start(x, start, floor), _MAX_STEPS
    for _ in range(_REBINNINGS):
        # In units of the narrow component, x and x**2 of most values are about 1 in size.
        centre = float(mixture.means[0])
        unit = math.sqrt(max(float(mixture.variances[0]), floor))
        np.subtract(x, centre, out=scaled)
        scaled *= 1 / unit
        features, counts = map(torch.from_numpy, _bin(scaled))
        current, converged = mixture.scaled(centre, unit), False
        while steps_left and not converged:
            steps_left -= 1
            step = _em_step(features, counts, current, floor / unit**2, regularization / unit**2)
            if step is None:
                break
            converged, current = step.distance(current) <= _TOLERANCE, step
        mixture = current.scaled(-centre / unit, 1 / unit)
        if not converged or float(mixture.variances[0]) >= (_MIN_SHRINKAGE * unit) ** 2:
            break
    return mixture


def _bin(x: _Array) -> tuple[_Array, _Array]:
    """Return (3, b) features of the non-empty bins and their counts (b,).

    The features of a bin are 1, the mean of x, and the mean of x**2. A bin holds the values of one
    sign whose ``1 + |x|`` has the same exponent and the same leading bits of the mantissa.
    """
    folded = np.abs(x)
    folded += 1
    index = folded.view(np.int64)
    index -= np.float64(1).view(np.int64)
    index >>= 53 - _RESOLUTION.bit_length()
    buffer = x.view(np.int64) >> 63  # all ones where x is negative
    index ^= buffer
    index -= index.min()
    counts = np.bincount(index)
    bins = counts.nonzero()[0]
    count = counts[bins].astype(np.float64)
    mean = np.bincount(index, x)[bins] / count
    squares = np.multiply(x, x, out=buffer.view(np.float64))
    mean_square = np.bincount(index, squares)[bins] / count
    return np.stack([np.ones_like(count), mean, mean_square]), count


def _em_step(
    features: Tensor, counts: Tensor, mixture: _Mixture, floor: float, added: float
) -> _Mixture | None:
    """Return the mixture after one step of EM, or None if a component has no values.

    Args:
        features: (3, b) of the bins, from :func:`_bin`; squared distances from a mean are products
            with them.
        counts: (b,) of the bins.
        mixture: the mixture before.
        floor: smallest variance.
        added: added to both variances.
    """
    m, v = mixture.means, mixture.variances
    squares = torch.stack([m.square(), -2 * m, torch.ones_like(m)], 1) @ features
    logs = mixture.weights.log() - v.log() / 2
    shares = (logs[:, None] - squares / (2 * v[:, None])).softmax(0) * counts
    n, sums, sums_of_squares = features @ shares.T
    if not bool(n.min() > 1e-9):  # also if one is NaN
        return None
    means = sums / n
    variances = (sums_of_squares / n - means.square()).clamp_min(floor) + added
    return _Mixture(n / n.sum(), means, variances)


Scorer = Literal["gmm", "abs"]

TAILS = (0.01, 0.03, 0.1, 0.003, 0.25)  # shares of rows that start in the wide cluster; not tuned
_ROWS_CHECKED = 33  # number of largest sums whose median decides whether all are rounding errors
_ROUNDING_UNITS = 16.0  # threshold of _is_rounding; rounding gave up to 3 units (measured)
SHAPES = tuple((size, length) for size in (1, 2, 4, 8, 16, 32) for length in (25, 50, 100))
"""(sentences, tokens per sentence) of the public batches that the regression is fitted on."""


REGULARIZATION = 1e-6
"""Added to both variances of the unit row sums, as scikit-learn's ``reg_covar``.

Real row sums have a sharper peak than a Gaussian, and the mixture of greatest likelihood puts up to
half of the vocabulary into the wide cluster. This bounds the variance of the narrow cluster from
below, so that the positive weight follows the number of types (Remark 2).
"""
MIN_RATIO = 4.0  # variance ratio, wide over narrow, from which clusters are separated; not tuned


def flatten(gradient: Tensor) -> Tensor:
    """Return the row sums ``dW 1`` (Eq. 5), accumulated in float32 or float64.

    Half precision is converted a few rows at a time. The shards of a DTensor are summed and only
    the (V,) sums are gathered, by a collective that every rank must enter.

    Args:
        gradient: (V, d) of a floating type.

    Returns:
        (V,) on the same device, float64 for float64, float32 otherwise.
    """
    gradient = gradient.detach()
    if hasattr(gradient, "full_tensor"):
        local = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        return whole_tensor(local.sum(dim=1))
    if gradient.dtype == torch.float64:
        return gradient.sum(dim=1)
    return map_rows(gradient, lambda rows: rows.sum(dim=1))


def normalized_row_sums(gradient: Tensor) -> Tensor:
    """Return the row sums, scaled to norm 1 (line 2 of Algorithm 1).

    Row sums leak nothing if the entries of every hidden state sum to zero, as after a LayerNorm at
    its initial gain and bias (the first step of GPT-2 or BERT from scratch). They are rounding
    errors then, and an error is raised.

    Args:
        gradient: (V, d) of a floating type.

    Returns:
        (V,) float64 on the CPU.

    Raises:
        UnusableObservation: the sums have NaN or infinity, are all zero, or are rounding errors.
    """
    sums = flatten(gradient)
    s = sums.cpu().double()
    norm: Tensor = torch.linalg.vector_norm(s)
    base.check_readable(norm, "the head's gradient")
    if _is_rounding(gradient.detach(), sums):
        raise base.UnusableObservation("hidden states sum to zero: use AlignedFlatChat")
    return s.div_(norm)


def _is_rounding(gradient: Tensor, sums: Tensor) -> bool:
    """Return whether rounding explains even the largest row sums.

    A row sum is compared with the sum of its absolute entries, in units of ``eps / sqrt(d)``.
    Rounding leaves a few units, a real row sum has hundreds in bfloat16 and millions in float32.
    """
    largest = sums.abs().topk(min(_ROWS_CHECKED, len(sums))).indices
    if hasattr(gradient, "full_tensor"):
        absolute = whole_tensor(gradient.float().abs().sum(dim=1))[largest]
    else:
        absolute = gradient[largest].abs().sum(dim=1, dtype=sums.dtype)
    unit = torch.finfo(gradient.dtype).eps / gradient.shape[1] ** 0.5
    shares = sums[largest].abs() / absolute
    return bool(shares.nanmedian() < _ROUNDING_UNITS * unit)


def separate_clusters(s: Tensor) -> _Mixture:
    """Return the first fitted mixture whose positive cluster is wide enough (Remark 1).

    The starts of :data:`TAILS` are tried in turn (the paper re-runs with random ones).

    Args:
        s: (V,) flattened gradient, of norm 1.

    Returns:
        The mixture. If no start separates the clusters, it is the one with the largest ratio of
        variances.
    """
    mixtures: list[_Mixture] = []
    for tail in TAILS:
        mixtures.append(fit_two_gaussians(s, start=tail, regularization=REGULARIZATION))
        if mixtures[-1].variance_ratio >= MIN_RATIO:
            return mixtures[-1]
    return max(mixtures, key=lambda m: m.variance_ratio)


def positive_weight(gradient: Tensor) -> float:
    """Return the weight of the positive cluster in the mixture of a gradient's row sums."""
    return float(separate_clusters(normalized_row_sums(gradient)).weights[1])


def rank_types(s: Tensor, mixture: _Mixture, scorer: Scorer = "gmm") -> Tensor:
    """Return a score of each type, higher if its use is more likely.

    Args:
        s: (V,) flattened gradient, in the unit that the mixture was fitted in.
        mixture: its wide component is the positive cluster.
        scorer: ``"gmm"``: Eq. 11, squared distance from the negative cluster minus that from the
            positive one, each in its cluster's standard deviation; ``"abs"``: ``|s|`` (Table 4).

    Returns:
        (V,) float64 on the CPU.
    """
    x = s.detach().cpu().double()
    if scorer == "abs":
        return x.abs()
    negative, positive = (
        (x - mean).square_().div_(variance)
        for mean, variance in zip(mixture.means, mixture.variances, strict=True)
    )
    difference: Tensor = negative - positive
    return difference


def fit_type_counts(positive_weights: Sequence[float], n_types: Sequence[float]) -> Tensor:
    """Fit the number of word types as a linear function of the positive weight (Appendix B).

    Args:
        positive_weights: weight of the positive cluster of each public gradient.
        n_types: number of types in the batch of each.

    Returns:
        (2,) float64, intercept and slope of the least-squares line.

    Raises:
        ValueError: all weights are equal.
    """
    if len(set(positive_weights)) < 2:
        raise ValueError("all public gradients have one positive weight: use more batch shapes")
    fitted = np.polynomial.Polynomial.fit(positive_weights, n_types, 1).convert().coef
    line = torch.zeros(2, dtype=torch.float64)
    line[: len(fitted)] = torch.from_numpy(fitted)  # without trailing zeros
    return line


def flatchat(gradient: Tensor, n_types: float | Tensor, scorer: Scorer = "gmm") -> base.WordGuess:
    """Return the guess of Algorithm 1 for one gradient.

    Args:
        gradient: (V, d) of the output head's weight.
        n_types: number of types to name, or the line of :func:`fit_type_counts` that predicts it.
            It is rounded, and at least 1 and at most V.
        scorer: see :func:`rank_types`.

    Raises:
        UnusableObservation: the row sums are non-finite, all zero, or rounding errors.
    """
    s = normalized_row_sums(gradient)
    mixture = separate_clusters(s)
    scores = rank_types(s, mixture, scorer)
    if isinstance(n_types, Tensor):
        constant, slope = n_types.tolist()
        n_types = constant + slope * float(mixture.weights[1])
    estimate = float(n_types)
    best = scores.topk(min(max(round(estimate), 1), len(scores)))
    return base.WordGuess(
        types=best.indices.to(gradient.device),
        scores=scores.float().to(gradient.device),
        n_types=estimate,
    )


class FlatChat(base.Attack):
    """The gradient flattening attack (Algorithm 1): row sums, a mixture, and the top K types.

    Token i enters the row sum of its label with the sum of its hidden state as weight (Lemma 2).
    The used types form the cluster of large variance (Theorem 3, Remark 1). Their number is
    predicted from the weight of that cluster, by a regression on gradients of public text
    (Remark 2).

    Args:
        public_text: text that the regression is fitted on: strings (with ``tokenizer``), token ids,
            or ``"sampled"`` for text that a causal model generates itself.
            ``n_types="predicted"`` needs it unless a fitted state is loaded.
        tokenizer: The tokenizer of strings; a masked language model needs its ``mask_token_id``.
        n_types: ``"predicted"``, or the number of types that the adversary assumes.
        shapes: (sentences, length) of the public batches.
        seed: The seed of the public batches.
        name: The name in the logs.

    Raises:
        ValueError: ``n_types`` is a string other than ``"predicted"``.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import FlatChat
        >>> from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
        >>> generator = torch.Generator().manual_seed(0)
        >>> gradient = torch.randn(100, 16, generator=generator) * 1e-3  # (V, d) of the head
        >>> gradient[[3, 5, 8]] -= torch.tensor([[1.0], [3.0], [0.3]])  # the client's words
        >>> attack = FlatChat(n_types=3)
        >>> guess = attack.run(
        ...     Observation((GradientSnapshot(0, Stage.SHARED, {"head.weight": gradient}),))
        ... )
        >>> sorted(guess.types.tolist())
        [3, 5, 8]
    """

    threat_model = base.ThreatModel.create(
        "an honest but curious server that reads one update of the output head",
        base.Capability.SEES_HEAD_GRADIENT,
        base.Capability.KNOWS_MODEL,
        base.Capability.KNOWS_PUBLIC_TEXT,
    )
    default_name = "flatchat"
    config_names = ("n_types",)
    gathers = True  # prepare gathers a sharded model itself, to compute public gradients

    def __init__(
        self,
        public_text: TextSource | None = None,
        *,
        tokenizer: Any = None,
        n_types: Literal["predicted"] | float = "predicted",
        shapes: Sequence[tuple[int, int]] = SHAPES,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if isinstance(n_types, str):
            check_choice("n_types", n_types, ("predicted",), hint="or a number")
        self.public_text = PublicText.parse(public_text, tokenizer)
        self.n_types = n_types
        self.shapes = tuple(shapes)
        self._mask_token_id = getattr(tokenizer, "mask_token_id", None)
        self.seed = seed
        self.regressor: Tensor | None = None  # (2,) of fit_type_counts, once it is fitted
        self._role = HEAD_WEIGHT  # the parameter whose gradient is read
        self._why_not_fitted = "it has no regression: call prepare(anatomy), or load one"

    @property
    def predicts(self) -> bool:
        """Return whether the regression predicts the number of types."""
        return self.n_types == "predicted"

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the head's weight, which may be tied, or the factor B of a LoRA on the head."""
        self._role = head_surface(anatomy).role
        return base.Surfaces(gradients=(self._role,))

    def prepare(self, anatomy: Anatomy) -> None:
        """Fit the regression on gradients of public text, if the number of types is predicted.

        Nothing is fitted if row sums of public gradients are rounding errors, as in a model that is
        not trained yet. ``run`` then raises an error with this reason, and ``refresh`` tries again.

        Raises:
            ValueError: the number of types is predicted and there is no public text.
        """
        self._role = head_surface(anatomy).role
        if not self.predicts:
            return
        if self.public_text is None:
            raise ValueError(
                f"attack '{self.name}' has no text from which to predict the number of types: pass "
                "FlatChat(public_text=...) or FlatChat(n_types=...)"
            )
        text = self.public_text
        if isinstance(text, str):
            sentences, length = (max(sizes) for sizes in zip(*self.shapes, strict=True))
            text = PublicText.sampled_from(anatomy, 2 * sentences, length, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        batches = [
            text.batch(*shape, generator, kind=anatomy.kind, mask_token_id=self._mask_token_id)
            for shape in self.shapes
        ]
        try:
            weights = [*map(positive_weight, each_gradient(anatomy, batches, self._role))]
        except base.UnusableObservation as error:
            self._why_not_fitted = f"its regression on public text could not be fitted: {error}"
            return
        counts = [float(len(torch.unique(batch.target_ids()))) for batch in batches]
        self.regressor = fit_type_counts(weights, counts)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Fit the regression if ``prepare`` could not, because the model was not trained yet."""
        if self.predicts and self.regressor is None:
            self.prepare(anatomy)

    def run(self, view: base.Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the word types that the newest head gradient leaks.

        Raises:
            UnusableObservation: the row sums are non-finite, all zero or rounding errors; or no
                regression is fitted that predicts the number of types.
        """
        n_types = self.regressor if isinstance(self.n_types, str) else self.n_types
        if n_types is None:
            raise base.UnusableObservation(f"attack '{self.name}': {self._why_not_fitted}")
        return flatchat(view.gradient(self._role), n_types)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the fitted regression, if there is one."""
        return {} if self.regressor is None else {"regressor": self.regressor}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the regression."""
        if "regressor" in state:
            self.regressor = state["regressor"].detach().cpu().double()
