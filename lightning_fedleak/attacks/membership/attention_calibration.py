"""Calibration of the attention adversary on public text: whitening, false positives, gamma.

This adversary (Vu et al. 2024) adds an attention layer whose output differs by ``Z1 - Z2`` where a
token equals the target. A row of the output matrix W_O projects this *response* to a number. A
gradient shows whether it exceeds a threshold gamma (score ``"coordinates"``), or lies in a band
around a member's response, which is scaled to 1 (score ``"band"``).

:func:`calibrate` fits the whitening, scores public sentences for public tokens as targets that they
do not contain, and chooses the easiest threshold whose false positive rate is low enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.membership.attention_layers import attentions, matched_rows
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space import Whitening, fit_whitening
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.validate import check_integer

MAX_TARGETS = 512  # public tokens that serve as targets; more are more stable and slower

CALIBRATED_LEVELS = 16  # gammas of a ladder over coordinates; more give a finer score

WIDE_ENOUGH = 0.1
"""The half-width, in units of a member's response, that holds it in bfloat16 too (.06 measured).

Wider bands have the same false positive rate on text like the public text, but a higher one on
other text. So they only rank, and do not decide."""


@dataclass(frozen=True, repr=False)
class PublicStates:
    """The hidden states of S public texts.

    Attributes:
        hidden: (S, L, d), at least float32.
        mask: (S, L) bool, False at padding.
    """

    hidden: Tensor
    mask: Tensor

    @classmethod
    def sample(
        cls, anatomy: Anatomy, layer: int, text: PublicText, length: int, tokens: int, seed: int
    ) -> PublicStates:
        """Return states of random texts, cut to ``length``, with about ``tokens`` tokens in all."""
        generator = torch.Generator().manual_seed(seed)
        order = text.draw(len(text), generator).tolist()
        ends = torch.tensor([min(length, len(text.sentences[i])) for i in order]).cumsum(0)
        n_texts = int((ends < tokens).sum()) + 1
        batch = text.rows(order[:n_texts], max(2, length), generator)
        assert batch.attention_mask is not None
        hidden = hidden_states(anatomy, layer, batch.input_ids, batch.attention_mask)
        real = batch.attention_mask.to(hidden.device) != 0
        return cls(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), real)

    def whiten(self, whitening: Whitening) -> PublicStates:
        """Return the same states, whitened."""
        return PublicStates(whitening(self.hidden), self.mask)

    def draw_tokens(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the sentences and positions of at most :data:`MAX_TARGETS` random tokens."""
        places = self.mask.nonzero()
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(places), generator=generator)[:MAX_TARGETS].to(places.device)
        sentence, position = places[order].T
        return sentence, position

    @property
    def tokens(self) -> Tensor:
        """Return (N, d) the hidden states of all real tokens."""
        return self.hidden[self.mask]


@dataclass(frozen=True, repr=False)
class _PublicScores:
    """The scores of S public sentences for T public targets.

    Attributes:
        scores_without: (T, S) the score of each sentence for each target; -inf if the target's
            hidden state occurs in the sentence.
        scores_with: (T,) the score of the sentence from which the target is.
    """

    scores_without: Tensor
    scores_with: Tensor

    def false_positive_rate(self, threshold: float, batch: int) -> float:
        """Return the chance that one of ``batch`` public sentences scores above ``threshold``.

        It is exact for a random batch of the public sentences without the target. If h of s
        sentences score above the threshold, the chance is ``1 - C(s - h, batch) / C(s, batch)``.
        The result is the mean over the targets.
        """
        allowed = self.scores_without > -torch.inf
        s = allowed.sum(1).double()
        h = (self.scores_without > threshold).sum(1).double()
        n = torch.clamp(s, max=batch)
        miss_chance = (
            torch.lgamma(s - h + 1)
            - torch.lgamma((s - h - n + 1).clamp(min=1.0))
            + torch.lgamma(s - n + 1)
            - torch.lgamma(s + 1)
        ).exp()
        miss_chance = torch.where(s - h >= n, miss_chance, 0.0)
        return float((1 - miss_chance).mean())

    def batch_maxima(self, batch: int, draws: int, generator: torch.Generator) -> Tensor:
        """Return (n,) the maximal scores of random public batches, without and with each target."""
        t, s = self.scores_without.shape
        picks = torch.randint(s, (draws, t, batch), generator=generator).to(
            self.scores_without.device
        )
        maxima_without = self.scores_without.expand(draws, t, s).gather(2, picks).amax(2)
        all_maxima = torch.cat([maxima_without, torch.maximum(maxima_without, self.scores_with)])
        return all_maxima[all_maxima.isfinite()]


def public_scores(
    states: PublicStates, places: tuple[Tensor, Tensor], rows: Tensor | None, beta: float
) -> _PublicScores:
    """Return the scores of all public sentences for public tokens as targets.

    With rows, a score is minus the half-width of the narrowest band around 1 that holds the
    response of a token along the target's row. Without rows, it is the largest coordinate.

    Args:
        states: The public states, whitened if the attack whitens.
        places: The sentence (T,) and the position (T,) in it of each target.
        rows: (T, d) the rows of W_O; None for coordinates.
        beta: The factor of the products.
    """
    v = states.hidden[places]
    best = v.new_full((len(v), len(states.hidden)), -torch.inf)
    for attention in attentions(states.hidden, states.mask, v, beta):
        if rows is None:
            target, _, z = attention.coordinates()
            best[:, attention.sentence].scatter_reduce_(0, target, z.abs().amax(1), "amax")
        else:
            near = -(attention.project(rows) - 1).abs()
            best[attention.targets, attention.sentence] = near.amax(1)
    scores_with = best.gather(1, places[0][:, None])[:, 0]
    return _PublicScores(best.masked_fill(_sentences_with(states, v), -torch.inf), scores_with)


