"""What the attention adversary crafts and how it is read, whatever the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.attention_closed_form import HeadPair
from lightning_fedleak.attacks.crafted_attention import left_out

Score = Literal["band", "ladder", "coordinates"]
Readout = Literal["matched", "token"]
Variant = Literal["projector", "paper"]

LEVELS = 16
"""Gammas of a calibrated ladder over coordinates."""


@dataclass(frozen=True)
class AttentionDesign:
    """Settings, as :class:`~lightning_fedleak.attacks.attention_membership.AttentionMembership`'s.

    Raises:
        ValueError: one outside of its range, or two that exclude each other.
    """

    beta: float | Literal["authors"]
    gamma: float | Literal["calibrated", "lemma"]
    whiten: bool
    score: Score
    readout: Readout
    variant: Variant
    omit_random: bool
    widths: tuple[float, ...]
    causal: bool
    ridge: float
    batch: int
    false_positive_rate: float
    seed: int

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "score": ("band", "ladder", "coordinates"),
            "readout": ("matched", "token"),
            "variant": ("projector", "paper"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        check_positive("beta", self.beta, ("authors",))
        check_positive("gamma", self.gamma, ("calibrated", "lemma"))
        check_positive("batch", self.batch)
        if self.score == "band" and self.gamma == "lemma":
            raise ValueError("the lemma's gamma is one threshold and no band: use score='ladder'")
        if not self.widths or not all(0 < w < 1 for w in self.widths):
            raise ValueError(f"widths must be numbers between 0 and 1, got {self.widths}")

    @property
    def matched(self) -> bool:
        """Whether targets hold the row to read along, behind the token."""
        return self.score != "coordinates" and self.readout == "matched"

    @property
    def levels(self) -> int:
        """Length of a ladder, or number of bands."""
        if self.gamma == "lemma":
            return 1
        if self.score == "coordinates":
            return LEVELS if self.gamma == "calibrated" else 1
        return len(self.widths) if self.score == "band" else len(self.edges)

    @property
    def edges(self) -> tuple[float, ...]:
        """Gammas in units of a member's response, one for each rung.

        Of ``"band"`` the lower edges, narrowest first, then the upper ones. Of ``"ladder"`` the
        same from the highest down, without the upper ones where a member's response is known.
        """
        lower = [1.0 - w for w in self.widths]
        upper = [1.0 + w for w in self.widths]
        if self.score == "band":
            return (*lower, *upper)
        return tuple(lower) if self.matched else (*reversed(upper), *lower)

    @property
    def level_of_gamma(self) -> int:
        """The level of a gamma that is a number; its width is among ``widths``."""
        if self.score == "coordinates":
            return 0
        return self.edges.index(1.0 - width_of(float(self.gamma)))

    def heads(self, d: int, like: Tensor) -> HeadPair:
        """The heads for hidden states of d numbers, on the device and in the dtype of ``like``."""
        beta = 2.0 / math.sqrt(d - 1) if isinstance(self.beta, str) else float(self.beta)
        u = _left_out(d, self.seed).to(like) if self.omit_random else None
        return HeadPair(beta, u, self.causal)

    def generator(self) -> torch.Generator:
        """Of Algorithm 1's random matrices."""
        return torch.Generator().manual_seed(self.seed)


@cache
def _left_out(d: int, seed: int) -> Tensor:
    return left_out(d, torch.Generator().manual_seed(seed))


def check_positive(argument: str, value: Any, words: tuple[str, ...] = ()) -> None:
    """Whether ``value`` is a positive finite number, or one of ``words``.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str) and value in words:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        said = "".join(f"'{w}', " for w in words)
        raise ValueError(f"{argument} must be {said}{'or ' if said else ''}positive, got {value!r}")


def width_of(gamma: float) -> float:
    """Half-width of the band whose lower edge is ``gamma``.

    Raises:
        ValueError: gamma is not below 1.
    """
    if gamma >= 1:
        raise ValueError(f"gamma is a share of a member's response, below 1: got {gamma}")
    return round(1.0 - gamma, 12)


def widths_of(widths: Sequence[float], gamma: float | None) -> tuple[float, ...]:
    """Half-widths ascending, with that of ``gamma`` among them."""
    steps = {round(float(w), 12) for w in widths}
    return tuple(sorted(steps if gamma is None else steps | {width_of(gamma)}))


__all__ = [
    "LEVELS",
    "AttentionDesign",
    "Readout",
    "Score",
    "Variant",
    "check_positive",
    "widths_of",
]
