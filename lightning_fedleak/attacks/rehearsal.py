"""Fitting a readout on gradients of public text whose words are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.expected import Directions, ExpectedRows, cluster_centres
from lightning_fedleak.attacks.features import RowSummary, Units, plausible, row_features
from lightning_fedleak.attacks.parts import GradientParts
from lightning_fedleak.attacks.readout import Readout
from lightning_fedleak.attacks.turning import turned

_CLUSTERS = 32
_FREQUENT = 4096
_RANDOM = 2048
_MAX_IMPORTANCE = 10.0


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

    Raises:
        ValueError: too few sentences.
    """
    if parts.n_sentences < 4:
        raise ValueError(
            f"a learned readout needs at least 4 public texts, got {parts.n_sentences}: give more "
            "public text, or use readout='sign'"
        )
    directions = Directions.of(parts, n_directions, n_principal, generator)
    unit = F.normalize(parts.hidden, dim=1)
    clusters = cluster_centres(unit, _CLUSTERS, generator)
    order = torch.randperm(parts.n_sentences, generator=generator).to(parts.labels.device)
    half = len(order) // 2
    one, other = parts.of(order[:half]), parts.of(order[half:])
    first = ExpectedRows.of(one, weight, bias, directions, clusters)
    second = ExpectedRows.of(other, weight, bias, directions, clusters)
    rows = [
        *_rehearsals(other, weight, bias, directions, first, generator),
        *_rehearsals(one, weight, bias, directions, second, generator),
    ]
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
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(features, used, importance) of the plausible rows of each batch."""
    found = []
    for size in batch_sizes(parts.n_sentences):
        chosen = torch.randperm(parts.n_sentences, generator=generator)[:size]
        batch = parts.of(chosen.to(parts.labels.device))
        if len(batch.labels) == 0:
            continue
        types, importance = _sampled_types(batch, expected, generator)
        gradient = batch.gradient(weight, bias, types)
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
