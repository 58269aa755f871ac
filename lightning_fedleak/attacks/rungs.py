"""A_guess where the trainable numbers are a ladder of biases: which rungs fire, noise or none."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.membership import MembershipGuess


class RungReader:
    """A_guess on the rungs of a gradient, (G, K), with or without noise on it.

    Without noise: which rungs are not zero. With Gaussian noise: for every n the sum of n rungs
    from the guess rung downwards, in units of its own standard deviation, and of these the largest.
    Its threshold is the quantile of that statistic when all rungs hold noise alone.

    Args:
        false_positive_rate: of the decision under noise.
        upstream_sign: -1, 0 or +1.

    Raises:
        ValueError: a rate outside of (0, 1), or another sign.
    """

    def __init__(self, false_positive_rate: float, upstream_sign: int) -> None:
        if not 0.0 < false_positive_rate < 1.0:
            raise ValueError(f"false_positive_rate must be in (0, 1), got {false_positive_rate}")
        if upstream_sign not in (-1, 0, 1):
            raise ValueError(f"upstream_sign must be -1, 0 or 1, got {upstream_sign!r}")
        self.false_positive_rate = false_positive_rate
        self.upstream_sign = upstream_sign

    def guess(
        self, gradient: Tensor, noise_std: float, rungs: int, guess_rung: int
    ) -> MembershipGuess:
        """Scores (G,) and decisions (G,) for a gradient (G, K); see the class.

        Raises:
            UnusableObservation: the gradient is not finite.
            ValueError: not (G, K), or negative noise.
        """
        if gradient.dim() != 2 or gradient.shape[1] != rungs:
            raise ValueError(
                f"the gradient must be (G, {rungs}), one number per rung, got "
                f"{tuple(gradient.shape)}"
            )
        if not 0.0 <= noise_std < math.inf:
            raise ValueError(f"noise_std must be 0 or positive, got {noise_std}")
        if not bool(gradient.isfinite().all()):
            raise UnusableObservation("the gradient of the crafted layers is not finite")
        if noise_std == 0.0:
            fires = gradient != 0
            places = torch.arange(rungs, 0, -1, device=gradient.device)
            scores = (fires * places).amax(1).to(torch.float32)
            return MembershipGuess(scores, fires[:, guess_rung])
        down = gradient[:, : guess_rung + 1].flip(1) / noise_std
        sums = _standardised(down)
        scores = sums.abs() if self.upstream_sign == 0 else sums * self.upstream_sign
        scores = scores.amax(1)
        two_sided = self.upstream_sign == 0
        threshold = _noise_quantile(guess_rung + 1, self.false_positive_rate, two_sided)
        return MembershipGuess(scores, scores > threshold)


def _standardised(numbers: Tensor) -> Tensor:
    """Sums of the first n columns over sqrt(n), n = 1, 2, ..."""
    n = torch.arange(1, numbers.shape[1] + 1, device=numbers.device)
    return numbers.cumsum(1) / n.to(numbers.dtype).sqrt()


@cache
def _noise_quantile(n: int, rate: float, two_sided: bool) -> float:
    """Value that the largest of :func:`_standardised` over n columns of noise exceeds at ``rate``.

    Exact for one column; by 400,000 draws of a generator of its own for more.
    """
    if n == 1:
        tail = rate / 2 if two_sided else rate
        return float(torch.special.ndtri(torch.tensor(1 - tail, dtype=torch.float64)))
    generator = torch.Generator().manual_seed(0)
    sums = _standardised(torch.randn(400_000, n, generator=generator))
    largest = (sums.abs() if two_sided else sums).amax(1).sort().values
    return float(largest[min(len(largest) - 1, int((1 - rate) * len(largest)))])


__all__ = ["RungReader"]
