"""Adam on rows that are problems of their own, and leave one by one as they are solved.

``torch.optim`` is not used: other tools hook every optimizer of the process, and a row that
leaves would have to take its moments with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = (0.9, 0.999)
EPS = 1e-8


class RowAdam:
    """Adam (Kingma & Ba 2015) as torch.optim's, without weight decay.

    Args:
        values: (B, ...) start; copied.
        lr: learning rate.

    Attributes:
        values: (B, ...) as they are now, without gradient.
        steps: taken so far.
    """

    def __init__(self, values: Tensor, lr: float) -> None:
        self.values = values.detach().clone()
        self.lr = lr
        self.steps = 0
        self._mean = torch.zeros_like(self.values)
        self._square = torch.zeros_like(self.values)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step against ``gradient`` (B, ...). In place: ``values`` is the same tensor."""
        self.steps += 1
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self._square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        self.values.addcdiv_(self._mean, root, value=-self.lr / (1 - BETAS[0] ** self.steps))

    def keep(self, rows: Tensor) -> None:
        """Goes on with ``rows`` (indices) alone."""
        self.values = self.values[rows]
        self._mean = self._mean[rows]
        self._square = self._square[rows]


__all__ = ["RowAdam"]