def _sentences_with(states: PublicStates, v: Tensor) -> Tensor:
    """Return (T, S) whether a sentence holds the target's hidden state, up to rounding."""
    x = states.hidden.double().flatten(0, 1)
    t = v.double()
    squared = x.square().sum(1) + t.square().sum(1, keepdim=True) - 2 * t @ x.T
    near = squared < 1e-6 * t.square().sum(1, keepdim=True)
    return (near & states.mask.flatten()).view(len(v), *states.mask.shape).any(2)


@dataclass(frozen=True, repr=False)
class Calibration:
    """The whitening and the thresholds from public text.

    Attributes:
        whitening: The whitening of hidden states; None without.
        gammas: (levels,) the gammas of coordinates, hardest to exceed first; empty for bands.
        level: The index of the gamma or band that decides: the easiest one with at most the
            ``false_positive_rate`` on public batches, or the hardest one if there is none.
    """

    whitening: Whitening | None
    gammas: Tensor
    level: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the numbers for a checkpoint."""
        tensors = {"gammas": self.gammas, "level": torch.tensor(self.level)}
        whitening = {} if self.whitening is None else vars(self.whitening)
        return tensors | {f"whitening.{name}": tensor for name, tensor in whitening.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Restore what :meth:`tensors` returned."""
        mean, matrix = (tensors.get(f"whitening.{name}") for name in ("mean", "matrix"))
        whitening = None if mean is None or matrix is None else Whitening(mean, matrix)
        return cls(whitening, tensors["gammas"], int(tensors["level"]))


def calibrate(
    states: PublicStates,
    *,
    beta: float,
    whiten: bool,
    widths: Sequence[float] | None,
    batch: int,
    false_positive_rate: float,
    seed: int,
) -> Calibration:
    """Return whitening and gamma from the hidden states of public text.

    With whitening, gamma is calibrated on one half of the states, whitened by the other half,
    because whitening by the own covariance moves states nearer to their mean than other text.

    Args:
        states: The hidden states of public text.
        beta: The factor of the products.
        whiten: Whether to whiten hidden states.
        widths: The half-widths of bands; None for gammas of coordinates.
        batch: The number of sentences in a client's batch.
        false_positive_rate: The largest rate of public batches that score above the threshold.
        seed: The seed of the targets.

    Raises:
        ValueError: too few tokens to whiten, or too few texts to calibrate.
    """
    whitening = fit_whitening(states.tokens) if whiten else None
    if whiten:
        fitted, states = (PublicStates(states.hidden[i::2], states.mask[i::2]) for i in (0, 1))
        states = states.whiten(fit_whitening(fitted.tokens))
    name, hint = "public texts to calibrate on", "with whiten=True give twice as many"
    check_integer(name, len(states.hidden), at_least=batch + 1, hint=hint)
    sentence, position = states.draw_tokens(seed)
    rows, gammas, n_decisive = None, torch.zeros(0), CALIBRATED_LEVELS
    if widths is not None:
        rows = matched_rows(states.hidden[sentence], states.mask[sentence], position, beta)
        n_decisive = max(1, sum(width <= WIDE_ENOUGH for width in widths))
    scores = public_scores(states, (sentence, position), rows, beta)
    if widths is None:
        gammas = _quantiles(scores, batch, seed)
    thresholds = gammas.tolist() if widths is None else [-w for w in widths]
    rates = [scores.false_positive_rate(threshold, batch) for threshold in thresholds]
    decisive = [i for i, rate in enumerate(rates[:n_decisive]) if rate <= false_positive_rate]
    return Calibration(whitening, gammas, max(decisive, default=0))


def _quantiles(scores: _PublicScores, batch: int, seed: int) -> Tensor:
    """Return evenly spaced quantiles of the maxima of public batches with and without targets."""
    maxima = scores.batch_maxima(batch, 8, torch.Generator().manual_seed(seed))
    maxima = maxima.sort(descending=True).values.cpu()
    gammas = maxima[torch.linspace(0, len(maxima) - 1, CALIBRATED_LEVELS).long()].float()
    gammas[0] *= 0.999  # no score exceeds the maximum itself
    return gammas


def lemma_gamma(states: PublicStates, beta: float) -> float:
    """Return 2 Delta-bar = ``4 M (l - 1) exp(2 / l - beta Delta)`` of public text (Lemma 2).

    Delta is the separation (Definition 2), M the largest norm of a token, and l the length of the
    longest sentence. The result is infinite if it overflows.
    """
    delta, longest, largest = math.inf, 1, 0.0
    for x, keep in zip(states.hidden.double(), states.mask, strict=True):
        x = x[keep]
        products = x @ x.T
        squares = products.diagonal().clone()
        longest, largest = max(longest, len(x)), max(largest, float(squares.max()))
        if len(x) > 1:
            products.fill_diagonal_(-torch.inf)
            delta = min(delta, float((squares - products.amax(1)).min()))
    try:
        decay = math.exp(2 / longest - beta * delta)
    except OverflowError:
        return math.inf
    return 4 * math.sqrt(largest) * (longest - 1) * decay
