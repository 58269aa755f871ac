"""What a defence's releases have cost so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Privacy:
    """What the releases so far have cost one example of one client.

    Attributes:
        epsilon: an upper bound at ``delta``; infinite where there is nothing to speak of.
        delta: of the guarantee.
        noise_multiplier: accounted: standard deviation of the noise that the server cannot tell
            apart from the sum, over the clip norm.
        sample_rate: chance of an example to be in a batch; 1 without Poisson sampling.
        releases: optimizer steps so far.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    releases: int


__all__ = ["Privacy"]
