"""What the attention adversary learns from public text: whitening, and gamma at a stated rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.attention_closed_form import token_rows
from lightning_fedleak.attacks.attention_design import AttentionDesign
from lightning_fedleak.attacks.attention_public import (
    PublicScores,
    PublicStates,
    PublicTargets,
    public_scores,
)
from lightning_fedleak.attacks.whitening import Whitening, fit_whitening

WIDE_ENOUGH = 0.1
"""Half-width that holds a member's response in bfloat16 too. Wider bands would decide at the same
rate on text like the public one, but fire on text of another kind; they serve to rank."""


@dataclass(frozen=True, repr=False)
class Calibration:
    """What is kept of public text.

    Attributes:
        whitening: None for the model's own coordinates.
        gammas: (levels,) absolute ones, hardest to exceed first: of coordinates, or the lemma's;
            empty where the attack's own widths serve.
        level: which gamma or band decides: the easiest at which public batches fire at no more than
            the rate asked for; where even the hardest fires more often that one.
        rate: at which they do; NaN where it was not asked for.
        response: of a member along ``-v / |v|^2``, the median over public tokens.
    """

    whitening: Whitening | None
    gammas: Tensor
    level: int
    rate: float = math.nan
    response: float = 1.0

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        own = {
            "gammas": self.gammas,
            "level": torch.tensor(self.level),
            "rate": torch.tensor(self.rate, dtype=torch.float64),
            "response": torch.tensor(self.response, dtype=torch.float64),
        }
        return own | ({} if self.whitening is None else self.whitening.tensors())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Takes back what :meth:`tensors` gave."""
        whitening = Whitening.from_tensors(tensors) if "whitening.matrix" in tensors else None
        numbers = {name: float(tensors[name]) for name in ("rate", "response")}
        return cls(whitening, tensors["gammas"], int(tensors["level"]), **numbers)


def learned(states: PublicStates, design: AttentionDesign) -> Calibration:
    """Whitening and gamma from the hidden states of public text.

    Gamma is calibrated on one half of them, whitened by the other: text that was whitened by itself
    is nearer to its mean than other text.

    Raises:
        ValueError: too few tokens to whiten, too few texts to calibrate, or, with
            ``readout="token"``, a median response that is not positive.
    """
    heads = design.heads(states.hidden.shape[-1], states.hidden)
    whitening = fit_whitening(states.tokens, design.ridge) if design.whiten else None
    if design.gamma == "lemma":
        gamma = lemma_gamma(states.read_by(whitening), heads.beta)
        return Calibration(whitening, torch.tensor([gamma]), level=0)
    if design.whiten:
        fitted, states = states.halves()
        states = states.read_by(fit_whitening(fitted.tokens, design.ridge))
    asked = PublicTargets.of(states, design.seed)
    rows, response = None, 1.0
    if design.matched:
        rows = heads.matched_rows(asked.hidden, asked.mask, asked.position)
    elif design.score != "coordinates":
        rows = token_rows(asked.tokens)
        expected = heads.expected(asked.hidden, asked.mask, asked.position)
        response = float((expected * rows).sum(1).median())
        if not response > 0:
            raise ValueError(
                f"readout='token' reads along -v, and on public text the median response there is "
                f"{response:.3g}, not positive, so that a member could not be told by it: use "
                "readout='matched', or another beta or layer"
            )
        rows = rows / response
    if design.gamma != "calibrated":
        return replace(by_number(whitening, design), response=response)
    if len(states.hidden) <= design.batch:
        raise ValueError(
            f"{len(states.hidden)} public texts are too few to tell how often a batch of "
            f"{design.batch} fires: give more of them (with whiten=True twice as many, of which "
            "half are whitened by), or set gamma to a number"
        )
    scores = public_scores(states, asked, design.score, rows, heads)
    gammas = torch.zeros(0)
    if design.score == "coordinates":
        gammas = _quantiles(scores, design)
        thresholds = gammas.tolist()
    elif design.score == "band":
        thresholds = [-w for w in design.widths]
    else:
        thresholds = list(design.edges)
    rates = [scores.false_positive_rate(t, design.batch) for t in thresholds]
    decisive = [
        i
        for i, rate in enumerate(rates)
        if rate <= design.false_positive_rate and (not design.matched or i < _narrow(design))
    ]
    level = max(decisive, default=0)
    return Calibration(whitening, gammas, level, rates[level], response)


def _narrow(design: AttentionDesign) -> int:
    """How many widths are no wider than a member needs in any precision; at least 1."""
    return max(1, sum(width <= WIDE_ENOUGH for width in design.widths))


def by_number(whitening: Whitening | None, design: AttentionDesign) -> Calibration:
    """For a gamma that is given as a number."""
    absolute = [float(design.gamma)] if design.score == "coordinates" else []
    return Calibration(whitening, torch.tensor(absolute), design.level_of_gamma)


def _quantiles(scores: PublicScores, design: AttentionDesign) -> Tensor:
    """Gammas at equal shares of what public batches with and without their targets reach."""
    maxima = scores.batch_maxima(design.batch, 8, design.generator())
    maxima = maxima.sort(descending=True).values.cpu()
    gammas = maxima[torch.linspace(0, len(maxima) - 1, design.levels).long()].float()
    gammas[0] *= 0.999  # the largest of all would never be exceeded
    return gammas


def lemma_gamma(states: PublicStates, beta: float) -> float:
    """2 Delta-bar = ``4 M (l - 1) exp(2 / l - beta Delta)`` of public text (Lemma 2).

    Delta is the separation (Definition 2) and M the largest norm of a token, l the longest
    sentence's length. Infinite where it overflows.
    """
    delta, longest, largest = math.inf, 1, 0.0
    for x, keep in zip(states.hidden.double(), states.mask, strict=True):
        x = x[keep]
        products = x @ x.T
        own = products.diagonal().clone()
        longest, largest = max(longest, len(x)), max(largest, float(own.max()))
        if len(x) > 1:
            products.fill_diagonal_(-torch.inf)
            delta = min(delta, float((own - products.amax(1)).min()))
    try:
        decay = math.exp(2 / longest - beta * delta)
    except OverflowError:
        return math.inf
    return 4 * math.sqrt(largest) * (longest - 1) * decay


__all__ = ["Calibration", "by_number", "learned", "lemma_gamma"]
