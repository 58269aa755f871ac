"""Whitening of hidden states, fitted on public text and folded into the weights of a layer.

Hidden states of a language model fill a narrow cone, with a few directions of large variance: all
of them have large products with all others, so that an attention of products retrieves none. In
coordinates of unit covariance most have small products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.1
"""Default share of the median eigenvalue that is added to every eigenvalue."""


@dataclass(frozen=True, repr=False)
class Whitening:
    """``x -> matrix (x - mean)``.

    Attributes:
        mean: (d,) float32.
        matrix: (d, d) float32, symmetric.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., d) to (..., d), in the dtype and on the device of ``hidden``."""
        return (hidden - self.mean.to(hidden)) @ self.matrix.to(hidden)

    def folded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias that do to ``x`` what ``weight`` does to the whitened ``x``.

        Args:
            weight: (..., k, d).

        Returns:
            (..., k, d) and (..., k), with ``W x + b = weight @ whitening(x)``.
        """
        folded = weight @ self.matrix.to(weight)
        return folded, -(folded @ self.mean.to(weight))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"whitening.mean": self.mean, "whitening.matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Whitening:
        """Takes back what :meth:`tensors` gave."""
        return cls(tensors["whitening.mean"], tensors["whitening.matrix"])


def fit_whitening(hidden: Tensor, ridge: float = RIDGE) -> Whitening:
    """``(C + ridge * median eigenvalue * I)^(-1/2)`` of the covariance C of hidden states.

    The ridge is in units of the median eigenvalue: a model with massive activations has one
    eigenvalue a million times above the others, and a share of the mean would drown those.

    Args:
        hidden: (n, d).
        ridge: 0 for none.

    Returns:
        The whitening, on the device of ``hidden``.

    Raises:
        ValueError: fewer than d + 1 states, states that are not finite or do not vary in half of
            their directions, or a negative ridge.
    """
    n, d = hidden.shape
    if not 0.0 <= ridge < float("inf"):
        raise ValueError(f"ridge must be 0 or positive, got {ridge}")
    if n <= d:
        raise ValueError(
            f"{n} tokens of public text cannot whiten {d} dimensions: give more text (at least "
            f"{2 * d} tokens are advised), or set whiten=False"
        )
    states = hidden.double()
    if not bool(states.isfinite().all()):
        raise ValueError("hidden states of public text are not finite: they cannot be whitened")
    mean = states.mean(0)
    centred = states - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / (n - 1))
    scale = values.median()
    if not scale > 1e-12 * values[-1]:
        raise ValueError(
            f"hidden states of {n} tokens of public text vary in fewer than half of the {d} "
            "dimensions: give more varied text, or set whiten=False"
        )
    values = (values.clamp(min=0.0) + ridge * scale).clamp(min=1e-9 * float(scale))
    matrix = (vectors * values.rsqrt()) @ vectors.T
    return Whitening(mean.float(), matrix.float())
