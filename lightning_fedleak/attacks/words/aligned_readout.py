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

from lightning_fedleak.attacks.words.aligned_direction import turned
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

_LAYERS = 3

_CLUSTERS = 32
_FREQUENT = 4096
_RANDOM = 2048
_MAX_IMPORTANCE = 10.0


@dataclass(frozen=True)
class Readout:
    """Two hidden layers on standardised features; gives the probability of *used*.

    Attributes:
        mean: (F,) of the features in training.
        deviation: (F,) likewise.
        weights: of the layers, (F, h), (h, h), (h, 1).
        biases: of the layers.
    """

    mean: Tensor
    deviation: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def logits(self, features: Tensor) -> Tensor:
        """Log odds of *used*, (k,) for (k, F) features."""
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
        """Weighted logistic loss, AdamW with a one-cycle rate.

        Args:
            features: (n, F).
            used: (n,) booleans.
            importance: (n,) how many rows each stands for.
            generator: CPU generator of the start and the order.
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
        trained = [*weights, *biases]
        optimizer = torch.optim.AdamW(trained, lr=peak_rate, weight_decay=weight_decay)
        steps = passes * -(-n // batch_size)
        schedule = LambdaLR(optimizer, lambda done: _one_cycle(done / steps))
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
        """All tensors by name."""
        layers = {f"weight{i}": w for i, w in enumerate(self.weights)}
        layers |= {f"bias{i}": b for i, b in enumerate(self.biases)}
        return {"mean": self.mean, "deviation": self.deviation, **layers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Readout:
        """The readout whose :meth:`tensors` these are."""
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
    """How many of the most probable to name for the largest expected F1, ().

    Naming the k most probable, the expected number right is the sum of their probabilities and
    the expected number of used types the sum of all, so that F1 is about
    ``2 sum_{i<=k} p_i / (k + sum_i p_i)``.

    Args:
        probabilities: (n,) in any order, calibrated.

    Returns:
        0 where every probability is 0.
    """
    ordered = probabilities.sort(descending=True).values.double()
    right = ordered.cumsum(0)
    k = torch.arange(1, len(ordered) + 1, device=ordered.device)
    score = 2 * right / (k + right[-1])
    return torch.where(right[-1] > 0, score.argmax() + 1, 0)


@dataclass(frozen=True)
class Rehearsed:
    """What a learned readout needs to attack.

    Attributes:
        directions: to project on.
        clusters: (C, d) centres that ``expected.mass`` is split by.
        expected: of unused rows.
        readout: from features of a row to the probability that it is used.
    """

    directions: Directions
    clusters: Tensor
    expected: ExpectedRows
    readout: Readout

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = {"clusters": self.clusters}
        for room, value in (("directions", self.directions), ("expected", self.expected)):
            named |= {f"{room}.{f.name}": getattr(value, f.name) for f in fields(value)}
        return named | {f"readout.{k}": v for k, v in self.readout.tensors().items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Rehearsed:
        """What these :meth:`tensors` were of."""
        rooms: dict[str, dict[str, Tensor]] = {"directions": {}, "expected": {}, "readout": {}}
        for name, tensor in tensors.items():
            room, _, rest = name.partition(".")
            if rest:
                rooms[room][rest] = tensor
        return cls(
            Directions(**rooms["directions"]),
            tensors["clusters"],
            ExpectedRows(**rooms["expected"]),
            Readout.from_tensors(rooms["readout"]),
        )

    def to(self, device: torch.device) -> Rehearsed:
        """On another device; itself where it is there already."""
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
) -> Rehearsed:
    """Fits a readout on batches put together from public sentences.

    Two halves of the sentences take turns: what is expected of unused rows comes from one, the
    batches that the readout is fitted on from the other, as in the attack itself.

    Args:
        parts: of at least 4 sentences.
        weight: (V, d) of the head.
        bias: (V,) or None.
        generator: CPU generator.
        n_directions: centres of hidden states that rows are projected on.
        n_principal: principal directions of hidden states that rows are projected on.
        clip_value: size that entries of each step's gradient are cut to; None where none are.
        steps: whose gradients are added, where they are cut.

    Raises:
        ValueError: too few sentences.
        UnusableObservation: clipping leaves nothing to fit on.
    """
    if parts.n_sentences < 4:
        raise ValueError(
            f"a learned readout needs at least 4 public texts, got {parts.n_sentences}: give more "
            "public text, or use readout='sign'"
        )
    directions = Directions.of(parts, n_directions, n_principal, generator)
    unit = F.normalize(parts.read, dim=1)
    clusters = cluster_centres(unit, _CLUSTERS, generator)
    order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
    half = len(order) // 2
    one, other = parts.of(order[:half]), parts.of(order[half:])
    first = ExpectedRows.of(one, weight, bias, directions, clusters)
    second = ExpectedRows.of(other, weight, bias, directions, clusters)
    rows = [
        rehearsal
        for half, known in ((other, first), (one, second))
        for rehearsal in _rehearsals(
            half, weight, bias, directions, known, generator, clip_value, steps
        )
    ]
    if not rows:
        raise UnusableObservation(
            f"clipping by value at {clip_value:g} leaves every row of a public gradient the same "
            "size, so that no readout can be fitted: raise gradient_clip_val, or clip by norm "
            "(gradient_clip_algorithm='norm')"
        )
    features, used, importance = (torch.cat(c) for c in zip(*rows, strict=True))
    expected = ExpectedRows.averaged(first, second)
    return Rehearsed(
        directions, clusters, expected, Readout.fit(features, used, importance, generator)
    )


def batch_sizes(n_sentences: int, sizes: int = 9, repeats: int = 12) -> list[int]:
    """Sentences in each rehearsed batch: from 1 to all, evenly in the logarithm, small ones often.

    The work spent on each size is about the same.
    """
    steps = {round(n_sentences ** (i / (sizes - 1))) for i in range(sizes)}
    return [
        b for b in sorted(steps) for _ in range(max(1, min(repeats, 2 * n_sentences // (3 * b))))
    ]


def _rehearsals(
    parts: GradientParts,
    weight: Tensor,
    bias: Tensor | None,
    directions: Directions,
    expected: ExpectedRows,
    generator: torch.Generator,
    clip_value: float | None,
    steps: int,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(features, used, importance) of the plausible rows of each batch."""
    found = []
    by_length = torch.bincount(parts.sentence, minlength=parts.n_sentences).argsort().cpu()
    for size in track(batch_sizes(parts.n_sentences), "rehearsing updates"):
        like = _like_lengths(by_length, size, generator)
        chosen = like[torch.randperm(len(like), generator=generator)[:size]]
        batch = parts.of(chosen.to(parts.labels.device))
        if len(batch.labels) == 0:
            continue
        types, importance = _sampled_types(batch, expected, generator)
        gradient = batch.clipped(weight, bias, types, clip_value, steps)
        token = directions.norm * abs(parts.logit_map.scale) / len(batch.labels)
        gradient += _noise_like(gradient, token, generator)
        summary = RowSummary.of(gradient, directions.u)
        place = torch.full((len(weight),), -1, device=types.device)
        place[types] = torch.arange(len(types), device=types.device)
        at = place[expected.reference]
        summary, _ = turned(gradient, summary, directions.u, at)
        units = Units.of(summary, expected, at)
        if units is None:
            continue
        among = expected.rows(types)
        kept = plausible(summary, units).nonzero()[:, 0]
        found.append(
            (
                row_features(gradient[kept], summary.at(kept), units, directions, among.rows(kept)),
                torch.isin(types[kept], batch.labels),
                importance[kept],
            )
        )
    return found


