"""What the attention adversary learns from public text: whitening, how often it fires, gamma."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.membership.attention_layers import (
    AttentionDesign,
    HeadPair,
    Score,
    token_rows,
    tokens_at,
)
from lightning_fedleak.attacks.membership.whitening import Whitening, fit_whitening
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.model_runs import hidden_states

TARGETS = 512
"""Public tokens that are asked for in calibration, at most."""

WIDE_ENOUGH = 0.1
"""Half-width that holds a member's response in bfloat16 too. Wider bands would decide at the same
rate on text like the public one, but fire on text of another kind; they serve to rank."""


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
