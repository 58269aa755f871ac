"""A small classifier of gradient rows, fitted on public text whose words are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lightning_fedleak.attacks.words.aligned_direction import turn
from lightning_fedleak.attacks.words.aligned_rows import (
    Directions,
    ExpectedRows,
    RowSummary,
    Units,
    cluster_centres,
    plausible,
    row_features,
)
from lightning_fedleak.attacks.words.public_gradients import GradientParts
from lightning_fedleak.progress import track
from lightning_fedleak.snapshots import UnusableObservation

_LAYERS = 3  # layers of the classifier
_CLUSTERS = 32  # clusters of hidden states whose mass is refitted to a gradient; not tuned
_FREQUENT = 4096  # likely types that every rehearsal holds; more cost memory, not tuned
_RANDOM = 2048  # other types drawn for a rehearsal; more cost memory, not tuned
_MAX_IMPORTANCE = 10.0  # largest weight of a drawn type in the loss; not tuned


@dataclass(frozen=True)
class Readout:
    """Two hidden layers on standardised features; gives the probability of *used*.

    Attributes:
        mean: (F,) mean of the features in training.
        deviation: (F,) their standard deviation.
        weights: of the layers, (F, h), (h, h), (h, 1).
        biases: of the layers.
    """

    mean: Tensor
    deviation: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def logits(self, features: Tensor) -> Tensor:
        """Return the log odds (k,) of *used* for (k, F) features."""
        x = ((features - self.mean) / self.deviation).clamp(-6, 6)
        return _network(x, self.weights, self.biases)

    @classmethod
    def fit(
        cls,
        features: Tensor,
        used: Tensor,
        importance: Tensor,
        generator: torch.Generator,
        *,
        hidden: int = 64,
        passes: int = 20,
        batch_size: int = 1024,
        peak_rate: float = 6e-3,
        weight_decay: float = 1e-2,
    ) -> Readout:
        """Return a classifier fitted by AdamW on a weighted logistic loss, with a one-cycle rate.

        Args:
            features: (n, F).
            used: (n,) booleans.
            importance: (n,) how many rows each row represents.
            generator: CPU generator of the initial weights and the order.
            hidden: width of the layers.
            passes: over the rows.
            batch_size: rows of a step.
            peak_rate: largest learning rate.
            weight_decay: of AdamW.
        """
        device, n = features.device, len(features)
        mean, deviation = features.mean(0), features.std(0) + 1e-6
        x = ((features - mean) / deviation).clamp(-6, 6)
        sizes = [features.shape[1], hidden, hidden, 1]
        weights = [
            (torch.randn(i, o, generator=generator) * (2 / i) ** 0.5).to(device).requires_grad_()
            for i, o in itertools.pairwise(sizes)
        ]
        biases = [torch.zeros(o, device=device, requires_grad=True) for o in sizes[1:]]
        parameters = [*weights, *biases]
        optimizer = torch.optim.AdamW(parameters, lr=peak_rate, weight_decay=weight_decay)
        steps = passes * -(-n // batch_size)
        schedule = LambdaLR(optimizer, lambda step: _one_cycle(step / steps))
        with torch.enable_grad():
            for _ in track(range(passes), "fitting the readout"):
                order = torch.randperm(n, generator=generator).to(device)
                for rows in torch.split(order, batch_size):
                    losses = F.binary_cross_entropy_with_logits(
                        _network(x[rows], weights, biases), used[rows].float(), reduction="none"
                    )
                    optimizer.zero_grad()
                    (losses * importance[rows]).mean().backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    schedule.step()
        return cls(
            mean, deviation, tuple(w.detach() for w in weights), tuple(b.detach() for b in biases)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        layers = {f"weight{i}": w for i, w in enumerate(self.weights)}
        layers |= {f"bias{i}": b for i, b in enumerate(self.biases)}
        return {"mean": self.mean, "deviation": self.deviation, **layers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Readout:
        """Return the readout whose :meth:`tensors` these are."""
        return cls(
            tensors["mean"],
            tensors["deviation"],
            tuple(tensors[f"weight{i}"] for i in range(_LAYERS)),
            tuple(tensors[f"bias{i}"] for i in range(_LAYERS)),
        )


def _network(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        x = F.silu(x @ w + b)
    return (x @ weights[-1] + biases[-1])[:, 0]


def _one_cycle(progress: float, warmup: float = 0.25) -> float:
    if progress < warmup:
        return 0.04 + 0.96 * progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


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
class Calibration:
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
        for group, value in (("directions", self.directions), ("expected", self.expected)):
            tensors |= {f"{group}.{f.name}": getattr(value, f.name) for f in fields(value)}
        return tensors | {f"readout.{k}": v for k, v in self.readout.tensors().items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
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
            Readout.from_tensors(groups["readout"]),
        )

    def to(self, device: torch.device) -> Calibration:
        """Return the calibration on a device."""
        if self.clusters.device == device:
            return self
        return self.from_tensors({k: v.to(device) for k, v in self.tensors().items()})


def rehearse(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    generator: torch.Generator,
    *,
    n_directions: int,
    n_principal: int = 64,
    clip_value: float | None = None,
    steps: int = 1,
) -> Calibration:
    """Return a readout fitted on batches of public sentences.

    The expectations of unused rows come from one half of the sentences and the batches from the
    other half, and the reverse, because the attack meets other text than it has.

    Args:
        parts: of at least 4 sentences.
        weight: (V, d) of the head.
        bias: (V,) or None.
        generator: CPU generator.
        n_directions: centres of hidden states that rows are projected on.
        n_principal: principal directions of hidden states that rows are projected on.
        clip_value: size that entries of each step's gradient are cut to; None without clipping.
        steps: number of steps whose clipped gradients are added.

    Raises:
        ValueError: too few sentences.
        UnusableObservation: clipping leaves nothing to fit on.
    """
    if parts.n_sentences < 4:
        raise ValueError(
            f"a learned readout needs at least 4 public texts, got {parts.n_sentences}: give more "
            "public text, or use readout='sign'"
        )
    directions = Directions.fit(parts, n_directions, n_principal, generator)
    unit = F.normalize(parts.states, dim=1)
    clusters = cluster_centres(unit, _CLUSTERS, generator)
    order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
    half = len(order) // 2
    first, second = parts.select(order[:half]), parts.select(order[half:])
    first_expected = ExpectedRows.compute(first, weight, bias, directions, clusters)
    second_expected = ExpectedRows.compute(second, weight, bias, directions, clusters)
    rows = [
        rehearsal
        for public, expected in ((second, first_expected), (first, second_expected))
        for rehearsal in _rehearse_batches(
            public, weight, bias, directions, expected, generator, clip_value, steps
        )
    ]
    if not rows:
        raise UnusableObservation(
            f"clipping by value at {clip_value:g} leaves every row of a public gradient the same "
            "size, so that no readout can be fitted: raise gradient_clip_val, or clip by norm "
            "(gradient_clip_algorithm='norm')"
        )
    features, used, importance = (torch.cat(c) for c in zip(*rows, strict=True))
    expected = ExpectedRows.average(first_expected, second_expected)
    return Calibration(
        directions, clusters, expected, Readout.fit(features, used, importance, generator)
    )


def batch_sizes(n_sentences: int, sizes: int = 9, repeats: int = 12) -> list[int]:
    """Return the sizes of rehearsed batches: from 1 to all sentences, evenly in the logarithm.

    Small batches are repeated, so that each size takes about the same work.
    """
    steps = {round(n_sentences ** (i / (sizes - 1))) for i in range(sizes)}
    return [
        b for b in sorted(steps) for _ in range(max(1, min(repeats, 2 * n_sentences // (3 * b))))
    ]


def _rehearse_batches(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    directions: Directions,
    expected: ExpectedRows,
    generator: torch.Generator,
    clip_value: float | None,
    steps: int,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (features, used, importance) of the plausible rows of each batch."""
    rehearsals = []
    by_length = torch.bincount(parts.sentence, minlength=parts.n_sentences).argsort().cpu()
    for size in track(batch_sizes(parts.n_sentences), "rehearsing updates"):
        pool = _draw_pool(by_length, size, generator)
        sentences = pool[torch.randperm(len(pool), generator=generator)[:size]]
        batch = parts.select(sentences.to(parts.labels.device))
        if len(batch.labels) == 0:
            continue
        types, importance = _draw_types(batch, expected, generator)
        gradient = batch.clipped_gradient(weight, bias, types, clip_value, steps)
        token = directions.norm * abs(parts.logit_map.scale) / len(batch.labels)
        gradient += _draw_noise(gradient, token, generator)
        summary = RowSummary.read(gradient, directions.u)
        place = torch.full((len(weight),), -1, device=types.device)
        place[types] = torch.arange(len(types), device=types.device)
        reference = place[expected.reference]
        summary, _ = turn(gradient, summary, directions.u, reference)
        units = Units.estimate(summary, expected, reference)
        if units is None:
            continue
        rows = plausible(summary, units).nonzero()[:, 0]
        features = row_features(
            gradient[rows], summary.select(rows), units, directions, expected.rows(types[rows])
        )
        used = torch.isin(types[rows], batch.labels)
        rehearsals.append((features, used, importance[rows]))
    return rehearsals


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
    """Return the used, read, likely and reference types, a sample of others, and weights."""
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
