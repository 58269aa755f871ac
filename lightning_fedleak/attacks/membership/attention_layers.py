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

The output of the layer differs by ``Z1 - Z2`` where a token equals the target. A row of the output
matrix W_O projects this *response* to a number, and a gradient shows whether it lies in a band
around a member's response, which is scaled to 1. :func:`public_scores` scores public sentences for
public tokens as targets that they do not contain, by which the decision is calibrated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states

PAIRS_AT_ONCE = 1 << 20  # pairs of tokens, times targets, in memory at once (4 MiB per head)


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention of both heads in one sentence, for some of the targets.

    Attributes:
        sentence: The index of the sentence in the batch.
        places: (n,) the positions of its real tokens.
        targets: The slice of the g targets among all targets.
        tokens: (n, d) the hidden states of the real tokens.
        first: (g, n, n) the attention of head 1, one row per query, for each target.
        second: (n, n) the attention of head 2, which is the same for all targets.
    """

    sentence: int
    places: Tensor
    targets: slice
    tokens: Tensor
    first: Tensor
    second: Tensor

    def project(self, rows: Tensor) -> Tensor:
        """Return Z1 - Z2 along each target's row of ``rows`` (G, d), as (g, n)."""
        projections = rows[self.targets] @ self.tokens.T
        return (self.first @ projections[..., None])[..., 0] - projections @ self.second.T


def attentions(
    hidden: Tensor, mask: Tensor | None, targets: Tensor, beta: float
) -> Iterator[Attention]:
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
        products *= beta
        second = products.softmax(-1)
        a = units @ x.T
        size = max(1, PAIRS_AT_ONCE // (n * n))
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            v = a[part, :, None]
            logits = torch.baddbmm(products.expand(len(v), n, n), v, v.mT, beta=1.0, alpha=-beta)
            yield Attention(b, places, part, x, logits.softmax(-1), second)


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


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of the crafted layers of an :class:`AttentionMembership` and of its decision.

    Attributes:
        beta: The factor of the products: the paper's beta over ``sqrt(d_attn)``. ``"auto"``:
            ``BETA``, and ``REPLACED_BETA`` against a defence that replaces words, such as
            token-level LDP; these constants are in
            :mod:`~lightning_fedleak.attacks.membership.attention`.
        whiten: Whether hidden states are whitened. False uses them as they are, as in the paper.
        widths: The half-widths of the bands, in units of a member's expected response.
            ``"auto"``: ``WIDTHS``, or ``REPLACED_WIDTHS`` against a defence that replaces words.
            Against a defence that acts on gradients, only the band nearest to ``DEFENDED_WIDTH``
            is crafted, because clipping by norm would divide the norm among all bands.
    """

    beta: float | Literal["auto"] = "auto"
    whiten: bool = True
    widths: Sequence[float] | Literal["auto"] = "auto"


MAX_TARGETS = 512  # public tokens that serve as targets; more are more stable and slower

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


def public_scores(states: PublicStates, sentence: Tensor, position: Tensor, beta: float) -> Tensor:
    """Return the scores (T, S) of all public sentences for T public tokens as targets.

    A score is minus the half-width of the narrowest band around 1 that holds the response of a
    token along the target's row, and -inf if the target's hidden state occurs in the sentence.

    Args:
        states: The public states, whitened if the attack whitens.
        sentence: (T,) the sentence of each target.
        position: (T,) its position there.
        beta: The factor of the products.
    """
    v = states.hidden[sentence, position]
    rows = matched_rows(states.hidden[sentence], states.mask[sentence], position, beta)
    scores = v.new_full((len(v), len(states.hidden)), -torch.inf)
    for attention in attentions(states.hidden, states.mask, v, beta):
        near = -(attention.project(rows) - 1).abs()
        scores[attention.targets, attention.sentence] = near.amax(1)
    return scores.masked_fill(sentences_with(states, v), -torch.inf)


def sentences_with(states: PublicStates, v: Tensor) -> Tensor:
    """Return (T, S) whether a sentence holds the target's hidden state, up to rounding."""
    x = states.hidden.double().flatten(0, 1)
    t = v.double()
    squared = x.square().sum(1) + t.square().sum(1, keepdim=True) - 2 * t @ x.T
    near = squared < 1e-6 * t.square().sum(1, keepdim=True)
    return (near & states.mask.flatten()).view(len(v), *states.mask.shape).any(2)


def false_positive_rate(scores: Tensor, threshold: float, batch: int) -> float:
    """Return the chance that one of ``batch`` public sentences scores above ``threshold``.

    It is exact for a random batch of the public sentences without the target. If h of s
    sentences score above the threshold, the chance is ``1 - C(s - h, batch) / C(s, batch)``.
    The result is the mean over the targets.

    Args:
        scores: (T, S) from :func:`public_scores`.
        threshold: The score above which a sentence counts as a member.
        batch: The number of sentences in a client's batch.
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
    miss_chance = torch.where(s - h >= n, miss_chance, 0.0)
    return float((1 - miss_chance).mean())
