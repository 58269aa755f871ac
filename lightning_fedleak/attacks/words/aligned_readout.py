"""A small classifier of gradient rows, fitted on public text whose words are known.

First the projection direction, which is fitted on public text, is refitted to the gradient.
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

from lightning_fedleak.attacks.words.aligned_rows import (
    Directions,
    ExpectedRows,
    Units,
    cluster_centres,
    plausible,
    row_features,
    separating_direction,
    token_norm,
)
from lightning_fedleak.attacks.words.head_gradients import GradientParts
from lightning_fedleak.attacks.words.row_summary import RowSummary, projections
from lightning_fedleak.model.compression import Compression
from lightning_fedleak.progress import track

_ROWS = 512  # unused rows that the direction is fitted to, the longest: a limit of time, not tuned
_FEWEST = 64  # rows below which the direction of public text is kept; not tuned
_STEPS = 12  # directions tried; more cost time at every look, not tuned
_RATE = 0.25  # length of a move of the direction; not tuned
_LARGE = 0.3  # norm from which a row is a used type's, in norms of a token's row; not tuned
_UNUSED = 0.1  # norm up to which a row is an unused type's, in norms of a token's row; not tuned


def turn(
    gradient: Tensor, summary: RowSummary, u: Tensor, rows: Tensor | None = None
) -> tuple[RowSummary, Tensor]:
    """Return a direction on which the hidden states behind this gradient are positive.

    The row of an unused type is a positive combination of the hidden states. If the text differs
    from the public text, or the model was trained further, hidden states project on ``u`` with
    either sign; a direction that is positive on all unused rows then replaces it. A row counts as
    unused if it is small beside the row of one used token, and is excluded if noise could explain
    it.

    Args:
        gradient: (V, d), or some of its rows.
        summary: of ``gradient`` along ``u``.
        u: (d,) of public text. It stays if too few rows are usable, or if the new direction made
            the large rows positive, because rows of used types are negative.
        rows: indices of the rows to choose from; all by default.

    Returns:
        the summary along the new direction, and the direction.
    """
    if rows is not None and len(rows) < _FEWEST:
        return summary, u
    noise = (summary if rows is None else summary.select(rows)).noise()
    token = token_norm(summary, noise)
    if token is None:
        return summary, u
    clear = (summary.norms > 2 * noise * summary.width**0.5) & (summary.norms < _UNUSED * token)
    places = clear.nonzero()[:, 0] if rows is None else rows[clear[rows]]
    if len(places) < _FEWEST:
        return summary, u
    longest = summary.norms.index_select(0, places).topk(min(_ROWS, len(places))).indices
    unused = gradient.detach().index_select(0, places[longest]).float() - summary.common
    direction = separating_direction(unused, steps=_STEPS, rate=_RATE)
    projection = projections(gradient, direction) - summary.common @ direction
    large = (summary.norms > _LARGE * token).nonzero()[:, 0]
    if not bool((projection[large].sign() * summary.norms[large]).sum() < 0):
        return summary, u
    return replace(summary, projection=projection), direction


_HIDDEN = 64  # width of the classifier's two hidden layers; not tuned
_BATCH = 1024  # rows of a step of the classifier's fit; not tuned
_PEAK_RATE = 6e-3  # largest learning rate of that fit; not tuned
_WEIGHT_DECAY = 1e-2  # of AdamW in that fit; not tuned
_WARMUP = 0.25  # share of that fit in which the learning rate rises; not tuned
_CLUSTERS = 32  # clusters of hidden states whose mass is refitted to a gradient; not tuned
_SIZES = 9  # sizes of rehearsed batches at most; more cost time, not tuned
_REPEATS = 12  # rehearsed batches of one size at most; more cost time, not tuned
_FREQUENT = 4096  # likely types that every rehearsal holds; more cost memory, not tuned
_RANDOM = 2048  # other types drawn for a rehearsal; more cost memory, not tuned
_MAX_IMPORTANCE = 10.0  # largest weight of a drawn type in the loss; not tuned


@dataclass(frozen=True)
class Readout:
    """Two hidden layers on standardised features; gives the probability of *used*.

    Attributes:
        mean: (F,) mean of the features in training.
        deviation: (F,) their standard deviation.
        weight0: (F, h) of the first layer, and so on: (h, h), (h, 1).
        bias0: (h,) of the first layer, and so on: (h,), (1,).
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
        x = ((features - self.mean) / self.deviation).clamp(-6, 6)
        weights = (self.weight0, self.weight1, self.weight2)
        return _network(x, weights, (self.bias0, self.bias1, self.bias2))

    @classmethod
    def fit(
        cls,
        features: Tensor,
        used: Tensor,
        importance: Tensor,
        generator: torch.Generator,
        passes: int = 20,
    ) -> Readout:
        """Return a classifier fitted by AdamW on a weighted logistic loss, with a one-cycle rate.

        Args:
            features: (n, F).
            used: (n,) booleans.
            importance: (n,) how many rows each row represents.
            generator: CPU generator of the initial weights and the order.
            passes: over the rows.
        """
        device, n = features.device, len(features)
        mean, deviation = features.mean(0), features.std(0) + 1e-6
        x = ((features - mean) / deviation).clamp(-6, 6)
        sizes = [features.shape[1], _HIDDEN, _HIDDEN, 1]
        weights = [
            (torch.randn(i, o, generator=generator) * (2 / i) ** 0.5).to(device).requires_grad_()
            for i, o in itertools.pairwise(sizes)
        ]
        biases = [torch.zeros(o, device=device, requires_grad=True) for o in sizes[1:]]
        parameters = [*weights, *biases]
        optimizer = torch.optim.AdamW(parameters, lr=_PEAK_RATE, weight_decay=_WEIGHT_DECAY)
        steps = passes * -(-n // _BATCH)
        schedule = LambdaLR(optimizer, lambda step: _one_cycle(step / steps))
        with torch.enable_grad():
            for _ in track(range(passes), "fitting the readout"):
                order = torch.randperm(n, generator=generator).to(device)
                for rows in torch.split(order, _BATCH):
                    losses = F.binary_cross_entropy_with_logits(
                        _network(x[rows], weights, biases), used[rows].float(), reduction="none"
                    )
                    optimizer.zero_grad()
                    (losses * importance[rows]).mean().backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    schedule.step()
        return cls(mean, deviation, *(p.detach() for p in parameters))


def _network(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        x = F.silu(x @ w + b)
    return (x @ weights[-1] + biases[-1])[:, 0]


def _one_cycle(progress: float) -> float:
    if progress < _WARMUP:
        return 0.04 + 0.96 * progress / _WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP)))


