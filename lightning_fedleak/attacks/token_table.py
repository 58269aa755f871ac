"""From word embeddings back to tokens: Eq. 4 of Zheng, and the same with whitened embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Likeness = Literal["whitened", "cosine"]
LIKENESSES: tuple[Likeness, ...] = ("whitened", "cosine")

CHUNK = 1 << 24
"""Similarities held at once."""

LEAST_VARIANCE = 1e-4
"""Of the largest: directions in which the vocabulary varies less are not blown up any further."""


@dataclass(frozen=True)
class TokenTable:
    """The vocabulary's word embeddings, ready to be searched.

    *Cosine* is the cosine of an embedding with a token's (Eq. 4). *Whitened* is the same after
    the vocabulary's mean is taken off and its covariance made the identity: the directions that
    most tokens share, and along which an embedding may drift without the hidden states showing
    it, then no longer decide. SmolLM2-135M at split 10, 48 tokens, 100 steps: 85% of the tokens in
    place of 33%.

    Attributes:
        embeddings: (V, e) float32 or wider.
        mean: (e,) of the vocabulary.
        whitening: (e, e), to be applied from the right.
        directions: of each likeness (V, e), of unit length.
    """

    embeddings: Tensor
    mean: Tensor
    whitening: Tensor
    directions: dict[Likeness, Tensor]

    @classmethod
    def of(cls, embeddings: Tensor) -> TokenTable:
        """Of (V, e) word embeddings, V at least 2."""
        table = embeddings.detach()
        table = table if table.dtype == torch.float64 else table.float()
        mean = table.mean(0)
        centred = (table - mean).double()
        variances, axes = torch.linalg.eigh(centred.T @ centred / len(table))
        variances = variances.clamp(min=LEAST_VARIANCE * float(variances[-1]))
        whitening = (axes / variances.sqrt() @ axes.T).to(table.dtype)
        directions: dict[Likeness, Tensor] = {
            "whitened": F.normalize((table - mean) @ whitening, dim=1),
            "cosine": F.normalize(table, dim=1),
        }
        return cls(table, mean, whitening, directions)

    @property
    def scale(self) -> float:
        """Standard deviation of the vocabulary's numbers about their mean, over all dimensions."""
        return float((self.embeddings - self.mean).square().mean().sqrt())

    def nearest(
        self, embeddings: Tensor, k: int = 1, likeness: Likeness = "whitened"
    ) -> tuple[Tensor, Tensor]:
        """The k tokens most like each embedding, the likest first.

        Args:
            embeddings: (..., e).
            k: at most the size of the vocabulary.
            likeness: see above.

        Returns:
            Token ids and their cosines, both (..., k).
        """
        shape = embeddings.shape[:-1]
        points = embeddings.detach().to(self.embeddings.dtype).reshape(-1, embeddings.shape[-1])
        if likeness == "whitened":
            points = (points - self.mean) @ self.whitening
        points = F.normalize(points, dim=1)
        directions = self.directions[likeness]
        k = min(k, len(directions))
        found = [
            (part @ directions.T).topk(k, dim=1)
            for part in torch.split(points, max(1, CHUNK // len(directions)))
        ]
        ids = torch.cat([f.indices for f in found]).reshape(*shape, k)
        return ids, torch.cat([f.values for f in found]).reshape(*shape, k)


__all__ = ["LIKENESSES", "Likeness", "TokenTable"]
