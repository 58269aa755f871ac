"""The rows of shared gradients of linear maps with the same input, in units of their noise.

The noise is rounding, and the Gaussian noise that a defence is known to have added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The largest ratio of a residual's root mean square to the noise's at which it counts as noise.
CERTIFIED = 4.0
# The size of rounding is only an estimate. The rank is therefore where the singular values fall
# most, within this factor above and below the estimate.
_GAP = 30.0


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The shared gradient rows of linear maps with one input, divided by their noise.

    One unit is the standard deviation of the noise of an entry.

    Attributes:
        whole: (n, d) float64, all rows, orthogonal to the directions that are not words.
        principal: (k, d) float64, the right singular vectors of ``whole`` above the noise, each
            times its singular value.
        exact: whether the only noise is rounding to float32 or finer, as a certificate requires.
    """

    whole: Tensor
    principal: Tensor
    exact: bool

    @classmethod
    def stack(
        cls, gradients: Sequence[Tensor], basis: Tensor, *, rounding: float, noise: Sequence[float]
    ) -> SharedRows:
        """Return the stacked gradients of linear maps with the same input.

        Args:
            gradients: The gradients (n_i, d), with one row for each output; none is all zero.
            basis: (b, d) float64 orthonormal, the directions that are not words; the rows are
                projected off them.
            rounding: The relative precision in which the gradients were computed.
            noise: The standard deviation of the noise that was added to each gradient.
        """
        rows = []
        for gradient, std in zip(gradients, noise, strict=True):
            g = gradient.double()
            rows.append(g / math.hypot(rounding * float(g.square().mean().sqrt()), std))
        whole = torch.cat(rows)
        whole = whole - (whole @ basis.T) @ basis
        exact = rounding <= torch.finfo(torch.float32).eps and not any(noise)
        dims = basis.shape[1] - len(basis)
        return cls(whole, _above_noise(whole, dims, exact=exact), exact)

    @property
    def noise_norm(self) -> float:
        """Return the expected Frobenius norm of the noise of all rows."""
        return math.sqrt(self.whole.numel())

    @property
    def is_noise(self) -> bool:
        """Return whether the rows are indistinguishable from noise."""
        return not len(self.principal) or float(self.whole.norm()) <= CERTIFIED * self.noise_norm


def _above_noise(rows: Tensor, dims: int, *, exact: bool) -> Tensor:
    """Return the right singular vectors above the noise, each times its singular value.

    If the noise is rounding, whose size is only estimated, the cut is at the largest ratio of
    consecutive singular values near the estimate. The fall after the first ``dims`` singular
    values, to the directions that were projected off, does not count.
    """
    n, d = rows.shape
    if n > d:
        rows = torch.linalg.qr(rows).R
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    s = s[:dims]
    edge = math.sqrt(n) + math.sqrt(d)  # the largest singular value of (n, d) standard noise
    k = int((s > edge).sum())
    if exact and k:
        first = int((s > edge * _GAP).sum())
        last = int((s > edge / _GAP).sum())
        logs = s.clamp_min(edge / _GAP / 10).log()  # else a fall to 0 would always be the largest
        falls = logs[:-1] - logs[1:]
        window = falls[max(first - 1, 0) : last]
        if len(window):
            k = max(first - 1, 0) + int(window.argmax()) + 1
    principal: Tensor = s[:k, None] * basis[:k]
    return principal