def best_count(probabilities: Tensor) -> Tensor:
    """Return how many of the most probable types to name for the largest expected F1, ().

    If the k most probable are named, the expected number of hits is the sum of their probabilities
    and the expected number of used types the sum of all, so that F1 is about
    ``2 sum_{i<=k} p_i / (k + sum_i p_i)``. The result is 0 if every probability is 0.

    Args:
        probabilities: (n,) in any order, calibrated.
    """
    ordered = probabilities.sort(descending=True).values.double()
    hits = ordered.cumsum(0)
    k = torch.arange(1, len(ordered) + 1, device=ordered.device)
    score = 2 * hits / (k + hits[-1])
    return torch.where(hits[-1] > 0, score.argmax() + 1, 0)


@dataclass(frozen=True)
class HeadCalibration:
    """All that a learned readout needs to attack.

    Attributes:
        directions: directions that rows are projected on.
        clusters: (C, d) centres that ``expected.mass`` is split by.
        expected: expectations of unused rows.
        readout: the classifier of a row's features.
    """

    directions: Directions
    clusters: Tensor
    expected: ExpectedRows
    readout: Readout

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
            Directions(**groups["directions"]),
            tensors["clusters"],
            ExpectedRows(**groups["expected"]),
            Readout(**groups["readout"]),
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
    """Return a calibration fitted on simulated batches of public sentences.

    The expectations of unused rows come from one half of the sentences and the batches from the
    other half, and the reverse, because the attack meets other text than it has.

    Args:
        parts: of at least 4 sentences.
        weight: (V, d) of the head.
        bias: (V,) or None.
        generator: CPU generator.
        compression: applied to each batch with a probability of 1/2.
    """
    directions = Directions.fit(parts, generator)
    unit = F.normalize(parts.states, dim=1)
    clusters = cluster_centres(unit, _CLUSTERS, generator)
    order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
    middle = len(order) // 2
    halves = [parts.select(half) for half in (order[:middle], order[middle:])]
    expected = [ExpectedRows.compute(h, weight, bias, directions, clusters) for h in halves]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for public, other_half in zip(reversed(halves), expected, strict=True):
        for batch in _draw_batches(public, generator):
            types, importance = _draw_types(batch, other_half, generator)
            gradient = batch.gradient(weight, bias, types)
            token = directions.norm * abs(parts.logit_map.scale) / len(batch.labels)
            gradient += _draw_noise(gradient, token, generator)
            if compression is not None and float(torch.rand((), generator=generator)) < 0.5:
                gradient = compression.reduce(gradient, len(weight))
            summary = RowSummary.read(gradient, directions.u)
            place = torch.full((len(weight),), -1, device=types.device)
            place[types] = torch.arange(len(types), device=types.device)
            reference = place[other_half.reference]
            summary, _ = turn(gradient, summary, directions.u, reference)
            units = Units.estimate(summary, other_half, reference)
            if units is None:
                continue
            some = plausible(summary, units).nonzero()[:, 0]
            features = row_features(
                gradient[some],
                summary.select(some),
                units,
                directions,
                other_half.rows(types[some]),
            )
            rows.append((features, torch.isin(types[some], batch.labels), importance[some]))
    features, used, importance = (torch.cat(c) for c in zip(*rows, strict=True))
    readout = Readout.fit(features, used, importance, generator)
    return HeadCalibration(directions, clusters, ExpectedRows.average(*expected), readout)


