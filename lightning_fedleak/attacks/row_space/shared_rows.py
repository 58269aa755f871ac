"""The rows of shared gradients of maps that read one input, in units of their noise.

Noise is rounding, and what a defence is known to have added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CERTIFIED = 4.0  # largest root mean square of a residual over the noise's for a certificate
_GAP = 30.0  # factor around the noise within which the widest gap of singular values is the rank


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The shared rows that read one input, in units of the noise of an entry.

    Attributes:
        whole: (n, d) float64, all rows, with what is no word projected off.
        principal: (k, d) float64, their principal rows above the noise.
        exact: whether the noise is single precision's rounding alone, as a certificate needs.
    """

    whole: Tensor
    principal: Tensor
    exact: bool

    @classmethod
    def stack(
        cls, gradients: Sequence[Tensor], beside: Tensor, *, rounding: float, noise: Sequence[float]
    ) -> SharedRows:
        """Return the stacked gradients of maps that read the same input.

        Args:
            gradients: each (n_i, d), one row for each output; none all zero.
            beside: (b, d) float64 orthonormal, the directions that are no word.
            rounding: relative precision that the gradients were computed in.
            noise: standard deviation of the noise that was added to each gradient.
        """
        rows = []
        for gradient, added in zip(gradients, noise, strict=True):
            g = gradient.double()
            rows.append(g / math.hypot(rounding * float(g.square().mean().sqrt()), added))
        whole = torch.cat(rows)
        whole = whole - (whole @ beside.T) @ beside
        exact = rounding <= torch.finfo(torch.float32).eps and not any(noise)
        dims = beside.shape[1] - len(beside)
        return cls(whole, _above_noise(whole, dims, exact=exact), exact)

    @property
    def floor(self) -> float:
        """Return the norm of the noise of all rows together."""
        return math.sqrt(self.whole.numel())

    @property
    def silent(self) -> bool:
        """Return whether the rows hold nothing but noise."""
        return not len(self.principal) or float(self.whole.norm()) <= CERTIFIED * self.floor


def _above_noise(rows: Tensor, dims: int, *, exact: bool) -> Tensor:
    """Return the principal rows above the noise; near rounding the cut is the widest gap.

    A fall behind ``dims`` directions, to those that were projected off, is no gap.
    """
    n, d = rows.shape
    if n > d:
        rows = torch.linalg.qr(rows).R
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    s = s[:dims]
    edge = math.sqrt(n) + math.sqrt(d)
    k = int((s > edge).sum())
    if exact and k:
        first = int((s > edge * _GAP).sum())
        last = int((s > edge / _GAP).sum())
        steps = s.clamp_min(edge / _GAP / 10).log()
        falls = steps[:-1] - steps[1:]
        window = falls[max(first - 1, 0) : last]
        if len(window):
            k = max(first - 1, 0) + int(window.argmax()) + 1
    principal: Tensor = s[:k, None] * basis[:k]
    return principal
