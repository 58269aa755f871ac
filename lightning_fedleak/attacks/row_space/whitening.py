"""Whitening, fitted on public text: of hidden states, and of the two sides of a gradient.

Hidden states of a language model fill a narrow cone, with a few directions of large variance. Each
has large products with all others, so an attention of products retrieves none. In coordinates of
unit covariance most products are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.1
"""Share of the median (or mean) eigenvalue that is added to every eigenvalue.

Not tuned. Smaller: directions that public text hardly has count for more.
"""


@dataclass(frozen=True, repr=False)
class Whitening:
    """The map ``x -> matrix (x - mean)``.

    Attributes:
        mean: (d,) float32.
        matrix: (d, d) float32, symmetric.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return (..., d) for (..., d), in the dtype and on the device of ``hidden``."""
        return (hidden - self.mean.to(hidden)) @ self.matrix.to(hidden)

    def tensors(self) -> dict[str, Tensor]:
        """Return the numbers for a checkpoint."""
        return {"whitening.mean": self.mean, "whitening.matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Whitening:
        """Restore what :meth:`tensors` returned."""
        return cls(tensors["whitening.mean"], tensors["whitening.matrix"])


def fit_whitening(hidden: Tensor, ridge: float = RIDGE) -> Whitening:
    """Return ``(C + ridge * median eigenvalue * I)^(-1/2)`` of hidden states' covariance C.

    The ridge is in units of the median eigenvalue: a model with massive activations has one
    eigenvalue a million times above the others, and a share of the mean would hide those.

    Args:
        hidden: (n, d).
        ridge: 0 for none.

    Returns:
        The whitening, on the device of ``hidden``.

    Raises:
        ValueError: fewer than d + 1 states, or states that do not vary in half of their directions.
    """
    n, d = hidden.shape
    if n <= d:
        raise ValueError(
            f"{n} tokens of public text cannot whiten {d} dimensions: give more text (at least "
            f"{2 * d} tokens are advised), or set whiten=False"
        )
    states = hidden.double()
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


def whitening_matrix(moment: Tensor) -> Tensor:
    """Return W such that ``x W`` has the same second moment in all directions, but for a ridge.

    Args:
        moment: second moments (d, d), or their diagonal (d,).

    Returns:
        (d, d), or its diagonal.
    """
    if moment.dim() == 1:
        return (moment + RIDGE * moment.mean()).rsqrt().float()
    return inverse_factor(moment).float()


def inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper triangular (d, d) matrix that whitens rows of this moment, ridged."""
    eye = torch.eye(len(moment)).to(moment)
    lower = torch.linalg.cholesky(moment + RIDGE * moment.diagonal().mean() * eye)
    factor: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).T
    return factor