def _draw_batches(parts: GradientParts, generator: torch.Generator) -> Iterator[GradientParts]:
    """Yield batches of 1 to all sentences, log-spaced, that have a label to predict.

    Small batches are repeated to even out the work, up to :data:`_REPEATS` times.
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
    """Return the sentences to draw a batch from: all, or half the time a third of similar length.

    No gradient shows how long a client's texts are, and one client's texts are often similar.
    """
    draw = torch.rand(2, generator=generator)
    third = len(by_length) // 3
    if size > third or draw[0] < 0.5:
        return by_length
    first = int(draw[1] * (len(by_length) - third + 1))
    return by_length[first : first + third]


def _draw_noise(gradient: Tensor, token: Tensor, generator: torch.Generator) -> Tensor:
    """Return a defence's noise, weak or strong, for a third of the batches, and zero for others."""
    draw = torch.rand(2, generator=generator)
    if draw[0] > 1 / 3:
        return torch.zeros((), device=gradient.device)
    strength = 10 ** (-4 + 3.5 * float(draw[1]))
    noise = torch.randn(gradient.shape, generator=generator)
    return noise.to(gradient.device) * strength * token


def _draw_types(
    batch: GradientParts, expected: ExpectedRows, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return types (labels, inputs, likely, reference, a sample of others) and their weights."""
    vocab = len(expected.probability)
    likely = expected.probability.topk(min(_FREQUENT, vocab)).indices
    required = torch.zeros(vocab, dtype=torch.bool, device=likely.device)
    for types in (batch.labels, batch.input_ids, expected.reference, likely):
        required[types] = True
    sure, others = required.nonzero()[:, 0], (~required).nonzero()[:, 0]
    sample = others[torch.randperm(len(others), generator=generator)[:_RANDOM].to(others.device)]
    weight = min(_MAX_IMPORTANCE, len(others) / max(1, len(sample)))
    importance = torch.cat([torch.ones(len(sure)), torch.full((len(sample),), weight)])
    return torch.cat([sure, sample]), importance.to(sure.device)
