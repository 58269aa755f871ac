"""Norms and projections of the rows of the output head's gradient, and the noise on them.

The head's gradient (V, d) has a row for each of V tokens. Attacks on words distinguish the rows of
tokens in the batch by their norm and by their projection on one direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.attacks.base import check_readable

_ROWS_AT_ONCE = 512  # rows converted to float32 at once, which bounds the memory


@dataclass(frozen=True)
class RowSummary:
    """The norm and the projection of every row of a gradient.

    Attributes:
        projection: (V,) projection of each row minus ``common`` on a direction of unit length.
        norms: (V,) norm of each row minus ``common``.
        common: (d,) the row that label smoothing adds to every row; zero without smoothing.
    """

    projection: Tensor
    norms: Tensor
    common: Tensor

    @classmethod
    def read(cls, gradient: Tensor, u: Tensor) -> RowSummary:
        """Return the summary of a gradient, without the row that label smoothing adds.

        Args:
            gradient: (V, d).
            u: (d,) the direction of the projections, of unit length.

        Raises:
            UnusableObservation: the gradient has NaN or infinity, or is all zero.
        """
        norms = map_rows(gradient, lambda rows: torch.linalg.vector_norm(rows, dim=1))
        check_readable(norms.max(), "the head's gradient")
        summary = cls(projections(gradient, u), norms, u.new_zeros(gradient.shape[1]))
        common = _common_row(gradient, summary)
        return summary if common is None else cls(*_subtract(gradient, u, common), common)

    @property
    def width(self) -> int:
        """Return d, the length of a row."""
        return len(self.common)

    def select(self, rows: Tensor) -> RowSummary:
        """Return the summary of some rows."""
        return RowSummary(
            self.projection.index_select(0, rows), self.norms.index_select(0, rows), self.common
        )

    def noise(self) -> Tensor:
        """Return an upper bound on the standard deviation of noise on each coordinate, ().

        The smallest rows of a noised update hold only noise, and d independent coordinates give
        them nearly equal norms, so that the 10% quantile of all norms shows it. Without noise the
        bound is about the root mean square of a coordinate of the smallest rows.
        """
        # The norm of d standard normals is nearly normal around sqrt(d) with variance 1/2, and
        # -1.2816 is the 10% quantile of a standard normal.
        spread = 1 - 1.2816 / (2 * self.width) ** 0.5
        low = _kth_smallest(self.norms, 1 + (len(self.norms) - 1) // 10)
        level: Tensor = low / (self.width**0.5 * max(spread, 0.1))
        return level

    def denoised_norms(self, noise: Tensor) -> Tensor:
        """Return (V,) norms of the rows without the contribution of noise of this deviation.

        The squares are reduced to no less than a twentieth, so that no norm becomes 0.
        """
        squares = self.norms.square()
        return torch.maximum(squares - self.width * noise * noise, 0.05 * squares).sqrt()


def _kth_smallest(values: Tensor, k: int) -> Tensor:
    """Return the k-th smallest of (n,) values without NaN, k from 1, as ().

    NumPy's partition is several times as fast as ``kthvalue`` on the CPU.
    """
    if values.device.type != "cpu":
        return values.kthvalue(k).values
    return values.new_tensor(np.partition(values.detach().numpy(), k - 1)[k - 1])


def projections(gradient: Tensor, u: Tensor) -> Tensor:
    """Return the (V,) projections of the rows on a direction ``u`` (d,), in float32."""
    return map_rows(gradient, lambda rows: rows @ u)


def map_rows(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the (V,) values of a function of rows in float32, converting few rows at a time."""
    gradient = gradient.detach()
    if gradient.dtype == torch.float32:
        return function(gradient)
    buffer = gradient.new_empty(_ROWS_AT_ONCE, gradient.shape[1], dtype=torch.float32)
    parts = torch.split(gradient, _ROWS_AT_ONCE)
    return torch.cat([function(buffer[: len(rows)].copy_(rows)) for rows in parts])


def _subtract(gradient: Tensor, u: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """Return projections and norms of the rows minus ``common``."""
    projection, norms = [], []
    buffer = torch.empty(_ROWS_AT_ONCE, len(common), device=common.device)
    for rows in torch.split(gradient.detach(), _ROWS_AT_ONCE):
        rows = torch.sub(rows, common, out=buffer[: len(rows)])
        projection.append(rows @ u)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(projection), torch.cat(norms)


def _common_row(gradient: Tensor, summary: RowSummary) -> Tensor | None:
    """Return the row (d,) that label smoothing adds to every row, or None.

    Smoothing by epsilon subtracts ``epsilon / V`` of every hidden state from every row. So the rows
    of types with almost no probability are nearly equal, and only the few types in the batch have
    lower projections. The common row is therefore the mean of the rows between the 8% and the 18%
    quantile of projections, if these are negative. If the rows there point in different directions,
    their projections come from noise, and the result is None.
    """
    if bool((summary.projection < 0).float().mean() < 0.18):
        return None
    n = len(summary.projection)
    order = summary.projection.argsort()[n * 8 // 100 : max(1, n * 18 // 100)]
    edge = gradient.detach()[order].float()
    common = edge.mean(0)
    agreement = common.norm() / (edge.norm(dim=1).mean() + 1e-30)  # 1 if all rows are equal
    return common if bool(agreement > 0.9) else None
