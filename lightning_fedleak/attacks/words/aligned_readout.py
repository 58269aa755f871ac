"""A small classifier of the rows of a head's gradient: is the row's type in the batch?

Each row of the output head's gradient belongs to a type, a distinct token of the vocabulary; a type
is used if it is a label in the batch. The classifier is called the readout; its features are in
:mod:`~lightning_fedleak.attacks.words.aligned_rows`. :func:`rehearse` fits it on "rehearsals":
simulated gradients of batches of public text, whose words are known. Before a gradient is
classified, :func:`refit_direction` refits the direction that its rows are projected on, because the
direction of public text may not suit the client's text. :func:`best_count` then chooses how many
types to name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lightning_fedleak.attacks.words import aligned_rows
from lightning_fedleak.attacks.words.aligned_rows import RowSummary, projections
from lightning_fedleak.attacks.words.head_gradients import GradientParts
from lightning_fedleak.model.snapshots import Compression
from lightning_fedleak.progress import track

# For `refit_direction`. None of these constants is tuned.
_MAX_ROWS = 512  # maximal number of unused rows, the longest, that the direction is fitted to
_MIN_ROWS = 64  # number of rows below which the direction of public text is kept
_STEPS = 12  # directions that are tried; more cost time in every run
_RATE = 0.25  # length of a step of the direction, which is a unit vector
_MIN_USED = 0.3  # norm above which rows count as used, in norms of the row of a type used once
_MAX_UNUSED = 0.1  # norm up to which rows count as unused, in the same unit


def refit_direction(
    gradient: Tensor, summary: RowSummary, u: Tensor, rows: Tensor | None = None
) -> tuple[RowSummary, Tensor]:
    """Return a summary along a direction on which this gradient's hidden states are positive.

    The row of an unused type is a positive combination of the hidden states. If the text differs
    from the public text, or the model was trained further, hidden states project on ``u`` with
    either sign. A direction that is positive on all unused rows then replaces ``u``. A row counts
    as unused if its norm is small compared with the row of one used token, and is excluded if noise
    could explain it.

    Args:
        gradient: The head's gradient (V, d), or some of its rows.
        summary: The summary of ``gradient`` along ``u``.
        u: The direction of public text, (d,). It stays if too few rows are usable. It also stays if
            the large rows would be mostly positive along the new direction, because the rows of
            used types are negative along a correct one.
        rows: The indices of the rows to choose unused ones from; all by default.

    Returns:
        The summary along the new direction, and the direction.
    """
    if rows is not None and len(rows) < _MIN_ROWS:
        return summary, u
    noise = (summary if rows is None else summary.select(rows)).noise()
    unit = aligned_rows.token_norm(summary, noise)  # the norm of the row of a type used once
    if unit is None:
        return summary, u
    # Rows of noise alone have norms near noise * sqrt(d).
    clear = (summary.norms > 2 * noise * summary.width**0.5) & (summary.norms < _MAX_UNUSED * unit)
    indices = clear.nonzero()[:, 0] if rows is None else rows[clear[rows]]
    if len(indices) < _MIN_ROWS:
        return summary, u
    longest = summary.norms.index_select(0, indices).topk(min(_MAX_ROWS, len(indices))).indices
    unused = gradient.detach().index_select(0, indices[longest]).float() - summary.common
    direction = aligned_rows.separating_direction(unused, steps=_STEPS, rate=_RATE)
    projection = projections(gradient, direction) - summary.common @ direction
    large = (summary.norms > _MIN_USED * unit).nonzero()[:, 0]
    if not bool((projection[large].sign() * summary.norms[large]).sum() < 0):
        return summary, u
    return replace(summary, projection=projection), direction


# For the classifier and its rehearsals. None of these constants is tuned.
_HIDDEN = 64  # width of the classifier's two hidden layers
_BATCH = 1024  # rows of a step of the classifier's fit
_PEAK_RATE = 6e-3  # largest learning rate of that fit
_WEIGHT_DECAY = 1e-2  # AdamW's weight decay in that fit
_WARMUP = 0.25  # share of that fit in which the learning rate rises
_CLUSTERS = 32  # clusters of hidden states whose mass is refitted to a gradient
_SIZES = 9  # maximal number of sizes of rehearsed batches; more cost time
_REPEATS = 12  # maximal number of rehearsed batches of one size; more cost time
_FREQUENT = 4096  # most probable types, whose rows are in every rehearsal; more cost memory
_RANDOM = 2048  # further types that are drawn for a rehearsal; more cost memory
_STARTS = 2048  # places where the noise of a batch may start; more cost memory
_MAX_IMPORTANCE = 10.0  # largest weight of a drawn type in the loss


@dataclass(frozen=True)
class _Readout:
    """The classifier: two hidden layers on standardised features of a row.

    Its output is the log odds that the row's type is *used*, so in the batch.

    Attributes:
        mean: The mean of the features in training, (F,).
        deviation: The standard deviation of the features in training, (F,).
        weight0: The first layer's weight, (F, h).
        weight1: The second layer's weight, (h, h).
        weight2: The output layer's weight, (h, 1).
        bias0: The first layer's bias, (h,).
        bias1: The second layer's bias, (h,).
        bias2: The output layer's bias, (1,).
    """

    mean: Tensor
    deviation: Tensor
    weight0: Tensor
    weight1: Tensor
    weight2: Tensor
    bias0: Tensor
    bias1: Tensor
    bias2: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Return the log odds (k,) of *used* for (k, F) features."""
        x = ((features - self.mean) / self.deviation).clamp(-6, 6)  # as in fit_readout
        weights = (self.weight0, self.weight1, self.weight2)
        return _network(x, (*weights, self.bias0, self.bias1, self.bias2))


