"""The attention adversary's heads in closed form (Vu et al. 2024, Sect. 4.2).

Algorithm 1's matrix of head 1 has orthonormal rows, so its pseudo-inverse is its transpose and
``W_K^T W_Q = beta (I - v v^T / |v|^2)``. Head 2's random matrix omits one random direction, which
hardly matters; here it omits none: ``beta I``. Hence, with tokens as rows of X,
``Z1 - Z2 = [softmax beta(G - a a^T) - softmax beta G] X`` with ``G = X X^T`` shared by all targets,
``a = X v / |v|``. This costs O(d) per token for a target, and needs no QR and no pseudo-inverse.
``beta`` multiplies the products: it is the paper's beta over ``sqrt(d_attn)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 20  # pairs of tokens, of all targets, in memory at once (4 MiB for a head)


@dataclass(frozen=True, repr=False)
class _Attention:
    """The attention of both heads in one sentence, for some of the targets.

    Attributes:
        sentence: number of the sentence in the batch.
        places: (n,) positions of its real tokens.
        targets: slice of the g targets.
        tokens: (n, d) hidden states.
        norms: (n,) norms of the hidden states.
        first: (g, n, n) attention of head 1, a row for each query.
        second: (n, n) attention of head 2.
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

        No coordinate is larger than the sum of the attentions' absolute differences, each times
        the norm of its token.

        Returns:
            Numbers of targets (m,), the tokens' indices in ``places`` (m,), and Z1 - Z2 (m, d).
        """
        difference = self.first - self.second
        bound = (difference.abs() @ self.norms) * (1 + 1e-4)
        target, token = (~(bound < at_least)).nonzero(as_tuple=True)
        return target + self.targets.start, token, difference[target, token] @ self.tokens


def attentions(
    hidden: Tensor, mask: Tensor | None, targets: Tensor, beta: float
) -> Iterator[_Attention]:
    """Yield both heads' attention in every sentence, for some of the targets at a time.

    Args:
        hidden: (B, L, d).
        mask: (B, L), 0 where padded, or None.
        targets: (G, d) the tokens v; a zero vector omits nothing.
        beta: factor of the products.
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

    Head 1's query is zero there, so it attends to all tokens equally.

    Args:
        hidden: (G, L, d) of the target sentences.
        mask: (G, L), 0 where padded, or None.
        positions: (G,) of the target tokens.
        beta: factor of the products.
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
    """Return rows of W_O, (G, d), that read 1 from a member's expected response.

    Rows are zero where no response is expected. The arguments are those of
    :func:`expected_response`.
    """
    expected = expected_response(hidden, mask, positions, beta)
    squared = expected.square().sum(1, keepdim=True)
    nonzero = squared > 1e-12 * tokens_at(hidden, positions).square().sum(1, keepdim=True)
    return torch.where(nonzero, expected / squared, 0.0)


def tokens_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return (G, d): one token of each sentence (G, L, d)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]


def bias_gradients(responses: Tensor, thresholds: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of biases ``-threshold`` before a ReLU.

    It is the sum of the upstream gradients of the tokens above each threshold.

    Args:
        responses: (..., n) over tokens.
        thresholds: (K,), or (..., K) for each response.
        upstream: (n,).

    Returns:
        (..., K). Two thresholds that the same tokens exceed get exactly the same number. NaN where
        a response is NaN.
    """
    above = responses[..., None, :] > thresholds[..., None]
    sums = torch.where(above, upstream, 0.0).sum(-1)
    return sums.masked_fill(responses.isnan().any(-1, keepdim=True), torch.nan)


def coordinate_gradients(
    attentions: Iterable[_Attention], gammas: Tensor, weights: Tensor, targets: int, d: int
) -> Tensor:
    """Return the gradient of biases ``-gamma`` after a W_O of both signs of every coordinate.

    Args:
        attentions: the attention in the sentences of a batch.
        gammas: (R,) for every row of W_O.
        weights: (B, L) upstream gradients.
        targets: number of targets, G.
        d: width of the hidden states.

    Returns:
        (B, G, 2 d R).
    """
    gradient = weights.new_zeros((len(weights), targets, 2, d, len(gammas)))
    lowest = float(gammas.min())
    for attention in attentions:
        target, token, z = attention.coordinates(lowest)
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
    """How an :class:`AttentionMembership` crafts and reads its layers.

    Attributes:
        beta: factor of the products: the paper's beta over ``sqrt(d_attn)``. ``"authors"``:
            2 / sqrt(d - 1), the value of their code. ``"auto"``: ``BETA``, and
            ``REPLACED_BETA`` against a defence that replaces batches.
        whiten: False for the model's own coordinates, as in the paper.
        score: how the biases' gradient is read. ``"band"``: the narrowest band around 1 that holds
            a token's response along the expected one, from the difference of the gradients of its
            two edges. ``"coordinates"``: the paper's rows, and the highest gamma that any of them
            exceeds.
        widths: half-widths w of the bands. ``"auto"``: ``WIDTHS``; against a defence that replaces
            batches ``REPLACED_WIDTHS``. Against one that acts on gradients the band nearest to
            ``DEFENDED_WIDTH`` is crafted alone: rungs share the clip norm.
    """

    beta: float | Literal["authors", "auto"] = "auto"
    whiten: bool = True
    score: Literal["band", "coordinates"] = "band"
    widths: Sequence[float] | Literal["auto"] = "auto"
