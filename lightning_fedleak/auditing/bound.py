"""A lower bound on epsilon, and the relation of neighbours that it is for.

In an ``"add_remove"`` game the target is in the batch or absent, as the accountants of DP-SGD
assume. In Fig. 2's game (Vu et al. 2024) another sample stands in its place: ``"replace_one"``. A
bound is for the relation of the game unless ``accountant`` names the other one. There is a bridge
one way: to replace is to remove and to add, so that (epsilon, delta)-DP under add/remove implies
``(2 epsilon, (1 + e^epsilon) delta)``-DP under replace-one, and mu-Gaussian DP implies 2 mu. A
replace-one game that refutes the latter refutes the former; the bound is about half as large.
Nothing follows the other way round: a mechanism that is private when one record is replaced may
tell outright how many there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Relation = Literal["add_remove", "replace_one"]

WORDS = {"add_remove": "add/remove", "replace_one": "replace-one"}


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on epsilon; too large with probability at most ``1 - confidence``.

    Attributes:
        epsilon: the bound; 0 where nothing is shown, NaN (unknown) where a score was NaN.
        delta: at which it holds.
        confidence: of the bound, over everything that was tried.
        relation: of the epsilon.
        games: games or canaries.
        limit: the bound that a perfect attack would have given in so many games.
        method: how thresholds or guesses were chosen, and what else was assumed.
    """

    epsilon: float
    delta: float
    confidence: float
    relation: Relation
    games: int
    limit: float
    method: str

    def __str__(self) -> str:
        """In one line."""
        if math.isnan(self.epsilon):
            return f"epsilon is unknown: a score is NaN ({WORDS[self.relation]}, {self.method})"
        return (
            f"epsilon >= {self.epsilon:.3f} at delta {self.delta:g} ({WORDS[self.relation]}, "
            f"{self.confidence:.0%} confidence; {self.games} games, which could show "
            f"{self.limit:.2f} at most; {self.method})"
        )


def must_halve(relation: Relation, accountant: Relation | None) -> bool:
    """Whether a replace-one game is to bound an add/remove epsilon.

    Raises:
        ValueError: an unknown relation, or no bridge between the two.
    """
    for name, value in (("relation", relation), ("accountant", accountant or relation)):
        if value not in WORDS:
            raise ValueError(f"{name} must be 'add_remove' or 'replace_one', got {value!r}")
    if accountant is None or accountant == relation:
        return False
    if accountant == "replace_one":
        raise ValueError(
            "an add/remove game bounds no replace-one epsilon: a mechanism that is private when "
            "one record is replaced may still tell how many there are. Play the game that "
            "replaces the target, or audit an add/remove accountant."
        )
    return True


def columns(scores: Tensor, members: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    """Scores and bits as numpy.

    Raises:
        ValueError: lengths differ.
    """
    score = scores.detach().reshape(-1).double().cpu().numpy()
    member = members.detach().reshape(-1).bool().cpu().numpy()
    if score.size != member.size:
        raise ValueError(
            f"members holds {member.size} games, scores {score.size}: give one value for each"
        )
    return score, member


def check(delta: float, confidence: float) -> None:
    """Refuses what is no probability.

    Raises:
        ValueError: delta outside [0, 1), or confidence outside (0, 1).
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
