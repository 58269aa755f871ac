"""The attention adversary's heads in closed form (Vu et al. 2024, Sect. 4.2).

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