def _like_lengths(by_length: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Sentences a rehearsed batch is drawn from: all, or half the time a third, of like length.

    No gradient tells how long a client's texts are, and those of one client are often alike.
    """
    draw = torch.rand(2, generator=generator)
    third = len(by_length) // 3
    if size > third or draw[0] < 0.5:
        return by_length
    first = int(draw[1] * (len(by_length) - third + 1))
    return by_length[first : first + third]


def _noise_like(gradient: Tensor, token: Tensor, generator: torch.Generator) -> Tensor:
    """Noise as a defence adds it, weak or strong, for a third of the batches; none for others."""
    draw = torch.rand(2, generator=generator)
    if draw[0] > 1 / 3:
        return torch.zeros((), device=gradient.device)
    strength = 10 ** (-4 + 3.5 * float(draw[1]))
    noise = torch.randn(gradient.shape, generator=generator)
    return noise.to(gradient.device) * strength * token


def _sampled_types(
    batch: GradientParts, expected: ExpectedRows, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Every type used, read, frequent or needed as reference, some others, and their weights."""
    vocab = len(expected.probability)
    likely = expected.probability.topk(min(_FREQUENT, vocab)).indices
    needed = torch.zeros(vocab, dtype=torch.bool, device=likely.device)
    for types in (batch.labels, batch.input_ids, expected.reference, likely):
        needed[types] = True
    sure, others = needed.nonzero()[:, 0], (~needed).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:_RANDOM].to(others.device)]
    weight = min(_MAX_IMPORTANCE, len(others) / max(1, len(drawn)))
    importance = torch.cat([torch.ones(len(sure)), torch.full((len(drawn),), weight)])
    return torch.cat([sure, drawn]), importance.to(sure.device)
