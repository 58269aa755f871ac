"""A clip norm that follows a quantile of the norms that it clips, by counts that are released."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.noise import standard_normal
from lightning_fedleak.validate import check_number

MOST_LOG_FACTOR = 20.0  # of a norm that counts have led to; larger: norms that overflow


@dataclass(frozen=True)
class QuantileClip:
    """A clip norm that follows a quantile of the norms that it clips (Andrew et al. 2021).

    These are the norms of clients' updates (``ClientDP``).

    After each release ``C`` becomes ``C exp(-rate (b - quantile))``, where b is the share of norms
    below C, released with noise of its own. Each adds plus or minus a half to it, so that it costs
    as much as a release with a noise multiplier of ``2 noise``. The sum gets that much more noise
    that both together cost what the noise multiplier says (their Theorem 1)::

        z_sum = (z^-2 - (2 noise)^-2)^(-1/2)

    Attributes:
        quantile: of the norms, in (0, 1).
        rate: of the change, over a whole share.
        noise: standard deviation of the noise on the count; None: a twentieth of the expected
            number of clients, as in the paper.

    Raises:
        DefenseError: a value out of range.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        check_number("QuantileClip: quantile", self.quantile, above=0, below=1, error=DefenseError)
        check_number("QuantileClip: rate", self.rate, above=0, error=DefenseError)
        check_number("QuantileClip: noise", self.noise, above=0, optional=True, error=DefenseError)


@dataclass
class ClipPath:
    """The clip norm over the rounds of a run, over the norm that it begins with.

    Attributes:
        quantile: that it follows; None where it stays.
        log_factor: log of the factor that the counts so far have led to.
    """

    quantile: QuantileClip | None
    log_factor: float = 0.0

    @property
    def factor(self) -> float:
        """Return the factor of the next round."""
        return math.exp(self.log_factor)

    def share_of_noise(self, noise_multiplier: float, expected: float) -> float:
        """Return the noise on the sum over what a release without a count would have.

        Args:
            noise_multiplier: standard deviation of that noise over the clip norm.
            expected: number of clients.

        Raises:
            DefenseError: the count alone costs more than z allows.
        """
        if self.quantile is None or not noise_multiplier:
            return 1.0
        least = 2 * self._count_noise(expected)
        if least <= noise_multiplier:
            many = f"more than {10 * noise_multiplier:.3g} clients a round, or "
            raise DefenseError(
                f"the clip norm follows a quantile (QuantileClip, --clip-quantile), and its count "
                f"of {expected:g} with noise {least / 2:g} costs more than a release with a noise "
                f"multiplier of {noise_multiplier:g} may: use "
                f"{many if self.quantile.noise is None else ''}"
                f"QuantileClip(noise=) above {noise_multiplier / 2:g}"
            )
        return 1 / math.sqrt(1 - (noise_multiplier / least) ** 2)

    def follow(self, halves: Tensor, expected: float, key: bytes | None) -> None:
        """Release a count of norms below the clip norm, and set the next norm by it.

        Args:
            halves: (1,) sum of a half for each, with a minus where the norm is above.
            expected: number of clients.
            key: of the noise; None for no noise.
        """
        if self.quantile is None:
            return
        count = halves.cpu().double()
        if key is not None:
            noise = standard_normal(key, count.shape, count.device, count.dtype)
            count = count + self._count_noise(expected) * noise
        share = 0.5 + float(count) / expected
        log_factor = self.log_factor - self.quantile.rate * (share - self.quantile.quantile)
        self.log_factor = max(-MOST_LOG_FACTOR, min(MOST_LOG_FACTOR, log_factor))

    def _count_noise(self, expected: float) -> float:
        assert self.quantile is not None
        return expected / 20 if self.quantile.noise is None else self.quantile.noise
