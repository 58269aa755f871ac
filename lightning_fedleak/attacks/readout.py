"""A small classifier of gradient rows, and how many of them to name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_LAYERS = 3


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
        optimizer = torch.optim.AdamW([*weights, *biases], lr=1.0, weight_decay=weight_decay)
        steps = passes * -(-n // batch_size)
        done = 0
        with torch.enable_grad():
            for _ in range(passes):
                order = torch.randperm(n, generator=generator).to(device)
                for rows in torch.split(order, batch_size):
                    for group in optimizer.param_groups:
                        group["lr"] = peak_rate * _one_cycle(done / steps)
                    losses = F.binary_cross_entropy_with_logits(
                        _network(x[rows], weights, biases), used[rows].float(), reduction="none"
                    )
                    optimizer.zero_grad()
                    (losses * importance[rows]).mean().backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    done += 1
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
