"""How often the attention adversary would fire on public text that does not hold the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.attention_closed_form import HeadPair, tokens_at
from lightning_fedleak.attacks.attention_design import Score
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.whitening import Whitening
from lightning_fedleak.model_runs import hidden_states

TARGETS = 512
"""Public tokens that are asked for in calibration, at most."""


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
    def of(
        cls, anatomy: Anatomy, layer: int, text: PublicText, length: int, tokens: int, seed: int
    ) -> PublicStates:
        """Random texts, each cut to ``length`` tokens, about ``tokens`` tokens in all."""
        generator = torch.Generator().manual_seed(seed)
        chosen: list[int] = []
        left = tokens
        for index in text.draw(len(text), generator).tolist():
            if left <= 0:
                break
            chosen.append(index)
            left -= min(length, len(text.sentences[index]))
        batch = text.rows(chosen, max(2, length), generator)
        assert batch.attention_mask is not None
        hidden = hidden_states(anatomy, layer, batch.input_ids, batch.attention_mask)
        real = batch.attention_mask.to(hidden.device) != 0
        return cls(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), real)

    def read_by(self, whitening: Whitening | None) -> PublicStates:
        """The same, whitened."""
        if whitening is None:
            return self
        return PublicStates(whitening(self.hidden), self.mask)

    def halves(self) -> tuple[PublicStates, PublicStates]:
        """Every second text, and the others."""
        parts = [PublicStates(self.hidden[i::2], self.mask[i::2]) for i in (0, 1)]
        return parts[0], parts[1]

    @property
    def tokens(self) -> Tensor:
        """(N, d) hidden states that are not padding."""
        return self.hidden[self.mask]


@dataclass(frozen=True, repr=False)
class PublicScores:
    """How near public sentences come to firing for public targets that they do not hold.

    Attributes:
        others: (T, S) score of each sentence for each target; -inf where the target's hidden state
            occurs in the sentence.
        own: (T,) score of the target's own sentence.
    """

    others: Tensor
    own: Tensor

    def false_positive_rate(self, threshold: float, batch: int) -> float:
        """Chance that of ``batch`` public sentences one scores above ``threshold``.

        Exact for a batch drawn at random from the public sentences: of a target that h of s
        sentences fire for, ``1 - C(s - h, batch) / C(s, batch)``; the mean over targets.
        """
        allowed = self.others > -torch.inf
        s = allowed.sum(1).double()
        h = (self.others > threshold).sum(1).double()
        n = torch.clamp(s, max=batch)
        missed = (
            torch.lgamma(s - h + 1)
            - torch.lgamma((s - h - n + 1).clamp(min=1.0))
            + torch.lgamma(s - n + 1)
            - torch.lgamma(s + 1)
        ).exp()
        missed = torch.where(s - h >= n, missed, 0.0)
        return float((1 - missed).mean())

    def batch_maxima(self, batch: int, draws: int, generator: torch.Generator) -> Tensor:
        """Scores of random batches of public sentences without and with each target, (n,)."""
        t, s = self.others.shape
        picks = torch.randint(s, (draws, t, batch), generator=generator).to(self.others.device)
        without = self.others.expand(draws, t, s).gather(2, picks).amax(2)
        both = torch.cat([without, torch.maximum(without, self.own)])
        return both[both.isfinite()]


@dataclass(frozen=True, repr=False)
class PublicTargets:
    """Public tokens that are asked for in calibration.

    Attributes:
        sentence: (T,) in which of the public sentences.
        position: (T,) of the token in it.
        hidden: (T, L, d) of their sentences.
        mask: (T, L) bool.
    """

    sentence: Tensor
    position: Tensor
    hidden: Tensor
    mask: Tensor

    @classmethod
    def of(cls, states: PublicStates, seed: int) -> PublicTargets:
        """At most :data:`TARGETS` random tokens."""
        places = states.mask.nonzero()
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(places), generator=generator)[:TARGETS].to(places.device)
        sentence, position = places[order].T
        return cls(sentence, position, states.hidden[sentence], states.mask[sentence])

    @property
    def tokens(self) -> Tensor:
        """(T, d) the tokens v."""
        return tokens_at(self.hidden, self.position)


def public_scores(
    states: PublicStates, asked: PublicTargets, score: Score, rows: Tensor | None, heads: HeadPair
) -> PublicScores:
    """Plays public tokens as targets against all public sentences.

    A score is minus the half-width of the narrowest band around 1 that holds a token's response
    (``"band"``), the largest response (``"ladder"``) or coordinate (``"coordinates"``).

    Args:
        states: whitened, where the attack whitens.
        asked: the targets.
        score: what is read from the crafted layers.
        rows: (T, d) of W_O; None for coordinates.
        heads: of the crafted layers.
    """
    v = asked.tokens
    best = v.new_full((len(v), len(states.hidden)), -torch.inf)
    for seen in heads.attentions(states.hidden, states.mask, v):
        if rows is None:
            target, _, z = seen.coordinates()
            best[:, seen.sentence].scatter_reduce_(0, target, z.abs().amax(1), "amax")
        else:
            z = seen.along(rows)
            near = -(z - 1).abs() if score == "band" else z
            best[seen.targets, seen.sentence] = near.amax(1)
    own = best.gather(1, asked.sentence[:, None])[:, 0]
    return PublicScores(best.masked_fill(_occurs(states, v), -torch.inf), own)


def _occurs(states: PublicStates, v: Tensor) -> Tensor:
    """(T, S) whether a sentence holds the target's hidden state, up to rounding."""
    x = states.hidden.double().flatten(0, 1)
    t = v.double()
    squared = x.square().sum(1) + t.square().sum(1, keepdim=True) - 2 * t @ x.T
    near = squared < 1e-6 * t.square().sum(1, keepdim=True)
    return (near & states.mask.flatten()).view(len(v), *states.mask.shape).any(2)


__all__ = ["PublicScores", "PublicStates", "PublicTargets", "public_scores"]
