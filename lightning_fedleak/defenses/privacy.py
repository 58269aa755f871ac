"""What a defence's releases have cost so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Privacy:
    """What the releases so far have cost one example of one client.

    What an example is, and against whom it is hidden, says the defence's ``guarantee``.

    Attributes:
        epsilon: an upper bound at ``delta``; infinite where there is nothing to speak of.
        delta: of the guarantee; 0 where it is pure.
        noise_multiplier: accounted: standard deviation of the noise that the server cannot tell
            apart from the sum, over the clip norm; None of a mechanism without one.
        sample_rate: chance of an example to be in a batch; 1 without Poisson sampling.
        releases: that are counted so far: optimizer steps, or of the example released most often.
    """

    epsilon: float
    delta: float
    noise_multiplier: float | None
    sample_rate: float
    releases: int


__all__ = ["Privacy"]
