"""A_guess of the attention adversary: what its ladders of gamma say, noise or none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_fedleak.attacks.attention_design import Score
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.membership import MembershipGuess
from lightning_fedleak.attacks.rungs import RungReader


def guess_by(
    score: Score,
    reader: RungReader,
    gradient: Tensor,
    noise_std: float,
    levels: int,
    guess_level: int,
) -> MembershipGuess:
    """Scores (G,) and decisions (G,) for a gradient (G, K).

    Args:
        score: how K numbers belong together. ``"ladder"``: ``levels`` gammas, the hardest to exceed
            first. ``"band"``: the bands' lower edges, narrowest band first, then their upper edges;
            what lies in a band is the difference of the two. ``"coordinates"``: a ladder for each
            row of W_O, row after row; the best row counts.
        reader: of one ladder.
        gradient: (G, K).
        noise_std: of the noise on each number.
        levels: length of a ladder, number of bands.
        guess_level: the one that decides.

    Raises:
        UnusableObservation: the gradient is not finite.
        ValueError: it has another number of rungs, or the noise is negative.
    """
    if not 0.0 <= noise_std < math.inf:
        raise ValueError(f"noise_std must be 0 or positive, got {noise_std}")
    if not bool(gradient.isfinite().all()):
        raise UnusableObservation("the gradient of the crafted layers is not finite")
    if score == "ladder":
        return reader.guess(gradient, noise_std, levels, guess_level)
    if score == "band":
        inside = _inside(gradient, levels) if noise_std == 0 else _edges(gradient, levels)
        return reader.guess(inside, noise_std * 2**0.5, levels, guess_level)
    if gradient.dim() != 2 or gradient.shape[1] % levels:
        raise ValueError(
            f"the gradient must be (G, K), {levels} numbers for each row of W_O, got "
            f"{tuple(gradient.shape)}"
        )
    best = gradient.view(len(gradient), -1, levels).abs().amax(1)
    if noise_std == 0:
        return reader.guess(best, 0.0, levels, guess_level)
    rows = gradient.shape[1] // levels
    scores = best[:, : guess_level + 1].amax(1) / noise_std
    each = (1 - reader.false_positive_rate) ** (1 / (rows * (guess_level + 1)))
    threshold = torch.special.ndtri(torch.tensor((1 + each) / 2, dtype=torch.float64))
    return MembershipGuess(scores, scores > float(threshold))


def _edges(gradient: Tensor, levels: int) -> Tensor:
    """Lower minus upper edges, (G, levels)."""
    if gradient.dim() != 2 or gradient.shape[1] != 2 * levels:
        raise ValueError(
            f"the gradient must be (G, {2 * levels}), one number per rung, got "
            f"{tuple(gradient.shape)}"
        )
    return gradient[:, :levels] - gradient[:, levels:]


def _inside(gradient: Tensor, levels: int) -> Tensor:
    """The same, and 0 where the two differ by rounding of one sum."""
    inside = _edges(gradient, levels)
    size = gradient[:, :levels].abs() + gradient[:, levels:].abs()
    rounding = 4 * torch.finfo(gradient.dtype).eps * size
    return inside.masked_fill(inside.abs() <= rounding, 0.0)


__all__ = ["guess_by"]
