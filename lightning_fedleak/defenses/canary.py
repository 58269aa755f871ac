"""A canary on its way out: what a dishonest server's own layers would add to a client's update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CanaryGradient:
    """Gradient of crafted layers that are not really there, as far as it has come.

    There are G games at once, each with crafted layers of its own (K trainable numbers) beside the
    client's model. In none of them do the other games' layers exist.

    Attributes:
        samples: (B, G, K) what each of the client's B samples adds to the gradient of the K
            numbers crafted in each of G games. Their sum leaves the client.
        noise: (G, K) what defences have added to that sum; None where nothing.
        noise_std: standard deviation of each number of ``noise``; where it differs between games
            the root of their mean variance.
    """

    samples: Tensor
    noise: Tensor | None = None
    noise_std: float = 0.0

    @property
    def released(self) -> Tensor:
        """(G, K), the sum over samples with its noise."""
        total = self.samples.sum(0)
        return total if self.noise is None else total + self.noise

    def scaled(self, factors: Tensor) -> CanaryGradient:
        """Each game's gradient times its factor, (G,)."""
        columns = factors.to(self.samples.dtype)[:, None]
        return CanaryGradient(
            self.samples * columns,
            None if self.noise is None else self.noise * columns,
            self.noise_std * math.sqrt(float(factors.square().mean())),
        )

    def noised(self, noise: Tensor, std: float) -> CanaryGradient:
        """With independent ``noise`` (G, K) of standard deviation ``std`` added."""
        total = noise if self.noise is None else self.noise + noise
        return CanaryGradient(self.samples, total, math.hypot(self.noise_std, std))


__all__ = ["CanaryGradient"]
