"""Calibration of the attention adversary on public text: whitening and false positives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.membership.attention_layers import (
    attentions,
    matched_rows,
    tokens_at,
)
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space import Whitening, fit_whitening
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states

MAX_TARGETS = 512  # public tokens that serve as targets; not tuned; more: steadier and slower

WIDE_ENOUGH = 0.1
"""Half-width, in units of a member's response, that holds it in bfloat16 too (.06 was measured).

Wider bands would decide at the same rate on text like the public text, but fire on other text; they
only rank."""


@dataclass(frozen=True, repr=False)
class PublicStates:
    """Hidden states of public text.

    Attributes:
        hidden: (S, L, d), at least float32.
        mask: (S, L) bool.
    """

    hidden: Tensor
    mask: Tensor

    @classmethod
    def sample(
        cls, anatomy: Anatomy, layer: int, text: PublicText, length: int, tokens: int, seed: int
    ) -> PublicStates:
        """Return states of random texts, each cut to ``length``, with about ``tokens`` tokens in
        all.
        """
        generator = torch.Generator().manual_seed(seed)
        indices: list[int] = []
        remaining = tokens
        for index in text.draw(len(text), generator).tolist():
            if remaining <= 0:
                break
            indices.append(index)
            remaining -= min(length, len(text.sentences[index]))
        batch = text.rows(indices, max(2, length), generator)
        assert batch.attention_mask is not None
        hidden = hidden_states(anatomy, layer, batch.input_ids, batch.attention_mask)
        real = batch.attention_mask.to(hidden.device) != 0
        return cls(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), real)

    def whiten(self, whitening: Whitening) -> PublicStates:
        """Return the same states, whitened."""
        return PublicStates(whitening(self.hidden), self.mask)

    def halves(self) -> tuple[PublicStates, PublicStates]:
        """Return every second text, and the others."""
        parts = [PublicStates(self.hidden[i::2], self.mask[i::2]) for i in (0, 1)]
        return parts[0], parts[1]

    @property
    def tokens(self) -> Tensor:
        """Return (N, d) hidden states that are not padding."""
        return self.hidden[self.mask]


def false_positive_rate(scores: Tensor, threshold: float, batch: int) -> float:
    """Return the chance that one of ``batch`` public sentences scores above ``threshold``.

    It is exact for a batch drawn at random from the public sentences: for a target on which h
    of s sentences fire, ``1 - C(s - h, batch) / C(s, batch)``; the mean over targets.

    Args:
        scores: (T, S) of each sentence for each target; -inf where the sentence holds the target.
        threshold: that fires.
        batch: number of sentences.
    """
    s = (scores > -torch.inf).sum(1).double()
    h = (scores > threshold).sum(1).double()
    n = torch.clamp(s, max=batch)
    miss_chance = (
        torch.lgamma(s - h + 1)
        - torch.lgamma((s - h - n + 1).clamp(min=1.0))
        + torch.lgamma(s - n + 1)
        - torch.lgamma(s + 1)
    ).exp()
    return float((1 - torch.where(s - h >= n, miss_chance, 0.0)).mean())


def public_scores(states: PublicStates, v: Tensor, rows: Tensor, beta: float) -> Tensor:
    """Return (T, S) scores of all public sentences for public tokens as targets.

    A score is minus the half-width of the narrowest band around 1 that holds a token's response
    along the target's row; -inf where the sentence holds the target's hidden state.

    Args:
        states: whitened.
        v: (T, d) the target tokens.
        rows: (T, d) of W_O.
        beta: factor of the products.
    """
    scores = v.new_full((len(v), len(states.hidden)), -torch.inf)
    for attention in attentions(states.hidden, states.mask, v, beta):
        near = -(attention.project(rows) - 1).abs()
        scores[attention.targets, attention.sentence] = near.amax(1)
    return scores.masked_fill(_sentences_with(states, v), -torch.inf)


def _sentences_with(states: PublicStates, v: Tensor) -> Tensor:
    """Return (T, S): whether a sentence holds the target's hidden state, up to rounding."""
    x = states.hidden.double().flatten(0, 1)
    t = v.double()
    squared = x.square().sum(1) + t.square().sum(1, keepdim=True) - 2 * t @ x.T
    near = squared < 1e-6 * t.square().sum(1, keepdim=True)
    return (near & states.mask.flatten()).view(len(v), *states.mask.shape).any(2)


@dataclass(frozen=True, repr=False)
class Calibration:
    """Whitening and the deciding band, from public text.

    Attributes:
        whitening: of hidden states.
        level: index of the band that decides: the widest at which public batches fire at no more
            than ``false_positive_rate``, or the narrowest where none does.
    """

    whitening: Whitening
    level: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the numbers for a checkpoint."""
        return {"level": torch.tensor(self.level), **self.whitening.tensors()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Restore what :meth:`tensors` returned."""
        return cls(Whitening.from_tensors(tensors), int(tensors["level"]))


def calibrate(
    states: PublicStates,
    *,
    beta: float,
    widths: Sequence[float],
    batch: int,
    most_false_positives: float,
    seed: int,
) -> Calibration:
    """Return whitening and the deciding band from the hidden states of public text.

    The band is calibrated on one half of the states, whitened by the other half: states that their
    own covariance whitens lie nearer to their mean than those of other text.

    Args:
        states: hidden states of public text.
        beta: factor of the products.
        widths: half-widths of the bands.
        batch: sentences of a client.
        most_false_positives: rate at which public batches may fire.
        seed: of the targets, at most :data:`MAX_TARGETS` random tokens.

    Raises:
        ValueError: too few tokens to whiten, or too few texts to calibrate.
    """
    whitening = fit_whitening(states.tokens)
    fitted, states = states.halves()
    states = states.whiten(fit_whitening(fitted.tokens))
    if len(states.hidden) <= batch:
        raise ValueError(
            f"{len(states.hidden)} public texts are too few to measure how often a batch of "
            f"{batch} fires: give more than {2 * batch} (half of them fit the whitening)"
        )
    places = states.mask.nonzero()
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    sentence, position = places[order[:MAX_TARGETS].to(places.device)].T
    hidden = states.hidden[sentence]
    rows = matched_rows(hidden, states.mask[sentence], position, beta)
    scores = public_scores(states, tokens_at(hidden, position), rows, beta)
    decisive = [
        level
        for level, width in enumerate(widths)
        if width <= WIDE_ENOUGH
        and false_positive_rate(scores, -width, batch) <= most_false_positives
    ]
    return Calibration(whitening, max(decisive, default=0))
