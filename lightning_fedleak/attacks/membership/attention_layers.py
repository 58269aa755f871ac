"""The attention adversary's heads in closed form (Vu et al. 2024, 4.2), and their calibration.

The server adds a self-attention layer with two heads (Algorithm 1). With a large enough factor
beta, each token attends nearly only to itself in head 2. Head 1 does the same, but does not see the
direction of the target token v. So the outputs Z1 and Z2 of the heads differ at v, and hardly
elsewhere. The output matrix W_O passes the difference on, and the gradient of a bias behind it
shows whether any token of the batch exceeds a threshold gamma.

In Algorithm 1, the matrix of head 1 has orthonormal rows. So its pseudo-inverse is its transpose,
and the product of its key and query matrices is ``W_K^T W_Q = beta (I - v v^T / |v|^2)``. The
matrix of head 2 omits one random direction, which has little effect; here it omits none:
``beta I``. With tokens as rows of X,
``Z1 - Z2 = [softmax beta(G - a a^T) - softmax beta G] X`` with ``G = X X^T`` shared by all targets,
``a = X v / |v|``. For a sentence of n tokens this costs O(d + n) per token and target, and needs no
QR and no pseudo-inverse. ``beta`` here is the paper's beta over ``sqrt(d_attn)``.

The calibration on public text chooses gamma. The output of the layer differs by ``Z1 - Z2`` where a
token equals the target. A row of the output matrix W_O projects this *response* to a number. A
gradient shows whether it exceeds a threshold gamma (score ``"coordinates"``), or lies in a band
around a member's response, which is scaled to 1 (score ``"band"``).

:func:`calibrate` fits the whitening, scores public sentences for public tokens as targets that they
do not contain, and chooses the easiest threshold whose false positive rate is low enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space import Whitening, fit_whitening
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.validate import check_integer

PAIRS_AT_ONCE = 1 << 20  # pairs of tokens, times targets, in memory at once (4 MiB per head)


@dataclass(frozen=True, repr=False)
class _Attention:
    """The attention of both heads in one sentence, for some of the targets.

    Attributes:
        sentence: The index of the sentence in the batch.
        places: (n,) the positions of its real tokens.
        targets: The slice of the g targets among all targets.
        tokens: (n, d) the hidden states of the real tokens.
        norms: (n,) the norms of the hidden states.
        first: (g, n, n) the attention of head 1, one row per query, for each target.
        second: (n, n) the attention of head 2, which is the same for all targets.
    """

    sentence: int
    places: Tensor
    targets: slice
    tokens: Tensor
    norms: Tensor
    first: Tensor
    second: Tensor

    def project(self, rows: Tensor) -> Tensor:
        """Return Z1 - Z2 along each target's row of ``rows`` (G, d), as (g, n)."""
        projections = rows[self.targets] @ self.tokens.T
        return (self.first @ projections[..., None])[..., 0] - projections @ self.second.T

    def coordinates(self, at_least: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return Z1 - Z2 in all coordinates, for tokens where one may exceed ``at_least``.

        Other tokens are skipped. They are found by a bound: no coordinate is larger than the sum of
        the attentions' absolute differences, each times the norm of its token.

        Returns:
            Indices of targets (m,), the tokens' indices in ``places`` (m,), and Z1 - Z2 (m, d).
        """
        difference = self.first - self.second
        bound = (difference.abs() @ self.norms) * (1 + 1e-4)  # more than rounding in float32
        target, token = (~(bound < at_least)).nonzero(as_tuple=True)
        return target + self.targets.start, token, difference[target, token] @ self.tokens


def attentions(
    hidden: Tensor, mask: Tensor | None, targets: Tensor, beta: float
) -> Iterator[_Attention]:
    """Yield both heads' attention in every sentence, for some of the targets at a time.

    Args:
        hidden: (B, L, d) the hidden states of a batch.
        mask: (B, L), 0 at padding, or None.
        targets: (G, d) the tokens v; a zero vector omits nothing.
        beta: The factor of the products.
    """
    target_norms = targets.norm(dim=1, keepdim=True)
    tiny = torch.finfo(targets.dtype).tiny
    units = torch.where(target_norms > 0, targets / target_norms.clamp(min=tiny), 0.0)
    for b in range(len(hidden)):
        places, x = torch.arange(hidden.shape[1], device=hidden.device), hidden[b]
        if mask is not None:
            places = places[mask[b].to(hidden.device) != 0]
            x = x[places]
        n = len(places)
        if n == 0:
            continue
        products = x @ x.T
        norms = products.diagonal().clamp(min=0.0).sqrt()
        products *= beta
        second = products.softmax(-1)
        a = units @ x.T
        size = max(1, PAIRS_AT_ONCE // (n * n))
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            v = a[part, :, None]
            logits = torch.baddbmm(products.expand(len(v), n, n), v, v.mT, beta=1.0, alpha=-beta)
            yield _Attention(b, places, part, x, norms, logits.softmax(-1), second)


def expected_response(
    hidden: Tensor, mask: Tensor | None, positions: Tensor, beta: float
) -> Tensor:
    """Return Z1 - Z2 at the target token in its own sentence, ``mean(X) - Z2``, (G, d).

    The query of head 1 is zero there, so it attends to all tokens equally.

    Args:
        hidden: (G, L, d) the hidden states of the target sentences.
        mask: (G, L), 0 at padding, or None.
        positions: (G,) the positions of the target tokens.
        beta: The factor of the products.
    """
    visible = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask is not None:
        visible = mask.to(hidden.device) != 0
    x = hidden.masked_fill(~visible[..., None], 0.0)
    logits = (x @ tokens_at(x, positions)[..., None])[..., 0]
    attention = (beta * logits).masked_fill(~visible, -torch.inf).softmax(-1)
    uniform = visible.to(x.dtype) / visible.sum(1, keepdim=True)
    return ((uniform - attention)[:, None] @ x)[:, 0]


def matched_rows(hidden: Tensor, mask: Tensor | None, positions: Tensor, beta: float) -> Tensor:
    """Return rows of W_O, (G, d), whose product with a member's expected response is 1.

    A row is zero if the expected response is below 1e-6 of the target token's norm. The arguments
    are those of :func:`expected_response`.
    """
    expected = expected_response(hidden, mask, positions, beta)
    squared = expected.square().sum(1, keepdim=True)
    nonzero = squared > 1e-12 * tokens_at(hidden, positions).square().sum(1, keepdim=True)
    return torch.where(nonzero, expected / squared, 0.0)


def tokens_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return (G, d) the hidden state at one position of each sentence (G, L, d)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]


def bias_gradients(responses: Tensor, thresholds: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of biases ``-threshold`` before a ReLU.

    It is the sum of the upstream gradients of the tokens whose response exceeds each threshold.

    Args:
        responses: (..., n) the responses of n tokens.
        thresholds: (K,), or (..., K) for each set of responses.
        upstream: (n,) the upstream gradients of the tokens.

    Returns:
        The gradient (..., K). It is exactly equal for two thresholds that the same tokens exceed,
        and NaN if a response is NaN.
    """
    above = responses[..., None, :] > thresholds[..., None]
    sums = torch.where(above, upstream, 0.0).sum(-1)
    return sums.masked_fill(responses.isnan().any(-1, keepdim=True), torch.nan)


def coordinate_gradients(
    attentions: Iterable[_Attention], gammas: Tensor, weights: Tensor, targets: int, d: int
) -> Tensor:
    """Return the gradient of biases ``-gamma`` if W_O reads every coordinate with both signs.

    Args:
        attentions: The attention in the sentences of a batch.
        gammas: (R,) the thresholds for every row of W_O.
        weights: (B, L) the upstream gradients.
        targets: The number of targets, G.
        d: The width of the hidden states.

    Returns:
        The gradient (B, G, 2 d R).
    """
    gradient = weights.new_zeros((len(weights), targets, 2, d, len(gammas)))
    min_gamma = float(gammas.min())
    for attention in attentions:
        target, token, z = attention.coordinates(min_gamma)
        if len(target) == 0:
            continue
        weight = weights[attention.sentence, attention.places][token][:, None]
        for level, gamma in enumerate(gammas):
            for sign in (0, 1):
                above = -z > gamma if sign else z > gamma
                part = torch.where(z.isnan(), torch.nan, torch.where(above, weight, 0.0))
                gradient[attention.sentence, :, sign, :, level].index_add_(0, target, part)
    return gradient.flatten(2)


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of the crafted layers of an :class:`AttentionMembership` and of its decision.

    Attributes:
        beta: The factor of the products: the paper's beta over ``sqrt(d_attn)``. ``"authors"``:
            2 / sqrt(d - 1), the value of their code. ``"auto"``: ``BETA``, and
            ``REPLACED_BETA`` against a defence that replaces words, such as token-level LDP; these
            constants are in :mod:`~lightning_fedleak.attacks.membership.attention`.
        whiten: Whether hidden states are whitened. False uses them as they are, as in the paper.
        score: How a score follows from the gradient of the biases. ``"band"``: by the narrowest
            band around 1 that holds a token's response, in units of a member's expected response
            (:func:`matched_rows`). The gradient of a band is the difference of the gradients of its
            two edges. ``"coordinates"``: by the highest gamma that a response along any of the
            paper's rows exceeds.
        widths: The half-widths of the bands. ``"auto"``: ``WIDTHS``, or ``REPLACED_WIDTHS`` against
            a defence that replaces words. Against a defence that acts on gradients, only the band
            nearest to ``DEFENDED_WIDTH`` is crafted, because clipping by norm would divide the norm
            among all bands.
    """

    beta: float | Literal["authors", "auto"] = "auto"
    whiten: bool = True
    score: Literal["band", "coordinates"] = "band"
    widths: Sequence[float] | Literal["auto"] = "auto"


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
