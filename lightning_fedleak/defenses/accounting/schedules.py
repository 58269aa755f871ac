"""Noise and clip norms that change over a run: by a plan made before it, or by released counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_fedleak.defenses.accounting.accounting import factor_at
from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.noise import standard_normal
from lightning_fedleak.validate import check_choice, check_number

MOST_LOG_FACTOR = 20.0  # of a norm that counts have led to; larger: norms that overflow
PARTS = 10  # of a run, with one factor each; every one more takes .1 s longer in a call of PRV


@dataclass(frozen=True)
class Schedule:
    """A curve of factors over the run: 1 in its first tenth, ``end`` in its last.

    Attributes:
        form: ``"exponential"`` or ``"linear"``.
        end: factor of the last tenth.

    Raises:
        DefenseError: a value out of range.
    """

    form: Literal["exponential", "linear"]
    end: float

    def __post_init__(self) -> None:
        forms = ("exponential", "linear")
        check_choice("Schedule: form", self.form, forms, error=DefenseError)
        check_number("Schedule: end", self.end, above=0, error=DefenseError)

    @property
    def factors(self) -> tuple[float, ...]:
        """Return the factor of each tenth of the run."""
        shares = [part / (PARTS - 1) for part in range(PARTS)]
        if self.form == "linear":
            return tuple(1 + share * (self.end - 1) for share in shares)
        return tuple(self.end**share for share in shares)


Factors = Schedule | Sequence[float]
"""A curve, or one's own factors: each for an equal part of the run, so many as it has parts."""


def factors_of(name: str, schedule: Factors | None) -> tuple[float, ...]:
    """Return the factors of equal parts of the run; none without a plan.

    Args:
        name: of the argument, for messages.
        schedule: as the user passed it.

    Raises:
        DefenseError: no factors, or one out of range.
    """
    if schedule is None or isinstance(schedule, Schedule):
        return () if schedule is None else schedule.factors
    if not isinstance(schedule, Sequence) or not schedule:
        raise DefenseError(
            f"DPSGD: {name} must be a Schedule('exponential', end=...), or a list of factors for "
            f"equal parts of the run; got {schedule!r}"
        )
    for factor in schedule:
        check_number(f"DPSGD: {name}", factor, above=0, error=DefenseError)
    return tuple(map(float, schedule))


@dataclass(frozen=True)
class QuantileClip:
    """A clip norm that follows a quantile of the norms that it clips (Andrew et al. 2021).

    These are the norms of samples' gradients (``DPSGD``), or of clients' updates (``ClientDP``).

    After each release ``C`` becomes ``C exp(-rate (b - quantile))``, where b is the share of norms
    below C, released with noise of its own. Each adds plus or minus a half to it, so that it costs
    as much as a release with a noise multiplier of ``2 noise``. The sum gets that much more noise
    that both together cost what the noise multiplier says (their Theorem 1)::

        z_sum = (z^-2 - (2 noise)^-2)^(-1/2)

    Attributes:
        quantile: of the norms, in (0, 1).
        rate: of the change, over a whole share.
        noise: standard deviation of the noise on the count; None: a twentieth of the expected
            number of samples or clients, as in the paper.

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
    """The clip norm over the steps of a run, over the norm that it begins with.

    Attributes:
        factors: of equal parts of the run; none where it stays.
        quantile: that it follows; None where it does not.
        log_factor: log of the factor that the counts so far have led to.
    """

    factors: tuple[float, ...]
    quantile: QuantileClip | None
    log_factor: float = 0.0

    def settings(self, noise: Sequence[float]) -> dict[str, str]:
        """Return what changes over a run, for its record.

        Args:
            noise: factors of the noise multiplier; none where it stays.
        """
        plans = {"noise_schedule": noise, "clip_schedule": self.factors}
        settings = {n: ", ".join(f"{f:.3g}" for f in factors) for n, factors in plans.items()}
        settings["clip_quantile"] = "" if self.quantile is None else f"{self.quantile.quantile:g}"
        return {name: value for name, value in settings.items() if value}

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of a step, counted from 0, of the planned ``steps``."""
        return factor_at(self.factors, step, steps) * math.exp(self.log_factor)

    def share_of_noise(self, noise_multiplier: float, expected: float) -> float:
        """Return the noise on the sum over what a release without a count would have.

        Args:
            noise_multiplier: standard deviation of that noise over the clip norm.
            expected: number of samples or clients.

        Raises:
            DefenseError: the count alone costs more than z allows.
        """
        if self.quantile is None or not noise_multiplier:
            return 1.0
        least = 2 * self._count_noise(expected)
        if least <= noise_multiplier:
            many = f"more than {10 * noise_multiplier:.3g} samples a batch (clients a round), or "
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
            expected: number of samples or clients.
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
