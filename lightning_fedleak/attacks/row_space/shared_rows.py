"""The rows of shared gradients of weight matrices with the same input, in units of their noise.

Each row of such a gradient (n, d) is a combination of the batch's inputs, vectors of width d. The
noise is rounding, and the Gaussian noise that a defence declares. An attack explains the rows by
the inputs of tokens; what remains counts as noise if it is below :data:`MAX_NOISE_RATIO`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# The largest ratio of a residual's root mean square to the noise's at which it counts as noise.
MAX_NOISE_RATIO = 4.0
# The size of rounding is only an estimate. The rank is therefore cut at the largest ratio of
# consecutive singular values within this factor above and below the estimate.
_EDGE_FACTOR = 30.0


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The shared gradient rows of linear maps with one input, divided by their noise.

    One unit is the standard deviation of the noise of an entry.

    Attributes:
        whole: (n, d) float64, all rows, orthogonal to the directions that belong to no token.
        singular: (m, d) float64, the right singular vectors of ``whole``, m <= min(n, d), each
            times its singular value: fewer rows with the same inner products of columns.
        principal: (k, d) float64, those of ``singular`` above the noise.
        exact: whether the only noise is rounding to float32 or finer, as a certificate requires.
        noise: what is known of other noise: its size (also if it is rounding to half precision), an
            estimate of it, or not even whether there is some.
    """

    whole: Tensor
    singular: Tensor
    principal: Tensor
    exact: bool
    noise: Literal["declared", "estimated", "undeclared"] = "declared"

    @classmethod
    def stack(
        cls, gradients: Sequence[Tensor], basis: Tensor, *, rounding: float, noise: Sequence[float]
    ) -> SharedRows:
        """Return the stacked gradients of linear maps with the same input.

        Args:
            gradients: The gradients (n_i, d), with one row for each output; none is all zero.
            basis: (b, d) float64 orthonormal, the directions that belong to no token, such as
                positions; they are projected out of the rows.
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
        max_rank = basis.shape[1] - len(basis)
        singular, rank = _singular_rows(whole, max_rank, exact=exact)
        kind: Literal["declared", "undeclared"] = "undeclared" if exact else "declared"
        return cls(whole, singular, singular[:rank], exact, kind)

    def above_gap(self) -> SharedRows | None:
        """Return the rows with all below a clear gap of their singular values as noise.

        The gap is the largest drop of the singular values that are above rounding. A client that
        rounds or changes its gradient a little adds such small ones, without declaring them. The
        result is None if the largest drop is that to rounding, or is below
        :data:`MAX_NOISE_RATIO`.
        """
        sizes = self.singular.norm(dim=1)[: len(self.principal) + 1]
        edge = math.sqrt(self.whole.shape[0]) + math.sqrt(self.whole.shape[1])
        ratios = sizes[:-1] / sizes[1:].clamp_min(edge)
        rank = int(ratios.argmax()) + 1 if len(ratios) else 0
        if not self.exact or rank in (0, len(self.principal)) or ratios[rank - 1] < MAX_NOISE_RATIO:
            return None
        whole, singular = (x * (edge / sizes[rank]) for x in (self.whole, self.singular))
        return SharedRows(whole, singular, singular[:rank], False, self.noise)

    @property
    def noise_norm(self) -> float:
        """Return the expected Frobenius norm of the noise of all rows."""
        return math.sqrt(self.whole.numel())

    @property
    def is_noise(self) -> bool:
        """Return whether the rows are indistinguishable from noise."""
        is_small = float(self.whole.norm()) <= MAX_NOISE_RATIO * self.noise_norm
        return not len(self.principal) or is_small


def _singular_rows(rows: Tensor, max_rank: int, *, exact: bool) -> tuple[Tensor, int]:
    """Return right singular vectors times singular values, and how many are above the noise.

    If the noise is rounding, whose size is only estimated, the cut is at the largest ratio of
    consecutive singular values near the estimate. The drop after ``max_rank`` singular values, to
    the directions that were projected out, does not count.
    """
    n, d = rows.shape
    if n > d:
        rows = torch.linalg.qr(rows).R
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    s = s[:max_rank]
    edge = math.sqrt(n) + math.sqrt(d)  # the largest singular value of (n, d) standard noise
    k = int((s > edge).sum())
    if exact and k:
        start = max(int((s > edge * _EDGE_FACTOR).sum()) - 1, 0)
        stop = int((s > edge / _EDGE_FACTOR).sum())
        # Without the clamp, a drop to 0 would always be the largest.
        logs = s.clamp_min(edge / _EDGE_FACTOR / 10).log()
        drops = (logs[:-1] - logs[1:])[start:stop]
        if len(drops):
            k = start + int(drops.argmax()) + 1
    return s[:, None] * basis[:max_rank], k