def _network(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the logits (n,) of inputs (n, F), by the weights of three layers and their biases."""
    *weights, last, bias0, bias1, last_bias = parameters
    for w, b in zip(weights, (bias0, bias1), strict=True):
        x = F.silu(torch.addmm(b, x, w))
    return torch.addmm(last_bias, x, last)[:, 0]


def fit_readout(
    features: Tensor, used: Tensor, importance: Tensor, generator: torch.Generator, passes: int = 20
) -> _Readout:
    """Return a classifier fitted by AdamW on a weighted logistic loss, with a one-cycle rate.

    Args:
        features: The features of the rows, (n, F).
        used: Whether the type of each row is in its batch, (n,) bool.
        importance: The number of rows that each row represents, (n,).
        generator: The CPU generator of the initial weights and the order.
        passes: The number of passes over the rows.
    """
    device, n = features.device, len(features)
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    x = ((features - mean) / deviation).clamp(-6, 6)  # bounds the effect of outliers
    sizes = [features.shape[1], _HIDDEN, _HIDDEN, 1]
    shapes = [*itertools.pairwise(sizes), *((o,) for o in sizes[1:])]
    starts = [torch.randn(s, generator=generator) * (2 / s[0]) ** 0.5 for s in shapes[:3]]
    starts += [torch.zeros(s) for s in shapes[3:]]
    # One tensor of all parameters, since a step of AdamW takes longer for six.
    vector = torch.cat([start.flatten() for start in starts]).to(device).requires_grad_()

    def parameters() -> list[Tensor]:
        parts = torch.split(vector, [math.prod(s) for s in shapes])
        return [part.view(s) for part, s in zip(parts, shapes, strict=True)]

    optimizer = torch.optim.AdamW([vector], lr=_PEAK_RATE, weight_decay=_WEIGHT_DECAY)
    steps = passes * -(-n // _BATCH)
    schedule = LambdaLR(optimizer, lambda step: _one_cycle(step / steps))
    with torch.enable_grad():
        for _ in track(range(passes), "fitting the readout"):
            order = torch.randperm(n, generator=generator).to(device)
            for rows in torch.split(order, _BATCH):
                losses = F.binary_cross_entropy_with_logits(
                    _network(x[rows], parameters()), used[rows].float(), reduction="none"
                )
                optimizer.zero_grad()
                (losses * importance[rows]).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return _Readout(mean, deviation, *(p.detach().clone() for p in parameters()))


def _one_cycle(progress: float) -> float:
    """Return the learning rate over its peak: a linear rise from 0.04, then a half cosine to 0."""
    if progress < _WARMUP:
        return 0.04 + 0.96 * progress / _WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP)))


def best_count(probabilities: Tensor) -> Tensor:
    """Return how many of the most probable types to report for the largest expected F1, ().

    If the k most probable types are reported, the expected number of hits is the sum of their
    probabilities, and the expected number of used types is the sum of all probabilities. F1 is then
    about ``2 sum_{i<=k} p_i / (k + sum_i p_i)``. The result is 0 if every probability is 0.

    Args:
        probabilities: The calibrated probabilities that each type is used, (n,) in any order.
    """
    ordered = probabilities.sort(descending=True).values.double()
    hits = ordered.cumsum(0)
    k = torch.arange(1, len(ordered) + 1, device=ordered.device)
    score = 2 * hits / (k + hits[-1])
    return torch.where(hits[-1] > 0, score.argmax() + 1, 0)


@dataclass(frozen=True)
class HeadCalibration:
    """A fitted readout with the statistics of public text from which its features follow.

    Attributes:
        directions: The directions that rows are projected on.
        clusters: The cluster centres that ``expected.mass`` is split by, (C, d).
        expected: The expectations of unused rows.
        readout: The classifier of a row's features.
    """

    directions: aligned_rows.Directions
    clusters: Tensor
    expected: aligned_rows.ExpectedRows
    readout: _Readout

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        tensors = {"clusters": self.clusters}
        for group in ("directions", "expected", "readout"):
            tensors |= {f"{group}.{name}": t for name, t in vars(getattr(self, group)).items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> HeadCalibration:
        """Return the calibration whose :meth:`tensors` these are."""
        groups: dict[str, dict[str, Tensor]] = {"directions": {}, "expected": {}, "readout": {}}
        for name, tensor in tensors.items():
            group, _, field = name.partition(".")
            if field:
                groups[group][field] = tensor
        return cls(
            aligned_rows.Directions(**groups["directions"]),
            tensors["clusters"],
            aligned_rows.ExpectedRows(**groups["expected"]),
            _Readout(**groups["readout"]),
        )

    def on_device(self, device: torch.device) -> HeadCalibration:
        """Return the calibration on a device."""
        if self.clusters.device == device:
            return self
        return self.from_tensors({k: v.to(device) for k, v in self.tensors().items()})


def rehearse(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    generator: torch.Generator,
    compression: Compression | None = None,
) -> HeadCalibration:
    """Return a calibration that is fitted on simulated batches of public sentences.

    Batches are drawn from one half of the sentences. The expectations of unused rows are computed
    on the other half, because in an attack, too, they come from another text than the batch. Then
    the halves are exchanged.

    Args:
        parts: The hidden states and gradients of at least 4 public sentences.
        weight: The head's weight, (V, d).
        bias: The head's bias (V,), or None.
        generator: The CPU generator of all draws.
        compression: The compression, which is applied to each batch with a probability of 1/2.
    """
    directions = aligned_rows.Directions.fit(parts, generator)
    unit = F.normalize(parts.states, dim=1)
    clusters = aligned_rows.cluster_centres(unit, _CLUSTERS, generator)
    order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
    middle = len(order) // 2
    halves = [parts.select(half) for half in (order[:middle], order[middle:])]
    computed = [
        aligned_rows.ExpectedRows.compute(h, weight, bias, directions, clusters) for h in halves
    ]
    expected, halves = map(list, zip(*computed, strict=True))
    rehearsals: list[tuple[Tensor, Tensor, Tensor]] = []  # features, whether used, and importance
    for public, other_half in zip(reversed(halves), expected, strict=True):
        common = _common_types(other_half)
        public = public.with_known(common, weight, bias)
        n_types = len(torch.unique(torch.cat([common, public.labels, public.input_ids])))
        size = min(n_types + _RANDOM, len(weight)) * unit.shape[1]  # of the largest gradient
        noise = torch.randn(size + _STARTS, generator=generator).to(unit)
        for batch in _draw_batches(public, generator):
            types, importance = _draw_types(batch, common, len(weight), generator)
            gradient = batch.gradient(weight, bias, types)
            use_norm = directions.norm * abs(parts.logit_map.scale) / len(batch.labels)
            _add_noise(gradient, use_norm, noise, generator)
            if compression is not None and float(torch.rand((), generator=generator)) < 0.5:
                gradient = compression.reduce(gradient, len(weight))
            summary = RowSummary.read(gradient, directions.u)
            row_of_type = torch.full((len(weight),), -1, device=types.device)
            row_of_type[types] = torch.arange(len(types), device=types.device)
            reference = row_of_type[other_half.reference]
            summary, _ = refit_direction(gradient, summary, directions.u, reference)
            units = aligned_rows.estimate_units(summary, other_half, reference)
            if units is None:
                continue
            rows = aligned_rows.plausible(summary, units).nonzero()[:, 0]
            features = aligned_rows.row_features(
                gradient[rows],
                summary.select(rows),
                units,
                directions,
                other_half.rows(types[rows]),
            )
            rehearsals.append((features, torch.isin(types[rows], batch.labels), importance[rows]))
    features, used, importance = (torch.cat(c) for c in zip(*rehearsals, strict=True))
    readout = fit_readout(features, used, importance, generator)
    return HeadCalibration(
        directions, clusters, aligned_rows.ExpectedRows.average(*expected), readout
    )


def _draw_batches(parts: GradientParts, generator: torch.Generator) -> Iterator[GradientParts]:
    """Yield batches of 1 to all sentences, log-spaced, that have a label to predict.

    There are several batches of a small size, at most :data:`_REPEATS`, which together have no more
    than about two thirds as many sentences as there are. There is one batch of a large size.
    """
    n = parts.n_sentences
    sizes = {round(n ** (i / (_SIZES - 1))) for i in range(_SIZES)}
    batch_sizes = [b for b in sorted(sizes) for _ in range(max(1, min(_REPEATS, 2 * n // (3 * b))))]
    by_length = torch.bincount(parts.sentence, minlength=n).argsort().cpu()
    for size in track(batch_sizes, "rehearsing updates"):
        pool = _draw_pool(by_length, size, generator)
        sentences = pool[torch.randperm(len(pool), generator=generator)[:size]]
        batch = parts.select(sentences.to(parts.labels.device))
        if len(batch.labels):
            yield batch


def _draw_pool(by_length: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return the sentences to draw a batch from: all, or in half of the cases a third of them.

    The sentences of the third have similar lengths, as the texts of one client often have. A
    gradient does not show lengths, so that the readout must be accurate in both cases.
    """
    draw = torch.rand(2, generator=generator)
    third = len(by_length) // 3
    if size > third or draw[0] < 0.5:
        return by_length
    start = int(draw[1] * (len(by_length) - third + 1))
    return by_length[start : start + third]


def _add_noise(
    gradient: Tensor, use_norm: Tensor, noise: Tensor, generator: torch.Generator
) -> None:
    """Add a defence's noise to a gradient in a third of the cases.

    Its standard deviation per coordinate is log-uniform between 1e-4 and 0.3 of ``use_norm``, the
    norm of the row of a type that was used once. It is a random section of ``noise``, standard
    normal values that several batches share, since drawing takes longer than the gradient.
    """
    is_noisy, strength, place = torch.rand(3, generator=generator).tolist()
    if is_noisy > 1 / 3:
        return
    start = int(place * (len(noise) - gradient.numel()))
    section = noise[start : start + gradient.numel()].view_as(gradient)
    gradient.addcmul_(section, use_norm, value=10 ** (-4 + 3.5 * strength))


def _common_types(expected: aligned_rows.ExpectedRows) -> Tensor:
    """Return the types in all rehearsals: the reference types and the most probable ones."""
    likely = expected.probability.topk(min(_FREQUENT, len(expected.probability))).indices
    common: Tensor = torch.unique(torch.cat([expected.reference, likely]))
    return common


def _draw_types(
    batch: GradientParts, common: Tensor, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the types whose rows a rehearsal holds, and their weights in the loss.

    They are the ``common`` types, the batch's further labels and inputs, and a random sample of the
    remaining types, each of which represents several in the loss.
    """
    is_common = torch.zeros(vocabulary, dtype=torch.bool, device=common.device)
    is_common[common] = True
    required = is_common.clone()
    for types in (batch.labels, batch.input_ids):
        required[types] = True
    further, pool = (required & ~is_common).nonzero()[:, 0], (~required).nonzero()[:, 0]
    included = torch.cat([common, further])
    sample = pool[torch.randperm(len(pool), generator=generator)[:_RANDOM].to(pool.device)]
    weight = min(_MAX_IMPORTANCE, len(pool) / max(1, len(sample)))
    importance = torch.cat([torch.ones(len(included)), torch.full((len(sample),), weight)])
    return torch.cat([included, sample]), importance.to(included.device)
