"""What settings of :class:`~lightning_fedleak.defenses.TokenLDP` guarantee, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fedleak.defenses.token_draws import Implementation

Per = Literal["token", "sequence"]


@dataclass(frozen=True)
class Promise:
    """The settings on which a guarantee hangs.

    Attributes:
        epsilon: of one release of one token or row, see ``per``.
        per: which of the two.
        in_batch: whether tokens are replaced among the ids of their own batch.
        labels: ``"replaced"`` or ``"original"``.
        memoized: whether a row keeps its replacement for the fit.
        example_ids: whether rows of equal words can be told apart.
        implementation: what draws.
        seeded: whether the randomness follows from a seed.
    """

    epsilon: float
    per: Per
    in_batch: bool
    labels: str
    memoized: bool
    example_ids: bool
    implementation: Implementation
    seeded: bool

    @property
    def guarantee(self) -> str:
        """One sentence; it begins with "none" where there is none."""
        if self.in_batch:
            return (
                f"none: every token is randomised with epsilon={self.epsilon:g}, but among the ids "
                "of its own batch, so that whoever sees the batch knows which words occur in it"
            )
        if self.labels == "original":
            return "none: the inputs are randomised, but the labels hold the original words"
        if self.seeded:
            return "none: whoever knows or guesses `seed` can take the replacement back (for tests)"
        if self.implementation == "multi-freq-ldpy":
            return "none: the generator has a seed of 32 bits, which can be tried out"
        unit, total = (
            ("row of a batch", "")
            if self.per == "sequence"
            else ("token", ", that is, words x epsilon for a row")
        )
        releases = (
            "once in a fit by each client that has the row, which keeps its replacement (rows of "
            "equal words show as equal"
            + (" unless their example ids differ)" if self.example_ids else ")")
            if self.memoized
            else "in every epoch anew: epsilons add up"
        )
        return (
            f"against whoever sees anything computed of the batch, {self.epsilon:g}-local "
            f"differential privacy for each {unit}{total}; spent {releases}. Public: lengths and "
            "special tokens. Not covered: labels of a classifier"
        )

    @property
    def warnings(self) -> list[str]:
        """What the user is told where a setting voids the guarantee."""
        found = []
        if self.in_batch:
            found.append(
                "domain='batch' holds no guarantee: which words occur in the batch is visible, and "
                f"with per='token' a row of 32 would cost 32 x {self.epsilon:g} in any case. For "
                "comparison with published figures only; use domain='vocabulary'."
            )
        if self.labels == "original":
            found.append(
                "labels='original' voids the guarantee: a language model's labels are the text. "
                "Leave `labels` out."
            )
        if self.implementation == "multi-freq-ldpy":
            found.append(
                "implementation='multi-freq-ldpy' draws from a generator with a seed of 32 bits, "
                "which can be tried out. For comparison only; leave `implementation` out."
            )
        return found


__all__ = ["Per", "Promise"]
